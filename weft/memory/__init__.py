"""Tensors that a rank keeps elsewhere than on the device that computes: host memory, and disk."""
