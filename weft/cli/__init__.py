"""The weft command, one file a command."""
