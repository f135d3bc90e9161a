"""A run that was saved and restored goes on as if it had never stopped, under any plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.optim_sections import AdamWConfig, CosineSchedule
from weft.config.sections import BatchConfig, CheckpointConfig, Config, DataConfig, TrainConfig
from weft.data.synthetic import SyntheticDataset
from weft.elastic.pool import WorkerPool
from weft.models.decoder_spec import DecoderSpec
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.model import ExpertsSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.platform.cpu import CpuPlatform
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.loop import Run, StepRecord, cut, train
from weft.train.loss_scale import FIRST
from weft.train.saving import restore, save

SPEC = replace(SIZES["debug-1m"].reduced(), num_layers=2)
CONFIG = Config(
    data=DataConfig(path="none", seq_len=16),
    batch=BatchConfig(samples=6, micro=1),
    optim=AdamWConfig(lr=0.01, schedule=CosineSchedule(warmup=0)),
    train=TrainConfig(steps=6),
    checkpoint=CheckpointConfig(keep=1),
)


def plan_of(*shares: int, precision: Precision = "fp64") -> Plan:
    pipelines = []
    for rank, share in enumerate(shares):
        stage = StagePlan(mesh=Mesh.of((rank,), dp=1), layers=(0, 2), precision=precision)
        pipelines.append(PipelinePlan(stages=(stage,), samples=share, microbatch=2))
    return Plan(num_layers=2, pipelines=tuple(pipelines))


def split_plan() -> Plan:
    """Two stages of two tensor-parallel ranks each, the first split the other way round."""
    meshes = (Mesh.of((1, 0), tp=2), Mesh.of((2, 3), tp=2))
    stages = tuple(
        StagePlan(mesh=mesh, layers=(s, s + 1), precision="fp64") for s, mesh in enumerate(meshes)
    )
    pipeline = PipelinePlan(stages=stages, samples=6, microbatch=2)
    return Plan(num_layers=2, pipelines=(pipeline,))


def sharded_plan() -> Plan:
    """Two ranks, each with half of everything; between steps modules have no parameters."""
    stage = StagePlan(mesh=Mesh.of((0, 1), dp=2), layers=(0, 2), precision="fp64", zero=3)
    pipeline = PipelinePlan(stages=(stage,), samples=6, microbatch=2)
    return Plan(num_layers=2, pipelines=(pipeline,))


def run_part(
    address: RankAddress, spec: DecoderSpec, plan: Plan, root: Path, first: int, last: int
) -> dict[str, Any]:
    """Train from step ``first`` (restored if it is not 0) to ``last`` and save there."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    built = assemble_model(plan, spec, comm, optim=CONFIG.optim, seq_len=16)
    if first:
        restore(built, open_checkpoint(root))
    else:
        fill(built.gradients, initial(CONFIG.seed))
    data = SyntheticDataset(vocab_size=spec.vocab_size, seq_len=16, seed=3)
    mine = [i for part in plan.rank_plan(address.rank).microbatches() for i in part]
    batches = (
        data.batch([step * plan.global_batch + i for i in mine]) for step in range(first, 99)
    )
    run = Run(
        config=CONFIG,
        plan=plan,
        spec=spec,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=batches,
        first_step=first,
        last_step=last,
    )
    losses: list[float] = []

    def hook(record: StepRecord) -> None:
        losses.extend(numbers.loss for numbers in record.read)

    train(run, [hook])
    save(run, root, last, fingerprint="same")
    params: dict[str, np.ndarray] = {}
    for main in (main for main in built.gradients.mains if main.owned):  # a module's may be at rest
        whole = params.setdefault(main.spec.name, np.full(main.spec.shape, np.nan))
        whole[main.box.slices()] = main.value.detach().double().numpy()
    comm.close()
    return {"losses": losses, "params": params}


