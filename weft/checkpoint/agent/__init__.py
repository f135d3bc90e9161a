"""A process of each machine that writes checkpoints while its ranks train."""
