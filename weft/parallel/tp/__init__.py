"""One-dimensional tensor parallelism with sequence parallelism (arXiv 1909.08053, 2205.05198)."""
