"""Where numbers or times differ, and from what: verify, compare, calibrate."""
