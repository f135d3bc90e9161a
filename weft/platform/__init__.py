"""One file a device family."""
