"""What starts a plan on its machines: a command for each, and a file for Slurm.

Texts alone: nothing is started, and no name gets into a command that is not quoted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from shlex import join, quote

from weft.cli.plan.jobset import jobset
from weft.cli.plan.launch_machine import PORT, Machine, alike
from weft.cluster.cluster import HOST
from weft.config.errors import ConfigError
from weft.plan.plan_file import PlanFile

NO_NAME = "$MASTER_ADDR"
_STEP = """\
node_rank=0
for node in $NODES; do
  [ "$node" = "$SLURMD_NODENAME" ] && break
  node_rank=$((node_rank + 1))
done
if [ "$node_rank" -ge {num_nodes} ]; then
  echo "$SLURMD_NODENAME is none of $NODES" >&2
  exit 1
fi
exec torchrun --nnodes {num_nodes} --node-rank "$node_rank" --nproc-per-node "$1" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
  -m {command}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a plan is started."""

    commands: tuple[str, ...]
    """For a shell: one for each node, in the order of its ranks."""
    nodes: tuple[str, ...]
    """What each is for, in words."""
    sbatch: str = ""
    """A file for ``sbatch``; empty where the ranks are a lab's."""
    jobset: str = ""
    """A manifest for Kubernetes, as ``sbatch``."""

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return asdict(self)

    def sentences(self) -> Iterator[str]:
        """For people."""
        yield "start it with one command on each node, all in the same folder:"
        for words, command in zip(self.nodes, self.commands, strict=True):
            yield f"  # {words}"
            yield f"  {command}"
        if any(NO_NAME in command for command in self.commands):
            yield f"  {NO_NAME} is the name of the first node: pools[].hosts of the cluster says it"


def launch_of_lab(cluster: str, train: Sequence[str], file: PlanFile, num_chips: int) -> Launch:
    """Of a plan for the hosts of a lab, which one machine plays.

    Raises:
        ConfigError: the lab has chips that the plan leaves idle.
    """
    used = file.plan.world_size
    if used < num_chips:
        expected = f"a plan for all {num_chips} chips of the lab, which starts a process on each"
        hint = f"This one uses {used}: describe a lab of those."
        raise ConfigError("--launch", True, expected, hint)
    command = join(["weft", "lab", cluster, "--", *train])
    return Launch(commands=(command,), nodes=(f"this machine, ranks 0-{used - 1}",))


def launch_of_nodes(name: str, train: Sequence[str], file: PlanFile) -> Launch:
    """Of a plan for pools of nodes, or for this machine.

    Args:
        name: Of the job.
        train: ``weft train ...`` with the plan's file.

    Raises:
        ConfigError: the ranks of one machine are not consecutive.
    """
    machines = list(_machines(file))
    assert sum(machine.num_ranks for machine in machines) == file.plan.world_size, file.chips
    if len(machines) == 1:
        commands: tuple[str, ...] = (join(train),)
    else:
        address = quote(machines[0].host) if machines[0].host else f'"{NO_NAME}"'
        commands = tuple(
            f"torchrun --nnodes {len(machines)} --node-rank {number} --nproc-per-node "
            f"{machine.num_ranks} --master-addr {address} --master-port {PORT} -m {join(train)}"
            for number, machine in enumerate(machines)
        )
    return Launch(
        commands=commands,
        nodes=tuple(_in_words(number, machine) for number, machine in enumerate(machines)),
        sbatch=_sbatch(name, train, machines),
        jobset=jobset(name, train, machines),
    )


def _machines(file: PlanFile) -> Iterator[Machine]:
    """Node by node; what several pools have in one machine is of one node."""
    first, seen = 0, set[str]()
    numbered = enumerate(file.chips)
    for key, same in groupby(numbered, key=lambda each: each[1].node or each[0]):
        numbers, parts = zip(*same, strict=True)
        if isinstance(key, str):
            if key in seen:
                hint = "Write the pools of one machine one after another."
                expected = f"consecutive ranks on the machine {key}"
                raise ConfigError("--launch", True, expected, hint)
            seen.add(key)
        words = ", ".join(f"{used.chips_per_node} x {used.chip}" for used in parts)
        num_ranks = sum(used.chips_per_node for used in parts)
        hosts = next((used.hosts for used in parts if used.hosts), ())
        for number in range(parts[0].nodes):
            devices = file.plan.devices[first : first + num_ranks]
            yield Machine(
                chips=words,
                first=first,
                num_ranks=num_ranks,
                host=hosts[number] if hosts else "",
                has_cards=any(device != HOST for device in devices),
                pool=parts[0].pool,
                named=1 + numbers[0] if hosts else 0,
            )
            first += num_ranks


def _in_words(number: int, machine: Machine) -> str:
    """``node 1: a2 (8 x H100-SXM5-80GB), ranks 8-15``."""
    last = machine.first + machine.num_ranks - 1
    ranks = f"ranks {machine.first}-{last}" if last > machine.first else f"rank {last}"
    host = f"{machine.host} ({machine.chips})" if machine.host else machine.chips
    return f"node {number}: {host}, {ranks}"


def _sbatch(name: str, train: Sequence[str], machines: Sequence[Machine]) -> str:
    """One job; where nodes differ, a component for each kind."""
    groups = alike(machines)
    lines = ["#!/bin/bash", f"#SBATCH --job-name={name}"]
    for number, group in enumerate(groups):
        lines += ["#SBATCH hetjob"] if number else []
        lines += _component(group)
    lines += ["", "set -euo pipefail"]
    if len(machines) == 1:
        return "\n".join([*lines, join(train), ""])
    step = _STEP.format(num_nodes=len(machines), command=join(train))
    variables = (
        [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(len(groups))]
        if len(groups) > 1
        else ["SLURM_JOB_NODELIST"]
    )
    each = [
        f"{f'--het-group={number} ' * (len(groups) > 1)}--ntasks-per-node=1 "
        f'bash -c "$STEP" weft {group[0].num_ranks}'
        for number, group in enumerate(groups)
    ]
    lines += [
        "# Ranks count through the nodes in this order.",
        'NODES="$(',
        *(f'  scontrol show hostnames "${variable}"' for variable in variables),
        ')"',
        'NODES="$(echo $NODES)"',
        'MASTER_ADDR="${NODES%% *}"',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))",  # below those that anybody is given
        f"STEP={quote(step)}",
        "export NODES MASTER_ADDR MASTER_PORT STEP",
        f"srun --kill-on-bad-exit=1 {' : '.join(each)}",
        "",
    ]
    return "\n".join(lines)


def _component(group: Sequence[Machine]) -> Iterator[str]:
    first = group[0]
    nodes = f"{len(group)} node{'s' * (len(group) > 1)}"
    yield f"# {nodes} with {first.chips}, pools[{first.pool}] of the cluster; say here which:"
    yield "##SBATCH --partition=NAME --constraint=NAME"
    yield f"#SBATCH --nodes={len(group)}"
    yield "#SBATCH --ntasks-per-node=1"
    if first.has_cards:
        yield f"#SBATCH --gpus-per-node={first.num_ranks}"
    yield "#SBATCH --exclusive"
    if first.host:
        yield f"#SBATCH --nodelist={','.join(machine.host for machine in group)}"
