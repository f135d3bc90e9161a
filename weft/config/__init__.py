"""What was asked: typed sections, YAML, overrides, errors."""
