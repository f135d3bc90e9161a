"""Sites that train for themselves and meet: exact where theory says so, under any plan of each."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optim.toy_rules import SignConfig

from weft.checkpoint.reader import open_checkpoint
from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.config.optim_sections import AdamWConfig, OptimConfig, SgdConfig
from weft.config.sections import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    SitesConfig,
    TrainConfig,
)
from weft.data.batch import Batch
from weft.data.synthetic import SyntheticDataset
from weft.elastic.failure import Failure, RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import run_ranks
from weft.models.llama.sizes import SIZES
from weft.outer.meeting import NAME
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.platform.cpu import CpuPlatform
from weft.train.assemble import fill, initial
from weft.train.engine import Engine
from weft.train.family import assemble_model
from weft.train.loop import Run, StepRecord, train
from weft.train.saving import restore, save

SPEC = replace(SIZES["debug-1m"].reduced(), num_layers=2)
LAST = 7
ADAM = AdamWConfig(lr=0.01, max_grad_norm=0.5)
SGD = SgdConfig(lr=0.1, momentum=0.0, max_grad_norm=None)
PLAIN = SitesConfig(every=1, rate=1.0, momentum=0.0, wire="fp64")
ROUNDS = SitesConfig(every=3, fragments=2, delay=2, wire="fp64")


@dataclass(frozen=True)
class Part:
    """Some steps of a job, and where it is saved after them."""

    plan: Plan
    sites: SitesConfig | None
    optim: OptimConfig = ADAM
    first: int = 0
    last: int = LAST
    root: Path | None = None
    start: Path | None = None
    """What it goes on from."""
    log_every: int = 1
    weightless: tuple[int, ...] = ()
    """Steps in which samples of the second site weigh nothing."""


def pipeline(
    first: int, samples: int, *, dp: int = 1, tp: int = 1, pp: int = 1, zero: ZeroLevel = 0
) -> PipelinePlan:
    stages = []
    for s in range(pp):
        ranks = range(first + s * dp * tp, first + (s + 1) * dp * tp)
        mesh = Mesh.of(ranks, dp=dp, tp=tp)
        layers = (2 * s // pp, 2 * (s + 1) // pp)
        stages.append(StagePlan(mesh=mesh, layers=layers, precision="fp64", zero=zero))
    return PipelinePlan(stages=tuple(stages), samples=samples, microbatch=2)


def plan_of(*pipelines: PipelinePlan, apart: bool = True) -> Plan:
    """Each pipeline a site."""
    sites = (tuple(r for s in p.stages for r in s.mesh.ranks) for p in pipelines)
    return Plan(num_layers=2, pipelines=pipelines, sites=tuple(sites) if apart else ())


TWO = plan_of(pipeline(0, 4), pipeline(1, 2))
ONE = plan_of(pipeline(0, 6), apart=False)


def run_part(address: RankAddress, part: Part) -> dict[str, Any]:
    plan = part.plan
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    built = assemble_model(plan, SPEC, comm, optim=part.optim, seq_len=16, sites=part.sites)
    if part.start is not None:
        restore(built, open_checkpoint(part.start))
    else:
        fill(built.gradients, initial(3))
        if built.meeting is not None:
            built.meeting.start(0)
    data = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=16, seed=3)
    mine = [i for part in plan.rank_plan(address.rank).microbatches() for i in part]

    def batch(step: int) -> Batch:
        made = data.batch([step * 6 + i for i in mine])
        made.weights[:] *= not (step in part.weightless and address.rank in plan.sites[1])
        return made

    run = Run(
        config=Config(
            data=DataConfig(path="none", seq_len=16),
            batch=BatchConfig(samples=6, micro=1),
            optim=part.optim,
            train=TrainConfig(steps=LAST, log_every=part.log_every),
            checkpoint=CheckpointConfig(keep=1),
        ),
        plan=plan,
        spec=SPEC,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=map(batch, range(part.first, 99)),
        first_step=part.first,
        last_step=part.last,
    )
    losses: list[float] = []

    def hook(record: StepRecord) -> None:
        losses.extend(numbers.loss for numbers in record.read)

    train(run, [hook])
    if part.root is not None:
        save(run, part.root, part.last, fingerprint="same")
    params: dict[str, np.ndarray] = {}
    for main in built.gradients.mains:
        whole = params.setdefault(main.spec.name, np.full(main.spec.shape, np.nan))
        whole[main.box.slices()] = main.value.detach().double().numpy()
    sent = comm.counters[NAME].bytes
    comm.close()
    return {"losses": losses, "params": params, "sent": sent}


@dataclass(frozen=True)
class Trace:
    """What came of a job: losses, and the parameters of each site."""

    losses: list[float]
    sites: list[dict[str, np.ndarray]]
    sent: float


def trained(pool: WorkerPool, *parts: Part) -> Trace:
    losses: list[float] = []
    for part in parts:
        ranks = pool.run(run_part, part, world_size=part.plan.world_size)
        assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks), "all have all losses"
        losses += ranks[0]["losses"]
        sites = [_whole([ranks[r]["params"] for r in site]) for site in _sites(part.plan)]
        sent = sum(rank["sent"] for rank in ranks)
    return Trace(losses, sites, sent)


def _sites(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return plan.sites or (plan.ranks,)


def _whole(ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Put together; ranks that hold the same elements have the same values."""
    found: dict[str, np.ndarray] = {}
    for name, own in (item for rank in ranks for item in rank.items()):
        whole = found.setdefault(name, own)
        both = ~np.isnan(whole) & ~np.isnan(own)
        assert np.array_equal(whole[both], own[both]), f"replicas of {name} differ"
        found[name] = np.where(np.isnan(own), whole, own)
    assert not any(np.isnan(whole).any() for whole in found.values())
    return found


