"""Everything that backward reads is kept."""

from __future__ import annotations

from weft.recompute.mode import Mode

MODE = Mode(name="off", order=0, keeps="everything that backward reads", drops="nothing")