def in_parts(
    pool: WorkerPool, root: Path, *parts: tuple[Plan, int, int], spec: DecoderSpec = SPEC
) -> dict[str, Any]:
    """Losses of all parts, and the last one's parameters."""
    losses: list[float] = []
    params: dict[str, np.ndarray] = {}
    for plan, first, last in parts:
        ranks = pool.run(run_part, spec, plan, root, first, last, world_size=plan.world_size)
        losses += ranks[0]["losses"]
        params = {}
        for name, own in (item for rank in ranks for item in rank["params"].items()):
            whole = params.setdefault(name, own)
            params[name] = np.where(np.isnan(own), whole, own)
    assert all(np.isfinite(whole).all() for whole in params.values())
    return {"losses": losses, "params": params}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_resume_is_bit_equal(pool: WorkerPool, tmp_path: Path, precision: Precision) -> None:
    plan = plan_of(4, 2, precision=precision)
    whole = in_parts(pool, tmp_path / "whole", (plan, 0, 5))
    parts = in_parts(pool, tmp_path / "parts", (plan, 0, 2), (plan, 2, 3), (plan, 3, 5))
    assert parts["losses"] == whole["losses"]
    for name, value in whole["params"].items():
        assert np.array_equal(parts["params"][name], value), name
    scale = open_checkpoint(tmp_path / "parts").state.get("loss_scale")
    assert scale == ({"value": FIRST, "clean_steps": 5.0} if precision == "fp16" else None)


def test_scales_of_earlier_steps_are_saved(pool: WorkerPool, tmp_path: Path) -> None:
    """Bit for bit under the same plan, also among ranks of which the first saves for all; and under
    one that is split otherwise."""
    one, split = (
        plan.each(lambda stage: replace(stage, precision="fp8-delayed-fp64"))
        for plan in (plan_of(4, 2), split_plan())
    )
    whole = in_parts(pool, tmp_path / "whole", (one, 0, 5))
    parts = in_parts(pool, tmp_path / "parts", (one, 0, 1), (one, 1, 3), (one, 3, 5))
    assert parts["losses"] == whole["losses"]
    moved = in_parts(pool, tmp_path / "moved", (split, 0, 3), (one, 3, 5))
    np.testing.assert_allclose(moved["losses"], whole["losses"], rtol=1e-10)
    checkpoint = open_checkpoint(tmp_path / "moved")
    names = checkpoint.names("fp8_largest")
    assert len(names) == 2 * 7, "a llama layer's matrices"
    for name in names:
        kept, same = (
            open_checkpoint(tmp_path / root).read(name, "fp8_largest")
            for root in ("moved", "whole")
        )
        assert (kept[:, :-5] == -1).all() and (kept[:, -5:] > 0).all()
        torch.testing.assert_close(kept, same, rtol=1e-6, atol=0)
    bare = in_parts(pool, tmp_path / "bare", (plan_of(4, 2), 0, 3), (one, 3, 5))
    assert len(set(bare["losses"])) == 5, "a checkpoint without them begins anew"


@pytest.mark.parametrize("other", [(6,), (2, 4), (1, 2, 3)], ids=str)
def test_resume_under_another_plan(
    pool: WorkerPool, tmp_path: Path, other: tuple[int, ...]
) -> None:
    whole = in_parts(pool, tmp_path / "whole", (plan_of(4, 2), 0, 5))
    moved = in_parts(pool, tmp_path / "parts", (plan_of(4, 2), 0, 2), (plan_of(*other), 2, 5))
    assert moved["losses"][:2] == whole["losses"][:2]
    np.testing.assert_allclose(moved["losses"], whole["losses"], rtol=1e-10)
    for name, value in whole["params"].items():
        np.testing.assert_allclose(moved["params"][name], value, rtol=1e-9, atol=1e-12)


def test_resume_with_domains_and_without(pool: WorkerPool, tmp_path: Path) -> None:
    """Of two terms the order does not count, so every bit is the same; shards inside domains, of
    which each has all, are saved once and read by any."""
    plain = plan_of(4, 2)
    apart = replace(plain, domains=((1,), (0,)))
    stage = StagePlan(mesh=Mesh.of(range(4), dp=4), layers=(0, 2), precision="fp64", zero=2)
    pipeline = PipelinePlan(stages=(stage,), samples=6, microbatch=4)
    sharded = Plan(num_layers=2, pipelines=(pipeline,), domains=((0, 1), (2, 3)))
    whole = in_parts(pool, tmp_path / "whole", (plain, 0, 4))
    moved = in_parts(pool, tmp_path / "parts", (apart, 0, 2), (plain, 2, 4))
    assert moved["losses"] == whole["losses"]
    for name, value in whole["params"].items():
        assert np.array_equal(moved["params"][name], value), name
    through = in_parts(pool, tmp_path / "sharded", (plain, 0, 1), (sharded, 1, 3), (apart, 3, 4))
    np.testing.assert_allclose(through["losses"], whole["losses"], rtol=1e-10)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (plan_of(4, 2), split_plan()),
        (split_plan(), plan_of(4, 2)),
        (split_plan(), plan_of(6)),
        (sharded_plan(), split_plan()),
    ],
    ids=["unsplit-split", "split-unsplit", "split-alone", "sharded-split"],
)
def test_resume_across_stages_and_tensor_parallel_ranks(
    pool: WorkerPool, tmp_path: Path, before: Plan, after: Plan
) -> None:
    """Parameters and moments find their way into pieces of another size, and back."""
    whole = in_parts(pool, tmp_path / "whole", (plan_of(6), 0, 6))
    moved = in_parts(pool, tmp_path / "parts", (before, 0, 2), (after, 2, 4), (before, 4, 6))
    assert len(set(whole["losses"])) == 6
    np.testing.assert_allclose(moved["losses"], whole["losses"], rtol=1e-10)
    for name, value in whole["params"].items():
        np.testing.assert_allclose(moved["params"][name], value, rtol=1e-9, atol=1e-12)


