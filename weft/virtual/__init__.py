"""Chips that only take time: real processes that sleep as long as a model says."""
