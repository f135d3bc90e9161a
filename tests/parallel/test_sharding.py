"""ZeRO: what each rank keeps, when parameters are whole, and that nobody sees old ones."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest
from parity.cases import LEVELS, NUM_LAYERS, Case
from torch import Tensor

from weft.comm.address import RankAddress
from weft.comm.comm import Comm, Finish
from weft.cost.memory import memory_of_plan
from weft.diagnose.verify import Rehearsal, difference, rehearse, shrink, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.parallel.mains import FlatParams
from weft.plan.plan import Plan, Precision, ZeroLevel
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan

FP64 = 8
MIXED: tuple[Precision, Precision] = ("bf16", "fp32")
DP2 = Case("dp2", shares=(6,), dp=((2,),), microbatch=2)


def built_on(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> tuple[Built, Comm]:
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    return built, comm


def memory(flats: list[FlatParams]) -> int:
    return sum(flat.flat.untyped_storage().nbytes() for flat in flats)


def kept(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> dict[str, int]:
    """Bytes that a rank keeps between steps, by kind, and the most parameters at once."""
    built, comm = built_on(address, plan, rehearsal)
    flats = built.gradients.sharded
    largest = [0]

    def note(*_: Any) -> None:
        largest[0] = max(largest[0], memory(flats))

    for stage in built.stages.values():
        for module in stage.module.modules():
            module.register_forward_pre_hook(note)
            module.register_full_backward_pre_hook(note)
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    moments = sum(
        state.nbytes
        for group in built.optimizer.groups
        for states in group.states.values()
        for state in states
    )
    built.executor.evaluate(synthetic_microbatches(comm, plan, rehearsal, 1))
    built.gradients.publish()
    built.gradients.fence()
    between = memory(flats)
    comm.close()
    return {
        "moments": moments,
        "gradients": built.gradients.kept_bytes,
        "parameters": between,
        "most parameters": largest[0],
        "largest unit": max((flat.flat.nbytes for flat in flats), default=0),
    }


@pytest.mark.parametrize(
    ("level", "shares"),
    [(0, (1, 1)), *product(LEVELS[1:], [(1, 1), (1, 7), (0, 8)])],
)
def test_each_level_keeps_its_share(
    level: ZeroLevel, shares: tuple[int, int], pool: WorkerPool
) -> None:
    """Per parameter of P, over N ranks: 2P moments, P gradients, P parameters (in fp64 x 8)."""
    case = replace(DP2, zero=level, state_shares=(shares,) if shares != (1, 1) else ())
    plan, rehearsal = case.plan(), case.rehearsal()
    specs = FAMILIES[rehearsal.spec.family].param_specs(rehearsal.spec)
    whole = FP64 * sum(spec.numel for spec in specs)
    padding = 0.1 * whole  # tiny tensors at aligned places
    ranks = pool.run(kept, plan, rehearsal, world_size=2)
    predicted = memory_of_plan(plan, rehearsal.spec, rehearsal.seq_len)
    for number, rank in enumerate(ranks):
        share = whole * shares[number] / sum(shares)
        if level:
            modelled = predicted[number].optimizer / sum(m.optimizer for m in predicted.values())
            assert rank["moments"] / (2 * whole) == pytest.approx(modelled, abs=0.1)
            assert rank["moments"] or not shares[number]
        moments = 2 * (share if level >= 1 else whole)
        gradients = whole if level < 2 else share
        if level == 1:
            gradients += share  # the sums of its own segment, beside what it accumulates
        assert rank["moments"] == pytest.approx(moments, abs=2 * padding)
        assert rank["gradients"] == pytest.approx(gradients, abs=2 * padding)
        if level == 3:
            assert rank["parameters"] == 0
            # What computes, what comes next: never the whole model.
            assert rank["most parameters"] <= 2 * rank["largest unit"] < 0.8 * whole
        elif level:
            assert rank["parameters"] == pytest.approx(whole, abs=padding)


def late(comm: Comm) -> None:
    """Let what is gathered arrive only when it is waited for: who forgets to wait reads old."""
    real = comm.all_gather

    def all_gather(
        flat: Tensor, *, name: str, group: tuple[int, ...], sizes: Sequence[int] = ()
    ) -> Finish:
        copy = flat.clone()
        arrived = real(copy, name=name, group=group, sizes=sizes)

        def finish() -> None:
            arrived()
            flat.copy_(copy)

        return finish

    comm.all_gather = all_gather  # type: ignore[method-assign]


def readings(address: RankAddress, plan: Plan, rehearsal: Rehearsal, is_late: bool) -> list[Any]:
    """What every reader of parameters sees right after an update."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    if is_late:
        late(comm)
    built = assemble_model(
        plan,
        rehearsal.spec,
        comm,
        optim=rehearsal.optim,
        seq_len=rehearsal.seq_len,
        overlap=is_late,
    )
    fill(built.gradients, initial(rehearsal.seed))
    seen: list[Any] = []
    for step in range(3):
        microbatches = synthetic_microbatches(comm, plan, rehearsal, step)
        seen.append(float(built.engine.step(microbatches).loss))
        if step == 0:
            seen.append(built.executor.evaluate(microbatches).tolist())
        elif step == 1:
            for stage in built.stages.values():
                seen += [tensor.tolist() for tensor in stage.module.state_dict().values()]
        built.engine.step(microbatches)
        if step == 2:
            built.gradients.fence()
            seen += [
                p.tolist() for stage in built.stages.values() for p in stage.module.parameters()
            ]
    comm.close()
    return seen


