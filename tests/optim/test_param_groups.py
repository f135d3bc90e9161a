"""Groups of parameters: their own numbers, and frozen ones that cost nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optim.test_rules import run_of
from parity.cases import OPTIM, Case
from parity.test_parity import TOLERANCE

from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import load_config
from weft.config.optim_sections import AdamWConfig, OptimConfig, ParamGroupConfig
from weft.diagnose.verify import (
    Rehearsal,
    difference,
    one_process,
    rehearse,
    synthetic_microbatches,
)
from weft.elastic.pool import WorkerPool
from weft.models.registry import param_specs
from weft.nn.init import initial_values
from weft.optim.groups import Settings, marked, refuse_idle_groups, settings_of
from weft.optim.registry import training_of
from weft.plan.box import Box
from weft.plan.plan import Plan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.saving import restore, save

Group = ParamGroupConfig
FROZEN = OPTIM.model_copy(
    update={
        "groups": (
            Group(params="layers.1.attn.q.weight", lr_scale=0.5),
            Group(params="layers.[01].*", trainable=False),
            Group(params="embed*", trainable=False),
            Group(params="head*", trainable=False),
            Group(params="*.ff.up.weight", lr_scale=3.0, weight_decay=0.0),
        )
    }
)
"""Nothing below the second layer's first matrix is trained, and not the head."""
SPLITS = [
    Case("dp2", shares=(6,), dp=((2,),)),
    Case("tp2-recompute", shares=(6,), dp=((1,),), tp=((2,),), recompute="full"),
    Case("first-stage-frozen", shares=(6,), dp=((1, 1, 1),), layers=((1, 1, 2),)),
    Case("zb-v", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), schedule="zb-v"),
    Case("zero3-recompute", shares=(6,), dp=((2,),), zero=3, recompute="full"),
    Case("zero3-idle-rank", shares=(5,), dp=((3,),), zero=3, microbatch=2),
    Case("unlike-pipelines", shares=(4, 2), dp=((1, 2), (1,)), tp=((2, 1), (3,)),
         layers=((1, 3), (4,)), zero=2),
]  # fmt: skip


def frozen(case: Case) -> Rehearsal:
    return replace(case.rehearsal(), optim=FROZEN)


@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.name)
def test_every_split_is_exact(case: Case, pool: WorkerPool) -> None:
    rehearsal, plan = frozen(case), case.plan()
    alone = rehearse(pool.run, one_process(plan), rehearsal)
    trained = {spec.name for spec in marked(FROZEN, param_specs(rehearsal.spec)) if spec.trainable}
    assert alone.grads.keys() == trained
    found = difference(alone, rehearse(pool.run, plan, rehearsal))
    assert found.largest < TOLERANCE, found


WIDE = [
    Case("fp8-tp2-dp2", shares=(6,), dp=((2,),), tp=((2,),), zero=1, precision="fp8-fp64"),
    Case("fp8-pp2-recompute", shares=(6,), dp=((1, 1),), recompute="full", precision="fp8-fp64"),
]


def products(*groups: ParamGroupConfig) -> Rehearsal:
    return replace(WIDE[0].rehearsal(), optim=OPTIM.model_copy(update={"groups": groups}))


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_products_with_some_weights_keep_their_bits(case: Case, pool: WorkerPool) -> None:
    """Under every plan, those that are named or narrow alone: keys and values are, by half."""
    every = products()
    narrow = min(s.shape[0] for s in param_specs(every.spec) if s.name == "layers.0.attn.k.weight")
    some = products(
        Group(params="layers.*", narrower_than=narrow + 1, fp8=False),
        Group(params="layers.[01].ff.*", fp8=False),
    )
    alone = rehearse(pool.run, one_process(case.plan()), some)
    assert difference(alone, rehearse(pool.run, case.plan(), some)).largest < TOLERANCE
    none = products(Group(params="layers.*", fp8=False))
    exact = rehearse(_here, one_process(replace(case, precision="fp64").plan()), every)
    assert difference(exact, rehearse(_here, one_process(case.plan()), none)).largest == 0
    assert difference(alone, exact).loss > 1e-7
    assert difference(alone, rehearse(_here, one_process(case.plan()), every)).loss > 1e-7


def test_sizes_say_which() -> None:
    groups = (Group(params="layers.*", narrower_than=32, fp8=False),)
    optim, specs = OPTIM.model_copy(update={"groups": groups}), param_specs(products().spec)
    matrices = [s for s in marked(optim, specs) if "layers." in s.name and len(s.shape) == 2]
    wide = [spec for spec in matrices if not spec.fp8]
    assert {spec.name.split(".")[3] for spec in wide} == {"k", "v"}
    part = training_of(optim, specs).wide_products
    assert part == sum(spec.numel for spec in wide) / sum(spec.numel for spec in matrices)


def test_first_match_wins() -> None:
    specs = {spec.name: spec for spec in marked(FROZEN, param_specs(SPLITS[0].rehearsal().spec))}
    decay = FROZEN.weight_decay
    expected = {
        "layers.1.attn.q.weight": Settings(0.5, decay),
        "layers.2.ff.up.weight": Settings(3.0, 0.0),
        "layers.2.ff.down.weight": Settings(1.0, decay),
        "norm.weight": Settings(1.0, 0.0),
    }
    assert {name: settings_of(FROZEN, specs[name]) for name in expected} == expected
    assert all(specs[name].trainable for name in expected)
    assert not specs["layers.1.ff.up.weight"].trainable
    assert not specs["embed.weight"].trainable


