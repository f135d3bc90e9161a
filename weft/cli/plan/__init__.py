"""``weft plan``: what would run, why, and what to expect of it."""
