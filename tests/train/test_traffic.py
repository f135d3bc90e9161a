"""What one step sends, against arithmetic on the plan."""

from dataclasses import replace
from math import prod

import pytest
from parity.cases import NUM_LAYERS, Case

from weft.comm.address import RankAddress
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.plan.plan import Plan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan

Rows = dict[str, tuple[int, int, float, list[int]]]
"""Collective name -> calls, messages, bytes, peers."""


def one_step(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> Rows:
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    comm.counters.take()
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    counts = {name: comm.counters[name] for name in comm.counters}
    comm.close()
    return {n: (c.calls, c.messages, c.bytes, sorted(c.peers)) for n, c in counts.items()}


def run(pool: WorkerPool, case: Case) -> tuple[list[Rows], Rehearsal]:
    plan, rehearsal = case.plan(), case.rehearsal()
    return pool.run(one_step, plan, rehearsal, world_size=plan.world_size), rehearsal


def bucket_numel(rehearsal: Rehearsal) -> int:
    """All parameters in one bucket, the model's first one last; the others fill multiples of 64."""
    specs = FAMILIES[rehearsal.spec.family].param_specs(rehearsal.spec)
    first, *rest = (prod(spec.shape) for spec in specs)
    return first + sum(-(-numel // 64) * 64 for numel in rest)


FP64 = 8
TOTALS = 5 * FP64
"""Loss, weight, squared norm, stop."""


def test_data_parallel(pool: WorkerPool) -> None:
    ranks, rehearsal = run(pool, Case("dp3", shares=(3, 1, 2), microbatch=1))
    for rank, rows in enumerate(ranks):
        others = [r for r in range(3) if r != rank]
        size = FP64 * bucket_numel(rehearsal)
        assert rows == {
            "gradients": (1, 4, pytest.approx(2 * 2 / 3 * size), others),
            "step totals": (1, 4, pytest.approx(2 * 2 / 3 * TOTALS), others),
        }


def test_pipeline(pool: WorkerPool) -> None:
    case = Case("pp3", shares=(6,), dp=((1, 1, 1),), layers=((1, 3, 0),), microbatch=2)
    ranks, rehearsal = run(pool, case)
    border = FP64 * 2 * rehearsal.seq_len * rehearsal.spec.d_model
    assert [rows["activations"] for rows in ranks] == [
        (3, 3, 3 * border, [1]),
        (6, 6, 6 * border, [0, 2]),
        (3, 3, 3 * border, [1]),
    ]


def test_many_to_few(pool: WorkerPool) -> None:
    """Two ranks of two samples each to one of four, and back."""
    case = Case("border", shares=(4,), dp=((2, 1),), layers=((2, 2),), microbatch=4)
    ranks, rehearsal = run(pool, case)
    part = FP64 * 2 * rehearsal.seq_len * rehearsal.spec.d_model
    assert [rows["activations"] for rows in ranks] == [
        (1, 1, part, [2]),
        (1, 1, part, [2]),
        (1, 2, 2 * part, [0, 1]),
    ]


def test_tensor_parallel_with_sequence_parallel(pool: WorkerPool) -> None:
    case = Case("tp2", shares=(6,), dp=((1,),), tp=((2,),), microbatch=3)
    ranks, rehearsal = run(pool, case)
    # Two regions a layer, the embedding and the head: each changes layout once forward and once
    # backward, into whole sequences or out of them.
    calls = 2 * (2 * 2 * NUM_LAYERS + 2)
    part = FP64 * 3 * rehearsal.seq_len // 2 * rehearsal.spec.d_model
    for rank, rows in enumerate(ranks):
        assert rows["gather seq"] == (calls, calls, calls * part, [1 - rank])
        assert rows["scatter seq"] == (calls, calls, calls * part, [1 - rank])
        assert rows["step totals"] == (1, 2, TOTALS, [1 - rank])


def test_pieces_are_more_calls_and_no_more_bytes(pool: WorkerPool) -> None:
    """Also where a layer is computed again, which ends before its last sum."""
    case = Case("tp2", shares=(6,), dp=((1,),), tp=((2,),), microbatch=3, recompute="full")
    (once, *_), rehearsal = run(pool, case)
    (ours, *_), _ = run(pool, replace(case, pieces=3))
    part = FP64 * 3 * rehearsal.seq_len // 2 * rehearsal.spec.d_model
    layers = 2 * NUM_LAYERS
    for name, in_a_layer in (("gather seq", 6), ("scatter seq", 5)):
        at_once, ends = in_a_layer * layers, 2 * 2
        assert once[name] == (at_once + ends, at_once + ends, (at_once + ends) * part, [1])
        assert ours[name] == (3 * at_once + ends, 3 * at_once + ends, once[name][2], [1])
    same = once.keys() - {"gather seq", "scatter seq"}
    assert {name: ours[name] for name in same} == {name: once[name] for name in same}


def on_machines(
    address: RankAddress, plan: Plan, rehearsal: Rehearsal
) -> list[tuple[str, str, float]]:
    """As two machines of two processes each; what crosses a link, by name."""
    address = replace(address, node=str(address.rank // 2))
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    comm.counters.take()
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    comm.close()
    return sorted((name, link, c.bytes) for (name, link), c in comm.counters.take().items())


def test_what_stays_in_a_machine_is_told_from_what_leaves_it(pool: WorkerPool) -> None:
    """Tensor parallel inside each machine, a border between them."""
    case = Case("tp2-pp2", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),))
    plan, rehearsal = case.plan(), case.rehearsal()
    for rows in pool.run(on_machines, plan, rehearsal, world_size=4):
        links = {name: link for name, link, _ in rows}
        assert len(links) == len(rows) >= 5
        far = {name for name, link in links.items() if link == "across"}
        assert far == {"activations", "step totals"}
