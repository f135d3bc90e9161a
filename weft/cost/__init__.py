"""Logical view of a model: what it computes and holds, whatever it runs on. No torch."""
