"""Schedules made for the plan: from times of stages, borders, and room for microbatches."""
