"""Context parallelism at work."""
