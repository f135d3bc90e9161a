"""``python -m weft`` is the ``weft`` command: what torchrun's ``-m`` starts."""

import os
import signal
import sys
from types import FrameType

from weft.config.errors import STOPPED
from weft.config.imports import uncollected


def start() -> None:
    """Run the command; Ctrl-C also ends it in words while Python still imports it, and training is
    stopped alike by the signal that job systems send."""
    if sys.argv[1:2] == ["train"]:
        signal.signal(signal.SIGTERM, _interrupt)  # until it has handlers of its own
    try:
        with uncollected():
            from weft.cli.main import main
        main()
    except KeyboardInterrupt:
        sys.stderr.write("stopped before it began\n")
        sys.stderr.flush()
        os._exit(STOPPED)  # Python would end by the signal, where that came while it made a class


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    start()
