"""A profile of a made-up core, for predictions that tests can follow."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from weft.cluster.cluster import Node
from weft.cost.profile import AttentionTime, LinkTime, Machine, Product, Profile
from weft.cost.profile_file import file_name, save_profile
from weft.simulate.known import core_name

FLOPS_S = 1e10
"""Of its products, whatever their shape."""
RATES_OF_MEMORY = [field.name for field in fields(Profile) if field.name.endswith("_bytes_s")]


def node(*, cores: int = 2, cpu: str = "Abacus") -> Node:
    return Node(host="box", cpu=cpu, cores=cores, memory_gib=8.0, cpu_bf16=False)


def profile(machine: Node) -> Profile:
    """Products at ``FLOPS_S``, everything else nearly free."""
    seconds = 2 * 256**3 / FLOPS_S
    return Profile(
        name=core_name(machine),
        machine=Machine(
            host=machine.host,
            cpu=machine.cpu,
            cores=machine.cores,
            memory_gib=machine.memory_gib,
            device="cpu",
            threads=1,
            torch="2.13.0",
            date="2026-11-21",
        ),
        products=(Product("fp32", 256, 256, 256, seconds, seconds, seconds),),
        attention=(AttentionTime("fp32", 64, 32, 1e-10, 1e-10),),
        moving=(),
        links=(LinkTime("send", 1e3, 1e-5), LinkTime("send", 1e9, 1.0)),
        launch_s=1e-9,
        **dict.fromkeys(RATES_OF_MEMORY, 1e15),
        step_s=1e-9,
        runtime_bytes=1e6,
    )


def save(folder: Path, machine: Node, *, name: str | None = None) -> None:
    """Where ``WEFT_PROFILES`` names ``folder``, the profile of ``machine`` is found.

    ``name``: of another chip of it than the processor's core.
    """
    found = profile(machine)
    found = replace(found, name=name or found.name)
    save_profile(found, folder / file_name(found))
