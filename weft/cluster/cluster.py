"""Chips, machines and clusters as frozen data: what a plan may use. Prints and saves as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
HOST = "cpu"
"""What PyTorch calls the machine's own processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One kind of accelerator, as software sees it: one rank each. None means not known."""

    name: str
    """Short name, such as ``H100-SXM5-80GB``."""
    vendor: str
    memory_gib: float
    """As the data sheet prints it, or as the driver of a detected chip reports it."""
    peak_tflops: Mapping[str, float | None]
    """Dense matrix products, 10^12 FLOP/s, by dtype."""
    measured_tflops: Mapping[str, float | None]
    """Best large matrix product that others measured, 10^12 FLOP/s, by dtype."""
    memory_gb_s: float | None = None
    """Bandwidth of its memory, 10^9 bytes/s."""
    host_gb_s: float | None = None
    """One way between it and its host's memory, 10^9 bytes/s."""
    link: str = ""
    """What joins it to the other chips of its machine."""
    link_gb_s: float | None = None
    """One direction, one chip to all others of its machine, 10^9 bytes/s."""
    network_gbit_s: float | None = None
    """Usual network adapter for each chip."""
    power_w: float | None = None
    product_names: tuple[str, ...] = ()
    """What its driver calls it."""
    package: str = ""
    """What it is sold as, where software sees several devices in one package; else empty."""
    devices: int = 1
    """Of a package; all values here are of one device."""
    confidence: Literal["high", "medium", "low", "none"] = "none"
    unverified: tuple[str, ...] = ()
    """Fields without a source; ``*`` is all of them."""
    sources: tuple[str, ...] = ()
    notes: str = ""

    @property
    def device(self) -> str:
        """What PyTorch calls such chips."""
        device: str = _data()["devices"].get(self.vendor, self.vendor.lower().replace(" ", ""))
        return device

    def peak_flops(self, dtype: Dtype) -> float | None:
        """Dense matrix products, FLOP/s; None when not known."""
        tflops = self.peak_tflops.get(dtype)
        return None if tflops is None else tflops * 1e12

    @property
    def product_flops(self) -> float:
        """The peak of what training multiplies in, two bytes where it can, FLOP/s; 0 when not
        known."""
        two = self.peak_flops("bf16") or self.peak_flops("fp16")
        return two or self.peak_flops("fp32") or 0.0

    @property
    def emulates_bf16(self) -> bool:
        """Of two-byte products it has those of fp16 alone (V100, T4): bf16 is multiplied as fp32 is
        there."""
        return bool(self.peak_flops("fp16") and not self.peak_flops("bf16"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """Accelerators of one vendor that a process cannot use."""

    vendor: str
    chips: tuple[Chip, ...]
    """Empty where nobody knows what there is."""
    why: str
    way_out: str
    """What could be done about it."""

    def __str__(self) -> str:
        many = Counter(chip.name for chip in self.chips)
        found = [f"{number} x {name} found, but " for name, number in many.items()]
        return f"{self.vendor}: {' and '.join(found)}{self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine, as far as this process may use it."""

    host: str
    cpu: str
    """The processor's name."""
    cores: int
    """Cores that affinity and a container's quota leave; at least 1."""
    memory_gib: float
    """Main memory that the machine and a container's limit leave."""
    cpu_bf16: bool
    """The processor multiplies bf16 matrices by instruction."""
    chips: tuple[Chip, ...] = ()
    """Accelerators in the order of the bus they sit on."""
    problems: tuple[str, ...] = ()
    """What could not be found out, in words."""
    unusable: tuple[Unusable, ...] = ()
    """Accelerators that are there besides, or may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The machines of a job."""

    nodes: tuple[Node, ...]

    def to_json(self) -> str:
        """Text that ``from_json`` reads back equal."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Cluster:
        """Read what ``to_json`` wrote."""
        nodes = json.loads(text)["nodes"]
        return Cluster(nodes=tuple(_node(entry) for entry in nodes))


@cache
def catalogue() -> Mapping[str, Chip]:
    """Name -> chip, for every chip that Weft knows without having met it."""
    chips = [_chip(entry) for entry in _data()["chips"]]
    return MappingProxyType({chip.name: chip for chip in chips})


@cache
def packages() -> Mapping[str, Chip]:
    """Name of a package that software sees several devices in -> each of its devices."""
    several = {chip.package: chip for chip in catalogue().values() if chip.package}
    return MappingProxyType(several)


@cache
def _data() -> Mapping[str, Any]:
    """Under ``chips`` the catalogue; under ``devices`` what PyTorch calls a vendor's chips."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("chips.json").read_text("utf-8"))
    return data


def chip_of_product(product: str) -> Chip | None:
    """The chip that its driver calls ``product``; None where the catalogue lacks it."""
    return next((chip for chip in catalogue().values() if product in chip.product_names), None)


def _node(data: dict[str, Any]) -> Node:
    unusable = [
        Unusable(**{**entry, "chips": tuple(map(_chip, entry["chips"]))})
        for entry in data.get("unusable", ())
    ]
    return Node(
        **{
            **data,
            "chips": tuple(map(_chip, data["chips"])),
            "problems": tuple(data["problems"]),
            "unusable": tuple(unusable),
        }
    )


def _chip(data: dict[str, Any]) -> Chip:
    lists = {name: tuple(data[name]) for name in ("product_names", "unverified", "sources")}
    return Chip(**{**data, **lists})
