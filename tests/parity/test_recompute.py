"""Every way to recompute gives the numbers of none, bit for bit, with dropout on."""

from dataclasses import replace

import numpy as np
from parity.cases import PARITY, Case

from weft.cost.memory import memory_of_plan
from weft.diagnose.verify import rehearse
from weft.elastic.pool import WorkerPool
from weft.models.registry import param_specs
from weft.optim.registry import training_of
from weft.plan.plan import Plan
from weft.recompute.registry import MODES
from weft.resolve.kept import with_activations_in

PARTS = (0.75, 0.5)
"""Of what ranks keep where nothing is computed again."""


def test_every_mode_keeps_every_bit(pool: WorkerPool) -> None:
    """In a pipeline of ranks with tensor parallelism that put off weight gradients; also what a
    budget of bytes chooses, by stage and by number of layers."""
    case = next(case for case in PARITY if case.name == "tp2-zb-h1-gpt2-attention")
    modes = [name for name, mode in MODES.items() if not mode.offloads and not mode.chunk_tokens]
    assert modes[0] == "off"
    plans = {mode: replace(case, recompute=mode).plan() for mode in (*modes, case.recompute)}
    budgets = [within(case, plans["off"], part) for part in PARTS]
    plans |= {" and ".join(s.recompute for _, _, s in plan.stages()): plan for plan in budgets}
    assert len(plans) == len({*modes, case.recompute}) + len(PARTS), plans.keys()
    short = replace(case.rehearsal(), steps=2)
    off, *others = (rehearse(pool.run, plan, short) for plan in plans.values())
    for mode, found in zip([*plans][1:], others, strict=True):
        assert found.losses == off.losses, mode
        for ours, theirs in ((found.grads, off.grads), (found.params, off.params)):
            assert ours.keys() == theirs.keys()
            for name, values in ours.items():
                assert np.array_equal(values, theirs[name], equal_nan=True), (mode, name)


def within(case: Case, plan: Plan, part: float) -> Plan:
    """The plan whose ranks keep no more than a part of what they would."""
    asked = case.rehearsal()
    training = training_of(asked.optim, param_specs(asked.spec))
    kept = memory_of_plan(plan, asked.spec, asked.seq_len, training=training).values()
    gib = part * max(memory.activations for memory in kept) / 2**30
    places = [(0, position) for position in range(len(plan.pipelines[0].stages))]
    found = with_activations_in(
        plan, gib, asked.spec, asked.seq_len, training=training, places=places
    )
    assert found != plan
    return found
