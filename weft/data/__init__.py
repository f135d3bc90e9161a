"""Text to token files to ordered batches."""
