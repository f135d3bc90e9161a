"""Sites far apart: each trains for itself, and now and then they become one model."""
