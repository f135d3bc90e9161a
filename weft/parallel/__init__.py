"""How one model is spread over ranks."""
