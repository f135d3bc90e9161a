"""AdamW: running means of the gradient and of its square, decay apart."""
