"""Start the processes of a job and watch them."""