def test_a_scale_multiplies_the_learning_rate() -> None:
    """Half the rate for all is half the rate."""
    rehearsal = replace(Case("one", shares=(6,)).rehearsal(), steps=2)
    scaled = OPTIM.model_copy(update={"groups": (Group(params="*", lr_scale=0.5),)})
    half = OPTIM.model_copy(update={"lr": OPTIM.lr / 2})
    traces = [rehearse(_here, Case("one", shares=(6,)).plan(), replace(rehearsal, optim=optim))
              for optim in (scaled, half, OPTIM)]  # fmt: skip
    assert difference(traces[0], traces[1]).largest == 0
    assert difference(traces[0], traces[2]).param > 1e-6


def _here(job: Any, *args: Any, world_size: int) -> list[Any]:
    return [job(RankAddress(), *args) for _ in range(world_size)]


def count(address: RankAddress, plan: Plan, rehearsal: Rehearsal, root: Path) -> dict[str, Any]:
    """What a rank keeps for the parameters that it trains, and what it sends for them."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    params = {n: p for stage in built.stages.values() for n, p in stage.module.named_parameters()}
    before = {name: param.detach().clone() for name, param in params.items()}
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    save(run_of(built, comm, plan, rehearsal), root, 1, fingerprint="same")
    restore(built, open_checkpoint(root))
    built.gradients.fence()
    sent = comm.counters["gradients"].bytes
    comm.close()
    return {
        "moved": {n for n, p in params.items() if not torch.equal(p, before[n])},
        "without gradient": {n for n, p in params.items() if not p.requires_grad},
        "mains": {main.spec.name for main in built.gradients.mains},
        "states": sum(len(group.mains) for group in built.optimizer.groups),
        "kept": built.gradients.kept_bytes,
        "sent": sent,
    }


def test_frozen_parameters_cost_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    case = SPLITS[0]
    plan, rehearsal = case.plan(), frozen(case)
    specs = marked(FROZEN, param_specs(rehearsal.spec))
    trained = {spec.name: spec for spec in specs if spec.trainable}
    found, _ = pool.run(count, plan, rehearsal, tmp_path / "frozen", world_size=2)
    assert found["moved"] == found["mains"] == trained.keys()
    assert found["without gradient"] == {spec.name for spec in specs} - trained.keys()
    assert found["states"] == len(trained)
    every, _ = pool.run(count, plan, case.rehearsal(), tmp_path / "every", world_size=2)
    assert every["mains"] == {spec.name for spec in specs}
    part = sum(spec.numel for spec in trained.values()) / sum(spec.numel for spec in specs)
    for key in ("kept", "sent"):
        assert found[key] == pytest.approx(part * every[key], rel=0.05), key
    checkpoint = open_checkpoint(tmp_path / "frozen")
    assert set(checkpoint.names("param")) == {spec.name for spec in specs}
    assert set(checkpoint.names("exp_avg")) == set(checkpoint.names("exp_avg_sq")) == trained.keys()
    embed = next(spec for spec in specs if spec.name == "embed.weight")
    whole = Box.whole(embed.shape)
    start = initial_values(rehearsal.seed, embed, whole, torch.float64)
    assert np.array_equal(checkpoint.read("embed.weight").numpy(), start.numpy())


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (
            (Group(params="layer.*"),),
            "optim.groups[0].params = 'layer.*': expected a pattern that matches a parameter's",
        ),
        (
            (Group(params="layers.*"), Group(params="layers.2.*", lr_scale=2.0)),
            "optim.groups[1].params = 'layers.2.*': expected a parameter that no group before it",
        ),
        (
            (Group(params="*norm*", fp8=False),),
            "optim.groups[0].params = '*norm*': expected a pattern that matches a layer's matrix",
        ),
        (
            (Group(params="*", trainable=False),),
            "optim.groups = 'all frozen': expected at least one parameter that is trained",
        ),
    ],
    ids=["nothing", "shadowed", "no-product", "all"],
)
def test_a_group_without_effect_is_refused(
    groups: tuple[ParamGroupConfig, ...], problem: str
) -> None:
    optim: OptimConfig = AdamWConfig(groups=groups)
    with pytest.raises(ConfigError) as refused:
        refuse_idle_groups(optim, param_specs(SPLITS[0].rehearsal().spec))
    assert str(refused.value).startswith(problem)


def test_groups_in_a_configuration() -> None:
    given = 'optim.groups=[{params: "embed*", trainable: false}]'
    optim = load_config("debug", [given]).config.optim
    assert optim.groups == (Group(params="embed*", trainable=False),)
    frozen_twice = 'optim.groups=[{params: "embed*", trainable: false, lr_scale: 2.0}]'
    with pytest.raises(ConfigErrors, match="no lr_scale or weight_decay beside it"):
        load_config("debug", [frozen_twice])
    sgd = load_config("debug", ["optim.kind=sgd", "optim.momentum=0.5"]).config.optim
    assert (sgd.kind, sgd.lr, sgd.model_dump()["momentum"]) == ("sgd", 0.003, 0.5)
    with pytest.raises(ConfigErrors, match=r"optim.kind = 'adam': .* Did you mean 'adamw'"):
        load_config("debug", ["optim.kind=adam"])
