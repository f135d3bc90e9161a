"""Short real trials of the planner's best few plans, and what they teach about the others."""
