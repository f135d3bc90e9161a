"""From what was asked to a plan that works."""
