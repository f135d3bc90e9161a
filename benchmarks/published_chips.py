"""Chips and clusters as papers and logs name them: "GH200", "4x g4dn.12xlarge".

Chips that the catalogue has go by its name or the start of it. A folder of records may bring its
own ``chips.json``; machines of a cloud come from its public list of instances.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from weft.cluster.cluster import Chip, catalogue
from weft.cluster.view import ChipPool, ClusterView

Shelf = Mapping[str, Chip]
"""Name -> chip: the catalogue, and what records need besides."""


class UnknownRecordError(Exception):
    """A record lacks what a prediction needs."""


USUAL_NODE = 8
"""Chips of a node that nobody describes, at most."""
INSTANCES = {
    "p3.2xlarge": ("V100-SXM2-16GB", 1, 10.0),
    "p3.8xlarge": ("V100-SXM2-16GB", 4, 10.0),
    "p3.16xlarge": ("V100-SXM2-16GB", 8, 25.0),
    "p3dn.24xlarge": ("V100-SXM2-32GB", 8, 100.0),
    "p4d.24xlarge": ("A100-SXM4-40GB", 8, 400.0),
    "p4de.24xlarge": ("A100-SXM4-80GB", 8, 400.0),
    "p5.48xlarge": ("H100-SXM5-80GB", 8, 3200.0),
    "g4dn.xlarge": ("T4", 1, 25.0),
    "g4dn.2xlarge": ("T4", 1, 25.0),
    "g4dn.4xlarge": ("T4", 1, 20.0),
    "g4dn.8xlarge": ("T4", 1, 50.0),
    "g4dn.12xlarge": ("T4", 4, 50.0),
    "g4dn.16xlarge": ("T4", 1, 50.0),
    "g4dn.metal": ("T4", 8, 100.0),
    "g5.xlarge": ("A10G", 1, 10.0),
    "g5.2xlarge": ("A10G", 1, 10.0),
    "g5.4xlarge": ("A10G", 1, 25.0),
    "g5.8xlarge": ("A10G", 1, 25.0),
    "g5.12xlarge": ("A10G", 4, 40.0),
    "g5.16xlarge": ("A10G", 1, 25.0),
    "g5.24xlarge": ("A10G", 4, 50.0),
    "g5.48xlarge": ("A10G", 8, 100.0),
}
"""A machine's chips, how many, and 10^9 bits/s of its network, "up to" where the list says so
(aws.amazon.com/ec2/instance-types, accelerated computing: p3, p4, p5, g4, g5)."""


def _bare(
    name: str, tflops: float, memory_gib: float, memory_gb_s: float, link: str, link_gb_s: float
) -> Chip:
    return Chip(
        name=name,
        vendor="NVIDIA",
        memory_gib=memory_gib,
        peak_tflops={"fp16": tflops},
        measured_tflops={},
        memory_gb_s=memory_gb_s,
        link=link,
        link_gb_s=link_gb_s,
        network_gbit_s=25,
    )


_H100 = catalogue()["H100-SXM5-80GB"]
_V100 = catalogue()["V100-SXM2-32GB"]
_350_WATTS = {dtype: 1.07 * rate for dtype, rate in _V100.peak_tflops.items() if rate}
_500_WATTS = {dtype: 0.86 * rate for dtype, rate in _H100.peak_tflops.items() if rate}
BESIDES = {
    "GH200": replace(_H100, name="GH200", memory_gib=96, memory_gb_s=4000),
    "H100-96GB-HBM2e-500W": replace(
        _H100,
        name="H100-96GB-HBM2e-500W",
        memory_gib=96,
        memory_gb_s=2400,
        peak_tflops=_500_WATTS,  # clocks follow about the 0.45th power of the watts
    ),
    "V100-SXM3-32GB": replace(_V100, name="V100-SXM3-32GB", peak_tflops=_350_WATTS),
    "A10G": _bare("A10G", 70, 24, 600, "PCIe4 x16", 32),
    "P100": _bare("P100", 21.2, 16, 732, "NVLink1", 80),
    "TitanRTX": _bare("TitanRTX", 65, 24, 672, "PCIe3 x16", 16),
    "RTX2080": _bare("RTX2080", 40, 8, 448, "PCIe3 x16", 16),
    "RTX3090": _bare("RTX3090", 71, 24, 936, "PCIe4 x16", 32),
    "RTX2080Ti": _bare("RTX2080Ti", 54, 11, 616, "PCIe3 x16", 16),
    "L4": _bare("L4", 121, 24, 300, "PCIe4 x16", 32),
}
"""Chips of records that the catalogue does not hold; rates with sums in fp32, as data sheets say
(GeForce: half of what they print for sums in fp16)."""


RECORDS = ("throughput.json", "memory.json", "hetero.json", "chips.json")


def read_records(path: Path) -> list[dict[str, Any]]:
    """What a file of records holds; nothing where there is none, or something else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return [record for record in found if isinstance(record, dict)] if _listed(found) else []


