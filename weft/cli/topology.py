"""``weft chips topology``: which ranks are near each other, and how fast the links are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from weft.cli.output import err, out, print_json
from weft.cli.target import Json, profiles_to_write
from weft.cluster.cluster import HOST
from weft.cluster.topology import (
    TOLERANCE,
    Level,
    Links,
    levels,
    lopsided,
    nodes_of,
    saved_links,
    topology_folder,
)
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError
from weft.cost.profile_file import profiles_folder
from weft.elastic.signals import interrupted_once
from weft.platform.detect import detect_node
from weft.report.plan_picture import ranges

MOST_RANKS = 64
"""Every two of them are measured, one after another."""


def topology(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2, help="Processes on this machine, without a launcher. [default: one a chip]"
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.01, max=10, help="Links that differ by less are of one class.")
    ] = TOLERANCE,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure, whatever is known of these machines.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure latency and bandwidth between every two ranks, and find nodes by them.

    Run it as a job, under torchrun, srun or `weft lab`, to measure links between machines; alone it
    measures between processes of this one. Let nothing else run. What was found is kept for these
    machines beside profiles (~/.cache/weft/profiles, or WEFT_PROFILES), and `plan: auto` reads it.
    """
    address, folder = RankAddress.from_environment(), topology_folder(profiles_folder())
    node = detect_node()
    device = node.chips[0].device if node.chips else HOST
    from weft.elastic.topology import links_here, links_of_job  # which import torch

    if address is None:
        many = ranks or max(2, len(node.chips) or node.cores)
        _refuse_too_many("--ranks", many)
        profiles_to_write(folder)
        fresh = fresh or saved_links(folder, [node.host]) is None
        with interrupted_once():
            links = links_here(many, device, folder, fresh=fresh)
    else:
        if ranks is not None:
            hint = "The launcher says how many there are."
            raise ConfigError("--ranks", ranks, "left out under a launcher", hint)
        _refuse_too_many("ranks of the launcher", address.world_size)
        say = err.print if address.rank == 0 and not json else lambda _: None
        links = links_of_job(address, device, folder, fresh=fresh, say=say)
        if address.rank:
            return
    found = levels(links, tolerance=tolerance)
    if json:
        print_json(_data(links, found, tolerance))
        return
    out.print(*_in_words(links, found, tolerance), sep="\n")


def _refuse_too_many(key: str, ranks: int) -> None:
    if ranks > MOST_RANKS:
        hint = "Give each machine one or two: links between machines are the same for all."
        raise ConfigError(key, ranks, f"at most {MOST_RANKS}", hint)


def _data(links: Links, found: Sequence[Level], tolerance: float) -> dict[str, Any]:
    return {
        "date": links.date,
        "hosts": links.hosts,
        "nodes": nodes_of(found, links),
        "levels": [
            {
                "groups": level.groups,
                "latency_s": level.latency_s,
                "bytes_s": level.bytes_s,
                "slowest_bytes_s": level.slowest_bytes_s,
                "links": level.num_links,
            }
            for level in found
        ],
        "lopsided": [
            {"from": src, "to": dst, "times": times}
            for src, dst, times in lopsided(links, tolerance=tolerance)
        ],
        "latency_s": links.latency_s,
        "bytes_s": links.bytes_s,
    }


def _in_words(links: Links, found: Sequence[Level], tolerance: float) -> Iterator[str]:
    many = len({*links.hosts})
    yield (
        f"{len(links.hosts)} ranks on {many} machine{'s' * (many > 1)}, "
        f"measured {links.date.replace('T', ' ')}"
    )
    for number, level in enumerate(found):
        joins = "all" if len(level.groups) == 1 else _sets(level.groups)
        slowest = level.slowest_bytes_s / level.bytes_s
        spread = f", the slowest {slowest:.0%} of that" if slowest < 0.9 else ""
        yield (
            f"  level {number}: {level.num_links} links join {joins}: "
            f"{level.latency_s * 1e6:.0f} us, {level.bytes_s * 8e-9:.3g} Gbit/s{spread}"
        )
    yield f"nodes: {_sets(nodes_of(found, links))}"
    for src, dst, times in lopsided(links, tolerance=tolerance):
        yield f"rank {src} to rank {dst} takes {times:.1f} times as long as the way back"


def _sets(groups: Sequence[Sequence[int]]) -> str:
    return " | ".join(ranges(group, dash="-") for group in groups)