def test_resume_with_experts_divided_and_whole(pool: WorkerPool, tmp_path: Path) -> None:
    """Experts of one rank, of two, and of two that each share theirs with another."""
    spec = replace(SPEC, experts=ExpertsSpec(count=5, top_k=2))
    stages = (
        StagePlan(mesh=Mesh.of(range(2), ep=2), layers=(0, 2), precision="fp64"),
        StagePlan(mesh=Mesh.of(range(4), dp=2, ep=2), layers=(0, 2), precision="fp64", zero=3),
    )
    lines = [PipelinePlan(stages=(stage,), samples=6, microbatch=4) for stage in stages]
    halves, shared = (Plan(num_layers=2, pipelines=(line,)) for line in lines)
    whole = in_parts(pool, tmp_path / "whole", (plan_of(6), 0, 4), spec=spec)
    parts = (halves, 0, 1), (plan_of(6), 1, 2), (shared, 2, 3), (halves, 3, 4)
    moved = in_parts(pool, tmp_path / "parts", *parts, spec=spec)
    np.testing.assert_allclose(moved["losses"], whole["losses"], rtol=1e-10)
    for name, value in whole["params"].items():
        np.testing.assert_allclose(moved["params"][name], value, rtol=1e-9, atol=1e-12)


def save_to(address: RankAddress, plan: Plan, root: Path, forbidden: Path) -> str:
    """Save where rank 1 cannot write its file; every rank must fail in the same words."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    built = assemble_model(plan, SPEC, comm, optim=CONFIG.optim, seq_len=16)
    fill(built.gradients, initial(0))
    run = Run(
        config=CONFIG,
        plan=plan,
        spec=SPEC,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=iter([]),
        first_step=0,
        last_step=0,
    )
    try:
        save(run, root if address.rank == 0 else forbidden, 1, fingerprint="same")
    except CheckpointError as error:
        return str(error)
    finally:
        comm.close()
    return "saved"


def test_a_rank_that_cannot_write_fails_the_save_everywhere(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    said = pool.run(save_to, plan_of(3, 3), tmp_path, tmp_path / "file", world_size=2)
    assert said[0] == said[1]
    assert said[0].startswith("rank 1: ")
    assert not list(tmp_path.glob("*.tmp")), "a full disk must get its space back"
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_older_checkpoints_that_stay_fail_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise CheckpointError("cannot be removed: Access Denied", file="step-00000000")

    monkeypatch.setattr("weft.train.saving.prune", refused)
    comm, plan = Comm(), plan_of(6)
    built = assemble_model(plan, SPEC, comm, optim=CONFIG.optim, seq_len=16)
    fill(built.gradients, initial(0))
    run = Run(
        config=CONFIG,
        plan=plan,
        spec=SPEC,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=iter([]),
        first_step=0,
        last_step=0,
    )
    save(run, tmp_path, 1, fingerprint="same")
    assert open_checkpoint(tmp_path).step == 1
    said = "step 1: older checkpoints: step-00000000: cannot be removed: Access Denied\n"
    assert capsys.readouterr().err == said


def test_updates_are_counted_not_steps() -> None:
    """A step without weights is no update; Adam's bias correction must not count it."""
    comm = Comm()
    built = assemble_model(plan_of(6), SPEC, comm, optim=CONFIG.optim, seq_len=16)
    fill(built.gradients, initial(0))
    data = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=16, seed=3)
    for step in range(3):
        batch = data.batch(range(6 * step, 6 * step + 6))
        batch.weights[:] *= step != 1
        built.engine.step(cut(batch, [2, 2, 2], comm.device))
    assert built.optimizer.num_updates == 2
