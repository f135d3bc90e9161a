"""Checkpoints in storage that is reached over a network: object stores and SFTP servers."""
