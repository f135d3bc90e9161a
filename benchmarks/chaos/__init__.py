"""Faults by appointment in real training runs, and what became of each."""
