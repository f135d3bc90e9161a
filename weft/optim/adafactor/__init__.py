"""Adafactor: running means of squared gradients by row and column alone."""
