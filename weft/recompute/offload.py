"""What layers keep for backward, in the memory of the host meanwhile: nothing is computed again.

It goes while the next layers compute and comes back while those behind them do (arXiv 2101.06840
keeps optimizer state there, and arXiv 1602.08124 what layers keep).
"""

from __future__ import annotations

from weft.recompute.mode import Mode

MODE = Mode(
    name="offload",
    order=6,
    keeps="nothing on the device",
    drops="nothing: what backward reads waits in the memory of the host",
    waits="host",
    covers=frozenset({"offload_disk"}),
)
