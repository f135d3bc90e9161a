"""One part, in a process of its own: ``benchmarks.gpu.child PART DEVICE NUMBER FOLDER``."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from benchmarks.gpu.__main__ import THEMES
from benchmarks.gpu.part import DisprovedError, Found, Here


def main() -> None:
    """Run it. The last line on standard error says what stopped it."""
    name, device, number, folder = sys.argv[1:]
    room = Path(folder) / "room"
    room.mkdir()
    found = Found(Path(folder) / "found.json")
    try:
        THEMES[name].run(Here(device=device, folder=room, number=int(number)), found)
    except DisprovedError as error:
        sys.exit(f"not so: {error}")
    except Exception as error:  # noqa: BLE001  (whatever it is, the table says it)
        traceback.print_exc()
        sys.exit(
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )


if __name__ == "__main__":
    main()
