"""Linear layers whose products are made in eight bits."""
