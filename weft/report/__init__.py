"""What people look at: metrics on disk, progress on a terminal, and the page of a run."""
