"""What is kept, recomputed or moved away to save memory."""
