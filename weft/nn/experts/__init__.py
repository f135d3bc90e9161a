"""A feed-forward of experts: a gate, products by expert, and the way to them and back."""
