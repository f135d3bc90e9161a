"""Start the ranks of a job on a Ray cluster: one placement group, a bundle for each node.

Ray says where, and carries signals and failures; the ranks are processes of their own that meet as
under torchrun. Imports Ray, which only this way of starting needs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.errors import STOPPED, ConfigError
from weft.elastic.failure import GRACE_S, Cause, Failure, RanksFailedError
from weft.elastic.signals import Asked

LOOK_S = 0.2
"""How soon a failure or a signal is seen."""
PLACED_S = 600.0
"""How long Ray may take to find the room."""
TAIL = 4000
"""Characters of what a rank said last."""
GAVE_UP = "because another rank did"


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended."""

    rank: int
    code: int
    when: float
    said: str

    def failure(self) -> Failure | None:
        """None for a rank that ended well, or when it was asked to."""
        if self.code in (0, STOPPED):
            return None
        cause: Cause = "peer" if GAVE_UP in self.said else "error"
        text = self.said.strip() or f"ended with exit code {self.code} and said nothing"
        if self.code == 2:
            cause = "config"
        elif self.code < 0:
            cause, text = "signal", f"was ended by {signal.Signals(-self.code).name} from outside"
        return Failure(self.rank, cause, text, when=self.when)


class NodeRanks:
    """The ranks of one bundle, in a process that Ray started there."""

    def __init__(self) -> None:
        self._asked = 0

    def meeting(self) -> tuple[str, int]:
        """An address of this node and a port that is free there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def stop(self, number: int) -> None:
        """Send the ranks a signal, while ``run`` watches them."""
        self._asked = number

    def run(
        self, command: Sequence[str], folder: str, variables: Sequence[Mapping[str, str]]
    ) -> list[Ended]:
        """Start ranks with these variables, and return when all have ended."""
        with tempfile.TemporaryDirectory(prefix="weft-ray-") as logs:
            ranks: dict[int, subprocess.Popen[bytes]] = {}
            try:
                for one in variables:
                    ranks[int(one["RANK"])] = _begun(command, folder, one, logs)
                return list(self._watch(ranks, logs))
            finally:  # nobody else knows those that run on where something failed here
                for process in ranks.values():
                    process.kill()
                    process.wait()

    def _watch(self, ranks: Mapping[int, subprocess.Popen[bytes]], logs: str) -> list[Ended]:
        ended: list[Ended] = []
        deadline = float("inf")
        running = dict(ranks)
        while running:
            time.sleep(LOOK_S)
            number, self._asked = self._asked, 0
            if time.monotonic() > deadline:
                number = signal.SIGKILL
            for rank, process in list(running.items()):
                if number and process.poll() is None:
                    process.send_signal(number)
                if process.poll() is None:
                    continue
                del running[rank]
                with open(f"{logs}/{rank}", errors="replace") as log:  # noqa: PTH123
                    said = log.read()[-TAIL:]
                ended.append(Ended(rank, process.returncode, time.time(), said))
                if ended[-1].failure() is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return ended


def _begun(
    command: Sequence[str], folder: str, variables: Mapping[str, str], logs: str
) -> subprocess.Popen[bytes]:
    """One rank, whose errors go to a file of its own."""
    with open(f"{logs}/{variables['RANK']}", "wb") as errors:  # noqa: PTH123 - a name that Ray's process knows
        environment = {**os.environ, **variables}
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=errors)


def shares(free: Sequence[int], world_size: int) -> list[int]:
    """How many ranks each node takes, those with most room first; none where there is no room."""
    taken = list[int]()
    for room in sorted(free, reverse=True):
        taken.append(min(room, world_size - sum(taken)))
    return [number for number in taken if number] if sum(taken) == world_size else []


def environments(counts: Sequence[int], host: str, port: int) -> list[list[dict[str, str]]]:
    """What torchrun would say to each rank of each bundle."""
    found, first = [], 0
    for node, count in enumerate(counts):
        found.append(
            [
                {
                    "RANK": str(first + local),
                    "WORLD_SIZE": str(sum(counts)),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(count),
                    "GROUP_RANK": str(node),
                    "MASTER_ADDR": host,
                    "MASTER_PORT": str(port),
                }
                for local in range(count)
            ]
        )
        first += count
    return found


def run_on_ray(words: Sequence[str], world_size: int | None, *, gpus: bool) -> int:
    """Run ``weft WORDS`` as every rank of a job on the cluster that ``RAY_ADDRESS`` names.

    Args:
        world_size: None for as many as the cluster has room for.
        gpus: A rank takes a GPU where the cluster has any, else a CPU.

    Returns 0, or ``STOPPED``.

    Raises:
        ConfigError: the cluster has no room for the ranks.
        RanksFailedError: a rank failed, or its node was lost. The others have been ended.
    """
    import ray

    ray.init(ignore_reinit_error=True, log_to_driver=True)
    has_gpus = gpus and ray.cluster_resources().get("GPU", 0) > 0
    resource = "GPU" if has_gpus else "CPU"
    rooms = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    counts = shares(rooms, sum(rooms) if world_size is None else world_size)
    if not counts:
        expected = f"a plan for the {sum(rooms)} {resource}s of the Ray cluster"
        raise ConfigError("--launcher", "ray", expected, f"This one has {world_size} ranks.")
    bundles = [{resource: count} for count in counts]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=PLACED_S)
        nodes = [_node(group, number, resource, count) for number, count in enumerate(counts)]
        host, port = ray.get(nodes[0].meeting.remote())
        folder, command = str(Path.cwd()), [sys.executable, "-m", "weft", *words]
        told = environments(counts, host, port)
        calls = {
            node.run.remote(command, folder, each): (node, each[0]["RANK"])
            for node, each in zip(nodes, told, strict=True)
        }
        ended, failures = _watched(calls)
    finally:
        ray.util.remove_placement_group(group)
    failures += [failure for one in ended if (failure := one.failure()) is not None]
    if failures:
        raise RanksFailedError(failures)
    return max((one.code for one in ended), default=0)


def _node(group: Any, number: int, resource: str, count: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    taken = {"num_gpus": count, "num_cpus": 0} if resource == "GPU" else {"num_cpus": count}
    return (
        ray.remote(NodeRanks)
        .options(scheduling_strategy=placed, max_concurrency=2, **taken)
        .remote()
    )


def _watched(calls: Mapping[Any, tuple[Any, str]]) -> tuple[list[Ended], list[Failure]]:
    """Wait for the bundles; end the others when one failed, and pass signals on."""
    import ray

    ended, failures, asked = list[Ended](), list[Failure](), Asked()
    pending, deadline, passed_on = list(calls), float("inf"), 0
    with asked.handlers():
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=LOOK_S)
            for call in ready:
                came, lost = _came(call, calls[call][1])
                ended, failures = [*ended, *came], [*failures, *lost]
            if failures or any(one.failure() is not None for one in ended):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            is_over = time.monotonic() > deadline or asked.times > 1
            if is_over or asked.times > passed_on:
                passed_on = asked.times
                number = signal.SIGKILL if is_over else signal.SIGTERM
                _send([calls[call][0] for call in pending], number)
    return ended, failures


def _came(call: Any, first: str) -> tuple[list[Ended], list[Failure]]:
    """What came of a bundle, whose first rank stands for it where its node was lost."""
    import ray

    try:
        return ray.get(call), []
    except ray.exceptions.RayTaskError as error:
        text = f"its node could not run it: {str(error).strip().splitlines()[-1]}"
        return [], [Failure(int(first), "error", text, when=time.time())]
    except ray.exceptions.RayError as error:
        text = f"its node was lost: {str(error).splitlines()[0]}"
        return [], [Failure(int(first), "signal", text, when=time.time())]


def _send(nodes: Sequence[Any], number: signal.Signals) -> None:
    for node in nodes:
        node.stop.remote(int(number))
