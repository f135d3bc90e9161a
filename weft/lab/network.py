"""Hosts as network namespaces, joined by switches over links that the kernel shapes.

    host --inside-- switch of its node --between-- switch that joins the nodes

Every link is a pair of virtual Ethernet ports; ``tc tbf`` at both ends limits each way. On a link
that is late the ends are ports of a program that carries frames between them. Switches are bridges
in one more namespace, so that nothing of the machine's own network is touched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.cluster.cluster_file import ClusterFile, LinkEntry
from weft.config.errors import ConfigError
from weft.lab import relay
from weft.lab.identity import Identity
from weft.lab.tools import batch, call

PORT = "eth0"
"""Of every host, in its namespace."""
NOWHERE = "02:00:00:ff:ff:ff"
"""An Ethernet address that nobody has."""
_BURST_S = 0.001
_LEAST_BURST = 4096
"""Bytes that a link which has rested carries at once: a packet. More would make slow links free
for whoever sends less than that now and then, as borders of pipelines do."""
_PACKET = 4000
"""Bytes. A message that comes in over a slow link wakes its receiver with every packet, and that
costs a chip which is a part of a core time that a device's own processor would not lack."""
_QUEUE = 8 << 20
"""Bytes that may wait at a port: more than connections send ahead, so that no packet is lost. Links
of clusters lose none, and what is lost is only sent again after a fifth of a second."""


def host_address(host: int) -> str:
    """Of the host's port. No other network has to be thought of: namespaces know none."""
    return f"10.77.{host // 250}.{host % 250 + 1}"


def _ethernet(host: int) -> str:
    return f"02:00:00:00:{host // 250:02x}:{host % 250 + 1:02x}"


def shaping(port: str, link: LinkEntry) -> list[str]:
    """``tc`` commands for what leaves a port."""
    if link.gbit is None:
        return []
    burst = max(_LEAST_BURST, int(link.gbit * 1e9 / 8 * _BURST_S))
    limits = f"rate {link.gbit * 1e6:.0f}kbit burst {burst} limit {_QUEUE}"
    return [f"qdisc add dev {port} root tbf {limits}"]


@dataclass(frozen=True, slots=True)
class _Joint:
    """A link and its two ends, each a port in a namespace."""

    link: LinkEntry
    one: tuple[str, str]
    other: tuple[str, str]

    @property
    def late_s(self) -> float:
        """Half of what the file says: every way goes over two links of a class."""
        return self.link.latency_ms / 2e3


