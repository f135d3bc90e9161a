"""How threads of one operation wait for each other."""

import os

SPINS = "10000"
"""How often they look whether the others are done before they give their core to somebody else. GNU
OpenMP's own number is 30 times that: one rank on two cores beside two busy processes then took 1.4
to 17 s a step of the debug model, with this one 0.6 to 1.2 s; alone as long as ever."""


def give_up_cores_soon() -> None:
    """Of this process and those that it starts, where nobody said otherwise. Before PyTorch, which
    brings OpenMP, is imported."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
