"""Run a pipeline's schedule: forwards, backwards, and what travels between stages."""
