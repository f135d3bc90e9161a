"""Weft trains one large model on whatever accelerators a team has."""