class Network:
    """The namespaces of one lab and their links."""

    def __init__(self, identity: Identity, cluster: ClusterFile) -> None:
        self._cluster = cluster
        self._switch = f"{identity.name}-the-switch"  # no host has a hyphen in its name
        self.hosts = tuple(f"{identity.name}-{host.name}" for host in cluster.hosts)
        """Names of the hosts' namespaces."""
        self._made: list[str] = []
        self._relay: subprocess.Popen[str] | None = None

    def build(self) -> None:
        """Make everything.

        Raises:
            ConfigError: a namespace of the same name exists, or links cannot be late here.
            RunError: the kernel refused.
        """
        wanted = [self._switch, *self.hosts]
        there = set(namespaces())
        for name in wanted:
            if name in there:
                hint = f"Delete it with: ip netns del {name}"
                raise ConfigError("CLUSTER", name, "a network namespace that is not there", hint)
        for name in wanted:
            call(["ip", "netns", "add", name])
            self._made.append(name)
            batch("ip", name, ["link set lo up"])
        nodes = self._cluster.nodes
        if len(nodes) > 1:
            batch("ip", self._switch, ["link add spine type bridge", "link set spine up"])
        bridges = [f"node{number}" for number in range(len(nodes))]
        for bridge in bridges:
            batch("ip", self._switch, [f"link add {bridge} type bridge", f"link set {bridge} up"])
        self._join(list(self._joints()))
        for bridge, hosts in zip(bridges, nodes, strict=True):
            self._raise(bridge, hosts, has_uplink=len(nodes) > 1)

    def _joints(self) -> Iterator[_Joint]:
        """Every link."""
        links, nodes = self._cluster.links, self._cluster.nodes
        for host, name in enumerate(self.hosts):
            yield _Joint(links.inside, (self._switch, f"host{host}"), (name, PORT))
        for number in range(len(nodes) if len(nodes) > 1 else 0):
            up, down = ((self._switch, f"{end}{number}") for end in ("up", "down"))
            yield _Joint(links.between, up, down)

    def _join(self, joints: Sequence[_Joint]) -> None:
        """Make the ports of all links, and limit their rates."""
        if late := [joint for joint in joints if joint.late_s]:
            self._relay = self._begin_relay(late)
        for joint in joints:
            (space, port), (other_space, other) = joint.one, joint.other
            if not joint.late_s:
                ends = f"{port} type veth peer name {other} netns {other_space}"
                batch("ip", space, [f"link add {ends}"])
            for where, name in (joint.one, joint.other):
                batch("ip", where, [f"link set {name} mtu {_PACKET}"])
                batch("tc", where, shaping(name, joint.link))

    def _raise(self, bridge: str, hosts: Sequence[int], *, has_uplink: bool) -> None:
        """Plug the links of a node in."""
        plugged = {f"host{host}": bridge for host in hosts}
        if has_uplink:
            number = bridge.removeprefix("node")
            plugged |= {f"up{number}": bridge, f"down{number}": "spine"}
        for port, master in plugged.items():
            raised = [f"link set {port} master {master}", f"link set {port} up"]
            batch("ip", self._switch, raised)
        for host in hosts:
            ethernet = f"link set {PORT} address {_ethernet(host)}"
            addressed = f"address add {host_address(host)}/16 dev {PORT}"
            batch("ip", self.hosts[host], [ethernet, addressed, f"link set {PORT} up"])

    def _begin_relay(self, late: Sequence[_Joint]) -> subprocess.Popen[str]:
        """Start the program that carries frames over links that are late, and wait for its ports.

        Raises:
            ConfigError: this machine has no such ports.
        """
        links = json.dumps([[joint.late_s, joint.one, joint.other] for joint in late])
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", relay.__file__, links],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != relay.READY:
            process.kill()
            said = process.communicate()[1].strip().splitlines()
            key, link = next((k, v) for k, v in self._cluster.links if v.latency_ms)
            expected = f"0, as this machine has no ports for late links: {said[-1] if said else ''}"
            hint = "Load the kernel's module `tun`, or leave latency_ms out."
            raise ConfigError(f"links.{key}.latency_ms", link.latency_ms, expected, hint)
        return process

    def cut(self, one: int, other: int, *, mend: bool = False) -> None:
        """What two hosts send each other is lost, without a word to either; mended, no longer."""
        for here, there in ((one, other), (other, one)):
            ethernet = _ethernet(there) if mend else NOWHERE
            entry = f"{host_address(there)} lladdr {ethernet} nud permanent dev {PORT}"
            batch("ip", self.hosts[here], [f"neighbour replace {entry}"])

    def unplug(self, host: int) -> None:
        """The host's port goes down: nobody hears of it any more."""
        batch("ip", self._switch, [f"link set host{host} down"])

    def remove(self) -> None:
        """Delete what ``build`` made, as far as it got."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        remove_namespaces(self._made)


def namespaces() -> Iterator[str]:
    """The named network namespaces of this machine."""
    for line in call(["ip", "netns", "list"]).splitlines():
        if line.strip():
            yield line.split()[0]


def remove_namespaces(names: Sequence[str]) -> None:
    """Delete those of these network namespaces that are there."""
    there = set(namespaces())
    for name in names:
        if name in there:
            call(["ip", "netns", "del", name])
