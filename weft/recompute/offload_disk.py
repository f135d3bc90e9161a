"""What layers keep for backward, on disk meanwhile: as ``offload``, where hosts have no room."""

from __future__ import annotations

from weft.recompute.mode import Mode

MODE = Mode(
    name="offload_disk",
    order=8,
    keeps="nothing on the device",
    drops="nothing: what backward reads waits in files of optim.state_folder",
    waits="disk",
)
