"""A cluster as a person writes it down: hosts, their chips, and the links between them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from weft.config.check import check_file
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.sections import Number, Positive, Section, Text
from weft.config.tree import Origin
from weft.config.yaml_text import Reading

HOST_NAME = re.compile(r"[a-z][a-z0-9]{0,11}")


class ChipEntry(Section):
    """One chip of a host: one rank runs on it."""

    kind: Text
    """What reports call it; chips of one kind are alike."""
    speed: Annotated[Positive, Field(ge=0.01, le=1.0)] = 1.0
    """Part of one core's time that its rank gets."""
    memory_gib: Positive | None = None
    """Most memory that its rank may hold; null sets no limit."""


class HostEntry(Section):
    """One machine."""

    name: Text
    """Small letters and digits; faults name hosts by it."""
    node: Text | None = None
    """Hosts of one node are joined by links of the class `inside`; null is a node of its own."""
    chips: Annotated[tuple[ChipEntry, ...], Field(min_length=1)]
    """Ranks are numbered in the order of the file."""


class LinkEntry(Section):
    """How fast links of one class are, each way."""

    gbit: Positive | None = None
    """10^9 bits per second; null is as fast as the machine can."""
    latency_ms: Number = 0.0
    """How much later everything arrives."""


class LinksEntry(Section):
    """The classes of links."""

    inside: LinkEntry = LinkEntry()
    """Each host's link to the switch of its node."""
    between: LinkEntry = LinkEntry()
    """Each node's link to the switch that joins nodes; the hosts of a node share it."""


class ClusterFile(Section):
    """The cluster that the file describes."""

    hosts: Annotated[tuple[HostEntry, ...], Field(min_length=1)]
    """The machines, in the order in which ranks are numbered."""
    links: LinksEntry = LinksEntry()
    """How fast they are joined."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names: list[str] = []
        for number, host in enumerate(self.hosts):
            key = f"hosts[{number}].name"
            if not HOST_NAME.fullmatch(host.name):
                expected = "a small letter, then at most 11 small letters and digits"
                raise ConfigError(key, host.name, expected, "Faults write links as NAME-NAME.")
            if host.name in names:
                other = f"hosts[{names.index(host.name)}]"
                raise ConfigError(key, host.name, "a name of its own", f"{other} has the same.")
            names.append(host.name)
        return self

    @property
    def world_size(self) -> int:
        """Ranks: one a chip."""
        return sum(len(host.chips) for host in self.hosts)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the hosts that share a switch, node by node in the order of the file."""
        found: dict[str, list[int]] = {}
        for number, host in enumerate(self.hosts):
            found.setdefault(f"node {host.node}" if host.node else host.name, []).append(number)
        return tuple(tuple(numbers) for numbers in found.values())

    def ranks_of(self, host: int) -> range:
        """The ranks of one host."""
        first = sum(len(other.chips) for other in self.hosts[:host])
        return range(first, first + len(self.hosts[host].chips))

    @property
    def seats(self) -> tuple[tuple[int, ChipEntry], ...]:
        """By rank: the number of its host, and its chip."""
        return tuple((n, chip) for n, host in enumerate(self.hosts) for chip in host.chips)


def read_cluster(path: Path) -> ClusterFile:
    """Read a cluster from a YAML file.

    Raises:
        ConfigErrors: everything that is wrong with it, with keys and lines.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        expected = "a YAML file that describes a cluster"
        raise ConfigError("CLUSTER", str(path), expected, f"{error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError("CLUSTER", str(path), "a YAML file", "It is not UTF-8 text.") from error
    reading = Reading(lambda line: Origin("file", f"{path}:{line}"))
    entry = reading.read(text)
    if reading.errors:
        raise _named(ConfigErrors(reading.errors), path)
    if entry is None or entry.value is None:
        raise ConfigError("CLUSTER", str(path), "a file with keys of hosts, links", "It is empty.")
    try:
        return check_file(entry, ClusterFile)
    except ConfigErrors as errors:
        raise _named(errors, path) from None


def _named(errors: ConfigErrors, path: Path) -> ConfigErrors:
    """Of what is by default, at least the file is known."""
    for error in errors.errors:
        error.where = f"in {path}" if error.where in ("", "by default") else error.where
    return errors
