"""A vision transformer whose experts are chosen by a sample's task: see ``train.py``."""
