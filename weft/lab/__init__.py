"""Rehearse a mixed cluster on one machine, with limits that the kernel enforces."""
