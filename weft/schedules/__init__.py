"""Pipeline schedules as data: one generator a file, each a pure function to lists of actions."""
