"""Hosts as network namespaces, joined by switches over links that the kernel shapes.

    host --inside-- switch of its node --between-- switch that joins the nodes

Every link is a pair of virtual Ethernet ports; ``tc tbf`` at both ends limits each way. Switches
are bridges in one more namespace, so that nothing of the machine's own network is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.cluster.cluster_file import ClusterFile, LinkEntry
from weft.config.errors import ConfigError, RunError
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
_QUEUE_MS = 100


def host_address(host: int) -> str:
    """Of the host's port. No other network has to be thought of: namespaces know none."""
    return f"10.77.{host // 250}.{host % 250 + 1}"


def _ethernet(host: int) -> str:
    return f"02:00:00:00:{host // 250:02x}:{host % 250 + 1:02x}"


def _pair(one: str, other: str) -> str:
    return f"link add {one} mtu {_PACKET} type veth peer name {other} mtu {_PACKET}"


def shaping(port: str, link: LinkEntry) -> list[str]:
    """``tc`` commands for what leaves a port."""
    delay = f"root handle 1: netem delay {link.latency_ms}ms limit 100000"
    lines = [f"qdisc add dev {port} {delay}"] if link.latency_ms else []
    if link.gbit is not None:
        burst = max(_LEAST_BURST, int(link.gbit * 1e9 / 8 * _BURST_S))
        limits = f"rate {link.gbit * 1e6:.0f}kbit burst {burst} latency {_QUEUE_MS}ms"
        parent = "parent 1:1 handle 10:" if link.latency_ms else "root"
        lines.append(f"qdisc add dev {port} {parent} tbf {limits}")
    return lines


class Network:
    """The namespaces of one lab and their links."""

    def __init__(self, identity: Identity, cluster: ClusterFile) -> None:
        self._cluster = cluster
        self._switch = f"{identity.name}-switch"
        self.hosts = tuple(f"{identity.name}-{host.name}" for host in cluster.hosts)
        """Names of the hosts' namespaces."""
        self._made: list[str] = []

    def build(self) -> None:
        """Make everything.

        Raises:
            ConfigError: a namespace of the same name exists, or the kernel cannot delay packets.
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
        self._refuse_delays()
        nodes = self._cluster.nodes
        if len(nodes) > 1:
            batch("ip", self._switch, ["link add spine type bridge", "link set spine up"])
        for number, hosts in enumerate(nodes):
            self._build_node(number, hosts, has_uplink=len(nodes) > 1)

    def _build_node(self, number: int, hosts: Sequence[int], *, has_uplink: bool) -> None:
        bridge, links = f"node{number}", self._cluster.links
        batch("ip", self._switch, [f"link add {bridge} type bridge", f"link set {bridge} up"])
        for host in hosts:
            port, name = f"host{host}", self.hosts[host]
            pair = _pair(port, PORT) + f" netns {name}"
            joined = [f"link set {port} master {bridge}", f"link set {port} up"]
            batch("ip", self._switch, [pair, *joined])
            addressed = f"address add {host_address(host)}/16 dev {PORT}"
            ethernet = f"link set {PORT} address {_ethernet(host)}"
            batch("ip", name, [ethernet, addressed, f"link set {PORT} up"])
            batch("tc", self._switch, shaping(port, links.inside))
            batch("tc", name, shaping(PORT, links.inside))
        if has_uplink:
            up, down = f"up{number}", f"down{number}"
            pair = _pair(up, down)
            ends = [f"link set {up} master {bridge}", f"link set {down} master spine"]
            raised = [f"link set {up} up", f"link set {down} up"]
            batch("ip", self._switch, [pair, *ends, *raised])
            batch("tc", self._switch, shaping(up, links.between) + shaping(down, links.between))

    def _refuse_delays(self) -> None:
        links = self._cluster.links
        late = [name for name, link in links if link.latency_ms]
        if not late:
            return
        try:
            batch("tc", self._switch, ["qdisc add dev lo root netem delay 1ms"])
        except RunError as error:
            key = f"links.{late[0]}.latency_ms"
            hint = "Load it with `modprobe sch_netem`, or leave latency_ms out."
            expected = "0, as this kernel lacks netem, which delays packets"
            latency = vars(links)[late[0]].latency_ms
            raise ConfigError(key, latency, expected, hint) from error
        batch("tc", self._switch, ["qdisc del dev lo root"])

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
