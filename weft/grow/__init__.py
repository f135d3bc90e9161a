"""Larger models from the weights of a smaller one: wider, deeper, with experts."""
