"""Measurements that people can repeat. Never run as tests: machines differ and are shared."""