def farthest(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    return max(float(np.abs(one[n] - other[n]).max() / np.abs(one[n]).max()) for n in one)


def assert_same(whole: Trace, left: Trace, found: Trace) -> None:
    """Two parts are the whole job, bit for bit."""
    assert left.losses + found.losses == whole.losses
    for one, other in zip(whole.sites, found.sites, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_meeting_after_every_step_is_data_parallelism(pool: WorkerPool) -> None:
    """Plain SGD inside, the mean of the sites outside: samples have random weights."""
    alone = trained(pool, Part(ONE, None, SGD))
    found = trained(pool, Part(TWO, PLAIN, SGD))
    assert found.losses == pytest.approx(alone.losses, rel=1e-12)
    assert len(set(alone.losses)) == LAST
    for site in found.sites:
        assert farthest(alone.sites[0], site) < 1e-12


@pytest.mark.parametrize("wire", ["fp64", "int8"])
def test_numbers_do_not_depend_on_the_plan_of_a_site(pool: WorkerPool, wire: Any) -> None:
    sites = ROUNDS.model_copy(update={"wire": wire})
    alone = trained(pool, Part(TWO, sites))
    unlike = plan_of(pipeline(0, 4, pp=2), pipeline(2, 2, dp=2, zero=1))
    found = trained(pool, Part(unlike, sites))
    other = trained(pool, Part(plan_of(pipeline(0, 4, dp=2), pipeline(2, 2, tp=2)), sites))
    for trace in (found, other):
        assert trace.losses == pytest.approx(alone.losses, rel=1e-10)
        assert all(farthest(*pair) < 1e-10 for pair in zip(alone.sites, trace.sites, strict=True))
    assert farthest(*alone.sites) > 1e-4, "sites differ between meetings"


@pytest.mark.parametrize(
    ("optim", "weightless"), [(ADAM, ()), (ADAM, (1,)), (SignConfig(lr=0.01), (0, 1, 2, 3))]
)
def test_a_job_goes_on_bit_for_bit_between_meetings(
    pool: WorkerPool, tmp_path: Path, optim: OptimConfig, weightless: tuple[int, ...]
) -> None:
    """Left after step 4, when outer gradients of both fragments are under way; which pipelines
    are a site may be said otherwise. A site without weight makes no update: its count is its own,
    and before its first it may have no state."""
    whole = trained(pool, Part(TWO, ROUNDS, optim, weightless=weightless))
    said = ROUNDS.model_copy(update={"pipelines": ((0,), (1,))})
    left = trained(pool, Part(TWO, said, optim, last=4, root=tmp_path, weightless=weightless))
    found = trained(pool, Part(TWO, ROUNDS, optim, first=4, start=tmp_path))
    assert_same(whole, left, found)


def test_others_go_on_with_what_sites_left(pool: WorkerPool, tmp_path: Path) -> None:
    """Under another plan of each site as if it had been that all along; without sites, or with
    others, from where they last met."""
    whole = trained(pool, Part(TWO, ROUNDS))
    trained(pool, Part(TWO, ROUNDS, last=4, root=tmp_path))
    saved = open_checkpoint(tmp_path)
    met = {name: saved.read(name).numpy() for name in saved.names()}
    unlike = plan_of(pipeline(0, 4, tp=2), pipeline(2, 2, dp=2, zero=2))
    found = trained(pool, Part(unlike, ROUNDS, first=4, start=tmp_path))
    assert found.losses == pytest.approx(whole.losses[4:], rel=1e-10)
    assert all(farthest(*pair) < 1e-10 for pair in zip(whole.sites, found.sites, strict=True))
    three = plan_of(pipeline(0, 2), pipeline(1, 2), pipeline(2, 2))
    for plan, sites in ((ONE, None), (three, ROUNDS)):
        same = trained(pool, Part(plan, sites, first=4, last=4, start=tmp_path))
        assert all(np.array_equal(site[name], met[name]) for site in same.sites for name in met)
    # What was under way is not, neither for them nor for who goes on from there.
    after = trained(pool, Part(three, ROUNDS, first=4, start=tmp_path))
    left = trained(pool, Part(three, ROUNDS, first=4, last=5, start=tmp_path, root=tmp_path))
    assert_same(after, left, trained(pool, Part(three, ROUNDS, first=5, start=tmp_path)))


def is_killed(address: RankAddress, part: Part, *, abort: Abort | None = None) -> None:
    """Rank 1, before a step that ends with a meeting: nothing else is said between sites."""
    step, done = Engine.step, list[int]()

    def counted(engine: Engine, *args: Any, **more: Any) -> Any:
        done.append(1)
        if address.rank == 1 and len(done) == ROUNDS.every:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine, *args, **more)

    Engine.step = counted  # type: ignore[method-assign]
    run_part(address, part)


def test_a_site_lost_in_a_meeting_is_a_loss(tmp_path: Path) -> None:
    """Which a job recovers from, and no error of the site that waits."""
    asked: list[Sequence[Failure]] = []
    sites = ROUNDS.model_copy(update={"fragments": 1, "delay": 0})
    part = Part(TWO, sites, log_every=50)
    with pytest.raises(RanksFailedError):
        run_ranks(is_killed, (part,), 2, folder=tmp_path, recover=asked.append)
    causes = {failure.rank: failure.cause for failure in asked[0]}
    assert causes == {0: "peer", 1: "signal"}
    waited = next(failure for failure in asked[0] if failure.rank == 0)
    assert f"{NAME} with rank(s) 1 failed" in waited.message
