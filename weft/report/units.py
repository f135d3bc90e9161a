"""Numbers with their units, as people read them."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """``9s``, ``2m10s``, ``1h05m``, ``3d04h``: two units at most."""
    if not math.isfinite(seconds):
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // (24 * 60)}d{minutes // 60 % 24:02d}h"


def percent_or_na(part: float | None) -> str:
    """``31%``, ``3.1%``, or ``n/a`` for a part that is not known."""
    if part is None or not math.isfinite(part):
        return "n/a"
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def nats(loss: float) -> str:
    """``4.5678``, and ``1.235e+09`` for what only a run that diverges has."""
    return f"{loss:.4f}" if not abs(loss) >= 1e9 else f"{loss:.4g}"


def seconds(number: float) -> str:
    """``12.3 s`` or ``4.56 ms``."""
    return f"{number:.3g} s" if number >= 1 else f"{number * 1e3:.3g} ms"


def gib(num_bytes: float) -> str:
    """Bytes in memory or a file: ``3.2 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def sent(num_bytes: float) -> str:
    """Bytes over links, in powers of ten as links are: ``1.86 TB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} PB"


def flop_rate(number: float) -> str:
    """FLOP/s of a chip or of many: ``989 TFLOP/s``."""
    for unit in ("M", "G", "T", "P"):
        if number < 999.5e6 or unit == "P":
            break
        number /= 1000
    return f"{number / 1e6:.3g} {unit}FLOP/s"


def count(number: float) -> str:
    """Large numbers: ``6.5 M``."""
    for unit in ("", " k", " M", " B"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"


def some(number: int, noun: str) -> str:
    """1 sample, 2 samples."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
