"""Saved runs: safetensors by logical name and box, a JSON index, checksums."""
