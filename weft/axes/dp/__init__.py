"""Data parallelism: ranks that compute different samples."""