def broken(folder: Path) -> Iterator[tuple[str, str]]:
    """Names of a folder's files that hold no list of records, and why."""
    for path in (folder / name for name in RECORDS):
        try:
            found = json.loads(path.read_text("utf-8")) if path.exists() else []
        except (OSError, ValueError) as error:
            yield path.name, f"cannot be read: {error}"
        else:
            if not _listed(found):
                yield path.name, "is no list of records"


def _listed(found: object) -> bool:
    return isinstance(found, list)


def shelf_of(folder: Path) -> Shelf:
    """The catalogue, its additions, and what the folder's own ``chips.json`` describes."""
    known = {**catalogue(), **BESIDES}
    named = {str(one["id"]): one for one in read_records(folder / "chips.json") if one.get("id")}
    return known | dict(_described({name: named[name] for name in named if name not in known}))


def _described(named: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Chip]]:
    """The chips whose numbers are numbers; others are not known."""
    for name, one in named.items():
        try:
            yield name, chip_from(one)
        except ValueError:
            continue


def chip_from(data: Mapping[str, Any]) -> Chip:
    """A chip as a record describes it; what is missing is not known."""
    rates = {name: _number(data.get(f"{name}_tflops")) for name in ("fp32", "tf32", "bf16", "fp16")}
    measured = {
        name: _number(data.get(f"measured_matmul_{name}_tflops")) for name in ("bf16", "fp8")
    }
    return Chip(
        name=str(data.get("id") or data.get("name") or "?"),
        vendor=str(data.get("vendor") or ""),
        memory_gib=_number(data.get("memory_gb")) or 0.0,
        peak_tflops={**rates, "fp8": _number(data.get("fp8_tflops"))},
        measured_tflops=measured,
        memory_gb_s=_number(data.get("mem_bw_gbs")),
        link=str(data.get("intra_link") or ""),
        link_gb_s=_number(data.get("intra_bw_gbs_unidir_per_device")),
        network_gbit_s=_number(data.get("typical_nic_gbps_per_gpu")),
    )


def _number(value: object) -> float | None:
    number = float(value) if isinstance(value, int | float | str) and value else 0.0
    return number if number > 0 and isfinite(number) else None


def find_chip(named: object, shelf: Shelf) -> Chip:
    """The chip that a record names or describes.

    Raises:
        UnknownRecordError: nothing here is called so.
    """
    if isinstance(named, dict):
        return shelf.get(str(named.get("id"))) or chip_from(named)
    name = str(named)
    if name in shelf:
        return shelf[name]
    wanted = _plain(name)
    first = _plain(re.split(r"[-\s]", name)[0]) or wanted
    memory = re.search(r"(\d+)\s*G", name)
    for start in (wanted, first):
        kin = [key for key in shelf if start and _plain(key).startswith(start)]
        best = [key for key in kin if memory and f"{memory[1]}G" in key]
        if kin:
            return shelf[(best or sorted(kin, key=lambda key: _plain(key) != start))[0]]
    raise UnknownRecordError(f"chip {name!r} is not in the catalogue")


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]", "", name.lower())


def cluster_from(words: str, shelf: Shelf) -> ClusterView:
    """The machines, or nodes, or chips that a text counts, in its order.

    Raises:
        UnknownRecordError: it counts nothing that is known.
    """
    pools = list(_instances(words, shelf)) or list(_counted(words, shelf))
    if not pools:
        raise UnknownRecordError(f"cluster {words!r} has no known machines")
    return ClusterView(tuple(pools))


def _instances(words: str, shelf: Shelf) -> Iterator[ChipPool]:
    for number, name in re.findall(r"(\d+)\s*x?\s*((?:p|g)\d\w*\.\w+)", words):
        if name not in INSTANCES:
            raise UnknownRecordError(f"machine {name!r} is not in the list of instances")
        chip, chips, gbit_s = INSTANCES[name]
        yield ChipPool(
            chip=find_chip(chip, shelf),
            num_nodes=int(number),
            chips_per_node=chips,
            network_gbit_s=gbit_s / chips,
        )


def _counted(words: str, shelf: Shelf) -> Iterator[ChipPool]:
    counted = re.findall(
        r"(\d+)\s*(nodes?)?\s*(?:of|x|\u00d7|\*)?\s*([A-Za-z][\w-]*\d[\w-]*)", words
    )
    for number, nodes, name in counted:
        try:
            chip = find_chip(name, shelf)
        except UnknownRecordError:
            continue
        many = int(number)
        each = USUAL_NODE if nodes else next(n for n in (8, 4, 2, 1) if many % n == 0)
        yield ChipPool(chip=chip, num_nodes=many if nodes else many // each, chips_per_node=each)
