"""Play a plan's schedule in modelled time: who does what when, who idles, who holds how much."""
