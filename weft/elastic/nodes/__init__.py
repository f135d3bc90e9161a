"""A job on several machines, each guarded by a command of its own."""
