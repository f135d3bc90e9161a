"""Muon: momentum whose whole matrices are made orthogonal; AdamW for the rest."""
