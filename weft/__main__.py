"""``python -m weft`` is the ``weft`` command: what torchrun's ``-m`` starts."""

import os
import sys

from weft.config.errors import STOPPED
from weft.config.imports import uncollected


def start() -> None:
    """Run the command; Ctrl-C also ends it in words while Python still imports it."""
    try:
        with uncollected():
            from weft.cli.main import main
        main()
    except KeyboardInterrupt:
        sys.stderr.write("stopped before it began\n")
        sys.stderr.flush()
        os._exit(STOPPED)  # Python would end by the signal, where that came while it made a class


if __name__ == "__main__":
    start()
