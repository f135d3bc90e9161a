"""GPT-2: LayerNorm, learned positions, GELU, tied head."""
