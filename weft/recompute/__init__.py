"""What backward computes again instead of keeping it (arXiv 1604.06174), or keeps elsewhere: one
file a mode."""
