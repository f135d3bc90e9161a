"""Parameters and activations on disk: not one bit differs, on processors too."""

import gc
from dataclasses import replace
from typing import Any

import pytest
from parity.cases import Case
from tiers.test_state_elsewhere import trained

from weft.comm.address import RankAddress
from weft.cost.activations import stage_away
from weft.cost.choice import choice_of
from weft.diagnose.verify import Rehearsal
from weft.elastic.pool import WorkerPool
from weft.memory import shelf, spool
from weft.models.registry import shape_of
from weft.plan.plan import Plan

GPT2 = {"family": "gpt2", "dropout": 0.2, "shares": (6,), "precision": "bf16"}
PARAMS = [
    Case("alone", **GPT2),
    Case("zero3-passes", shares=(6,), dp=((2,),), zero=3, passes=2, tied=True, precision="bf16"),
]
ACTIVATIONS = [
    (Case("1f1b", dp=((1, 1),), layers=((3, 1),), **GPT2), "attention+offload_disk:2"),
    (Case("zb-h1", dp=((1, 1),), schedule="zb-h1", layers=((2, 2),), **GPT2), "offload_disk"),
]


def watched(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> dict[str, Any]:
    """What training leaves, the bytes that went to disk for backward, and those that came back;
    those of parameters that came, and how much was read ahead at a time."""
    moved = dict.fromkeys(("write", "read", "brought"), 0)
    write, read, bring = spool._Room.write, spool._Room.read, shelf._OnDisk.bring
    coming = {"now": 0, "most": 0}

    def written(room: Any, both: Any, ready: Any) -> None:
        moved["write"] += sum(there.nbytes for _, there in both)
        write(room, both, ready)

    def came(room: Any, both: Any, free: Any) -> Any:
        moved["read"] += sum(here.nbytes for _, here in both)
        return read(room, both, free)

    def brought(self: Any, rest: Any, into: Any, then: Any) -> Any:
        moved["brought"] += rest.nbytes
        coming["now"] += 1
        coming["most"] = max(coming["most"], coming["now"])
        arrive = bring(self, rest, into, then)

        def arrived() -> None:
            coming["now"] -= 1
            arrive()

        return arrived

    spool._Room.write, spool._Room.read, shelf._OnDisk.bring = written, came, brought
    try:
        found = trained(address, plan, rehearsal)
    finally:
        spool._Room.write, spool._Room.read, shelf._OnDisk.bring = write, read, bring
    gc.collect()
    return found | moved | {"ahead": coming["most"]}


@pytest.mark.parametrize("case", PARAMS, ids=lambda case: case.name)
@pytest.mark.parametrize("state", ["device", "disk"])
def test_parameters_come_from_disk(case: Case, state: str, pool: WorkerPool) -> None:
    plan, rehearsal = case.plan(), case.rehearsal()
    away = plan.each(lambda stage: replace(stage, param_tier="disk", state_tier=state))
    both = [pool.run(watched, each, rehearsal, world_size=plan.world_size) for each in (plan, away)]
    for usual, disk in zip(*both, strict=True):
        assert disk["bits"] == usual["bits"]
        assert disk["after"] == usual["after"]
        assert usual["brought"] == 0 < disk["brought"]
        assert disk["ahead"] <= 3  # of a unit and the next: one is in two parts where it is tied


@pytest.mark.parametrize(("case", "mode"), ACTIVATIONS, ids=lambda v: getattr(v, "name", ""))
def test_activations_go_to_disk_and_come_back(case: Case, mode: str, pool: WorkerPool) -> None:
    rehearsal = case.rehearsal()
    plans = [replace(case, recompute=each).plan() for each in ("off", mode)]
    both = [pool.run(watched, each, rehearsal, world_size=each.world_size) for each in plans]
    (line,) = plans[1].pipelines
    for rank, (usual, disk) in enumerate(zip(*both, strict=True)):
        assert disk["bits"] == usual["bits"]
        assert disk["after"] == usual["after"]
        work = choice_of(line, rank, rehearsal.seq_len).work
        one = stage_away(shape_of(rehearsal.spec), work, "disk")
        assert usual["write"] == 0
        each, rest = divmod(disk["write"], 2 * line.num_microbatches)
        # Bytes of large layers are compared on the chip; what comes over a border stays here.
        assert 0.7 * one < each < 1.01 * one and not rest
        assert disk["read"] <= disk["write"]
    assert sum(disk["read"] for disk in both[1]) > 0  # but for what backward reads at once
