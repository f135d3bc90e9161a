"""What only a card can show, in one command; ``python -m benchmarks.gpu --help``."""
