"""Which numbers a stage computes with."""
