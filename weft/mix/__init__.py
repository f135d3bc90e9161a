"""What mixing chips costs, measured in the lab: the parts alone, then together."""
