"""Weft around a training loop of one's own, from Python."""
