"""One process of Weft against the reference: the anchor of every other parity test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parity.cases import OPTIM, PARITY, Case
from parity.test_parity import TOLERANCE

from weft.config.optim_sections import OptimConfig, ParamGroupConfig, SgdConfig, WsdSchedule
from weft.diagnose.reference import by_reference
from weft.diagnose.verify import Rehearsal, difference, one_process, rehearse
from weft.elastic.pool import WorkerPool
from weft.plan.model import RopeScaling

ONE = Case("one", shares=(6,), microbatch=4)
LLAMA, GPT2 = ONE.rehearsal(), replace(ONE, family="gpt2").rehearsal()
GROUPS = (
    ParamGroupConfig(params="layers.1.attn.q.weight", lr_scale=0.5),
    ParamGroupConfig(params="layers.[01].*", trainable=False),
    ParamGroupConfig(params="embed*", weight_decay=0.3),
    ParamGroupConfig(params="*norm.weight", weight_decay=0.2, lr_scale=3.0),
)
STRETCHED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=64)
"""Turns of 6, 20, 63 and 199 tokens with the numbers below: kept, between, between, slowed."""
LONGER = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "dynamic": RopeScaling(kind="dynamic", factor=3.0, original_seq_len=5),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_seq_len=64, beta_fast=8.0),
    "by parts": RopeScaling(
        kind="yarn", factor=4.0, original_seq_len=64, attention_factor=1.0, truncate=False
    ),
}


def with_optim(optim: OptimConfig, **fields: object) -> Rehearsal:
    return replace(LLAMA, optim=optim.model_copy(update=fields))


SIDES = {(case.rehearsal(), case.plan().global_batch): case.name for case in reversed(PARITY)}
"""What the parity table compares its plans with, by the first row that does."""
MORE = {
    "biases": replace(LLAMA, spec=replace(LLAMA.spec, qkv_bias=True)),
    "norms of queries": replace(LLAMA, spec=replace(LLAMA.spec, qk_norm=True)),
    **{
        f"positions, {kind}": replace(
            LLAMA, spec=replace(LLAMA.spec, d_head=8, rope_theta=100.0, rope_scaling=scaling)
        )
        for kind, scaling in (("llama3", STRETCHED), *LONGER.items())
    },
    "gpt2 untied": replace(GPT2, spec=replace(GPT2.spec, tied=False)),
    "gpt2 groups": replace(GPT2, optim=OPTIM.model_copy(update={"groups": GROUPS})),
    "groups": with_optim(OPTIM, groups=GROUPS),
    "no clipping": with_optim(OPTIM, max_grad_norm=None),
    "straight lines": with_optim(
        OPTIM, schedule=WsdSchedule(warmup=0.4, decay=0.4, final_ratio=0.1)
    ),
    "sgd": with_optim(SgdConfig(lr=0.05)),
    "sgd without momentum": with_optim(SgdConfig(lr=0.05, momentum=0.0)),
}


@pytest.mark.parametrize(
    ("rehearsal", "samples"),
    [*SIDES, *((rehearsal, 6) for rehearsal in MORE.values())],
    ids=[*SIDES.values(), *MORE],
)
def test_one_process_is_what_the_reference_computes(
    rehearsal: Rehearsal, samples: int, pool: WorkerPool
) -> None:
    rehearsal = replace(rehearsal, steps=5 if rehearsal is MORE["straight lines"] else 3)
    plan = one_process(replace(ONE, shares=(samples,)).plan())
    expected = by_reference(rehearsal, samples)
    assert len(set(expected.losses)) == rehearsal.steps, "the losses never changed"
    found = difference(expected, rehearse(pool.run, plan, rehearsal))
    assert found.largest < TOLERANCE, found


def test_a_part_of_a_sample_turns_as_far_as_all_of_it(pool: WorkerPool) -> None:
    """Dynamic scaling goes by the length of samples, of which no rank has all."""
    rehearsal, plan = MORE["positions, dynamic"], Case("cp2", (6,), dp=((1,),), cp=((2,),)).plan()
    found = difference(by_reference(rehearsal, 6), rehearse(pool.run, plan, rehearsal))
    assert found.largest < TOLERANCE, found


def test_microbatches_are_the_reference_s_too(pool: WorkerPool) -> None:
    """``one_process`` takes the batch whole; a plan of one rank may cut it."""
    found = difference(by_reference(LLAMA, 6), rehearse(pool.run, ONE.plan(), LLAMA))
    assert found.largest < TOLERANCE, found
