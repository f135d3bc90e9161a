"""Where a benchmark computes: on the processor, or with one rank on each card of a family."""

from __future__ import annotations

import argparse

import torch.distributed as dist

from weft.cluster.cluster import HOST
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.platform.base import Platform
from weft.platform.detect import detect_node
from weft.platform.registry import platform_named


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument("--device", default=HOST, help="family of devices, such as cuda")


def number_of(device: str) -> int:
    """Ranks that a family has room for here, without touching a card.

    Raises:
        ConfigError: there is no such family, or none of it here.
    """
    node, platform = detect_node(), platform_named(device)
    seen = sum(chip.device == device for chip in node.chips)
    return max(node.cores, 8) if device == HOST else seen if platform.detects_chips else 1


def why_too_few(device: str, ranks: int) -> str:
    """One sentence; empty where every rank has a device."""
    found = number_of(device)
    return "" if found >= ranks else f"needs {ranks} devices of {device!r}, found {found}"


def refuse_too_few(device: str, ranks: int) -> None:
    """Raises ConfigError where a rank would have no device."""
    if why := why_too_few(device, ranks):
        raise ConfigError("--device", device, f"one for each of {ranks} ranks", f"It {why}.")


def joined(address: RankAddress, device: str) -> tuple[Comm, Platform]:
    """A rank on the next card of this machine; with exact products in fp32."""
    platform = platform_named(device)
    own = platform.device(address.local_rank)
    platform.multiply_fp32(tf32=False)
    return join(address, device=own, **platform.joining()), platform


def join_default_group(address: RankAddress, platform: Platform) -> None:
    """PyTorch's own group of all processes, over which others talk. Weft needs none."""
    assert address.store_file is not None
    store = dist.FileStore(f"{address.store_file}-peers", address.world_size)
    backend, ranks = platform.collective_backend, address.world_size
    dist.init_process_group(backend, store=store, rank=address.rank, world_size=ranks)
