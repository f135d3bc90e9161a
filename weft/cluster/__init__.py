"""Chips and machines: what a plan may use."""