@pytest.mark.parametrize(
    "case",
    [
        replace(DP2, zero=1),
        replace(DP2, zero=2, recompute="full", tied=True),
        Case("dp2-pp2", shares=(6,), dp=((2, 2),), layers=((2, 2),), zero=1, family="gpt2"),
        Case("unlike", shares=(4, 2), dp=((1, 1), (1,)), tp=((2, 1), (3,)), layers=((1, 3), (4,)),
             zero=2),
    ],
    ids=lambda case: f"{case.name}-zero{case.zero}",
)  # fmt: skip
def test_nobody_reads_a_parameter_before_it_has_come(case: Case, pool: WorkerPool) -> None:
    plan, rehearsal = case.plan(), case.rehearsal()
    waited = pool.run(readings, plan, rehearsal, False, world_size=plan.world_size)
    overlapped = pool.run(readings, plan, rehearsal, True, world_size=plan.world_size)
    assert overlapped == waited


@pytest.mark.parametrize(
    "case",
    [
        Case("zero2-zb-v", shares=(7,), dp=((2, 2),), layers=((1, 1, 1, 1),), schedule="zb-v",
             zero=2, tied=True),
        Case("zero3", shares=(7,), dp=((2, 2),), layers=((3, 1),), zero=3),
        Case("zero1-unlike", shares=(4, 2), dp=((1, 2), (1,)), layers=((1, 3), (4,)), zero=1),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_overlap_and_recompute_change_no_bit(case: Case, pool: WorkerPool) -> None:
    on = rehearse(pool.run, case.plan(), case.rehearsal())
    off = rehearse(pool.run, case.plan(), replace(case.rehearsal(), overlap=False))
    assert difference(on, off).largest == 0
    again = rehearse(pool.run, replace(case, recompute="full").plan(), case.rehearsal())
    assert difference(on, again).largest == 0


def counts(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> dict[str, tuple[int, float]]:
    built, comm = built_on(address, plan, rehearsal)
    built.gradients.fence()
    comm.counters.take()
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    found = {name: comm.counters[name] for name in ("gradients", "parameters")}
    comm.close()
    return {name: (count.calls, count.bytes) for name, count in found.items()}


def test_traffic_of_each_level(pool: WorkerPool) -> None:
    """Reduce-scatter and all-gather send (N-1)/N of the buffer each (arXiv 1910.02054, sec. 7)."""
    microbatches = 3
    sizes = {}
    for level in (1, 2, 3):
        case = replace(DP2, zero=level)
        ranks = pool.run(counts, case.plan(), case.rehearsal(), world_size=2)
        assert ranks[0] == ranks[1]
        sizes[level] = ranks[0]
    calls, gradients = sizes[1]["gradients"]
    assert sizes[1]["parameters"] == (calls, gradients)
    assert sizes[2]["parameters"] == sizes[1]["parameters"]
    assert sizes[2]["gradients"] == (microbatches * calls, microbatches * gradients)
    # A unit is the embedding, a layer, or norm and head. Every microbatch gathers each of them
    # forward and the layers backward, where the head is still there; so is the first layer from
    # one microbatch to the next.
    units = NUM_LAYERS + 2
    calls, total = sizes[3]["parameters"]
    assert calls == microbatches * (units + NUM_LAYERS) - (microbatches - 1)
    assert sizes[3]["gradients"][0] == microbatches * units
    assert total < microbatches * 2 * gradients * 1.1


@pytest.mark.parametrize("precision", ["bf16", "fp32", "mixed"])
def test_every_level_gives_the_bits_of_level_0_in_low_precision(
    precision: Precision | Literal["mixed"], pool: WorkerPool
) -> None:
    """Two addends have one sum; without clipping nothing else is added in another order."""
    traces = []
    for level in (0, 1, 2) if precision == "mixed" else (0, 1, 2, 3):
        case = Case("low", shares=(6,), dp=((2,),), microbatch=6, zero=level)
        rehearsal = case.rehearsal()
        optim = rehearsal.optim.model_copy(update={"max_grad_norm": None})
        if precision == "mixed":
            halves = replace(case, shares=(3, 3), dp=((1,), (1,)), microbatch=3).plan()
            low, high = (shrink(halves, NUM_LAYERS, p).pipelines[n] for n, p in enumerate(MIXED))
            plan = replace(halves, pipelines=(low, high))
        else:
            plan = shrink(case.plan(), NUM_LAYERS, precision)
        traces.append(rehearse(pool.run, plan, replace(rehearsal, optim=optim)))
    assert len(set(traces[0].losses)) == 3
    for trace in traces[1:]:
        assert trace.losses == traces[0].losses
        found = difference(traces[0], trace)
        assert found.param == found.grad == 0


def entered(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> tuple[list[str], int]:
    """What a rank begins in a step with others, in order, and the most memory of gradients."""
    built, comm = built_on(address, plan, rehearsal)
    found: list[str] = []
    most = [0]
    begin = comm._start

    def note(name: str, ranks: tuple[int, ...], *args: Any, **kwargs: Any) -> Finish:
        found.append(f"{name} of {ranks}")
        most[0] = max(most[0], built.gradients.kept_bytes)
        return begin(name, ranks, *args, **kwargs)

    comm._start = note  # type: ignore[method-assign]
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    comm.close()
    return found, most[0]


LAST_ALONE = Case("last alone", shares=(5,), dp=((2,),), microbatch=2)
ORDERS = [
    replace(LAST_ALONE, zero=3, tied=True),
    replace(LAST_ALONE, zero=2),
    replace(LAST_ALONE, zero=3, dp=((2, 1),), layers=((3, 1),), schedule="zb-h1", zeros=(3, 0)),
]


@pytest.mark.parametrize("case", ORDERS, ids=("3 tied", "2", "3 in halves"))
def test_ranks_without_samples_keep_the_order_of_the_others(case: Case, pool: WorkerPool) -> None:
    """One order over all communicators: the last sample is the first rank's alone."""
    plan = case.plan()
    first, second = pool.run(entered, plan, case.rehearsal(), world_size=plan.world_size)[:2]
    assert len(first[0]) > 4
    assert second[0] == first[0]
    assert second[1] <= first[1], "zeros are made as they are sent"
