"""Expert parallelism at work: tokens go to the ranks that have their experts, and back."""
