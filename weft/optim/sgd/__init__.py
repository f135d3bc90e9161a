"""Stochastic gradient descent with momentum."""
