"""Whether a device can do what PyTorch does not tell of in another way."""

from __future__ import annotations

from collections.abc import Callable

import torch


def works(trial: Callable[[], bool]) -> bool:
    """What ``trial`` finds; False where the device has no kernel for it, or no such numbers.

    PyTorch's backends say that by errors of several kinds, most of them plain ones. Too little
    memory says nothing of the kind: it is raised.
    """
    try:
        return trial()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
