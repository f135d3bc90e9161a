"""Expert parallelism: ranks that compute different samples and hold different experts."""
