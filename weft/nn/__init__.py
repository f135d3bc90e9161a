"""Blocks of models that know no devices."""
