"""Context parallelism: ranks that compute different places of the same samples."""
