"""Build a run from a plan, and train it."""
