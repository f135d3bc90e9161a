"""A checkpoint of any plan loads into any other: seven plans, all pairs, the next two losses."""

from itertools import pairwise
from pathlib import Path

import pytest
from parity.cases import Case

from weft.checkpoint.diff import differences
from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.sections import BatchConfig, CheckpointConfig, Config, DataConfig
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.models.registry import param_specs
from weft.plan.plan import Plan
from weft.platform.cpu import CpuPlatform
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import Run
from weft.train.saving import restore, save

SAVED_AFTER = 2
PLANS = [
    Case("one", shares=(6,), microbatch=3),
    Case("pipelines-one-only-keeps", shares=(6, 0), zero=1, state_shares=((1,), (2,))),
    Case("dp2-zero3-uneven", shares=(6,), dp=((2,),), microbatch=3, zero=3,
         sample_shares=((2, 1),), state_shares=((0, 1),)),
    Case("zb-v-cut", shares=(6,), dp=((1, 1),), layers=((1, 1.5, 0.5, 1),), schedule="zb-v"),
    Case("first-rank-keeps-nothing", shares=(6,), dp=((1, 1, 1),), layers=((1, 0, 3),),
         order=(1, 0, 2)),
    Case("unlike-stages", shares=(6,), dp=((3, 1),), tp=((1, 2),), layers=((1, 3),), zero=2,
         microbatch=3),
    Case("unlike-pipelines", shares=(4, 2), dp=((1, 1), (1,)), tp=((2, 1), (3,)),
         layers=((1.5, 2.5), (4,)), zero=2),
]  # fmt: skip
CONFIG = Config(
    data=DataConfig(path="none", seq_len=16),
    batch=BatchConfig(samples=6, micro=1),
    checkpoint=CheckpointConfig(keep=1),
)


def losses(built: Built, comm: Comm, plan: Plan, rehearsal: Rehearsal) -> list[float]:
    """Of the steps after the checkpoint: the first shows the parameters, the second all else.

    Nobody looks at what the second would change.
    """
    first, second = (
        synthetic_microbatches(comm, plan, rehearsal, SAVED_AFTER + step) for step in range(2)
    )
    found = float(built.engine.step(first).loss)
    totals = built.executor.evaluate(second)
    comm.all_reduce(totals, name="evaluation totals")
    loss, weight = totals.tolist()
    return [found, loss / weight]


def save_and_go_on(
    address: RankAddress, plan: Plan, rehearsal: Rehearsal, root: Path
) -> list[float]:
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    for step in range(SAVED_AFTER):
        built.engine.step(synthetic_microbatches(comm, plan, rehearsal, step))
    save_built(built, comm, plan, rehearsal, root)
    found = losses(built, comm, plan, rehearsal)
    comm.close()
    return found


def save_built(built: Built, comm: Comm, plan: Plan, rehearsal: Rehearsal, root: Path) -> None:
    run = Run(
        config=CONFIG,
        plan=plan,
        spec=rehearsal.spec,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=iter(()),
        first_step=0,
        last_step=SAVED_AFTER,
    )
    save(run, root, SAVED_AFTER, fingerprint="same")


def load_and_save(
    address: RankAddress, plan: Plan, rehearsal: Rehearsal, source: Path, root: Path
) -> None:
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    restore(built, open_checkpoint(source))
    save_built(built, comm, plan, rehearsal, root)
    comm.close()


def load_each(
    address: RankAddress, plan: Plan, rehearsal: Rehearsal, roots: list[Path]
) -> list[list[float]]:
    """Also into a run that has gone on: nothing of it may stay."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    found = []
    for root in roots:
        restore(built, open_checkpoint(root))
        found.append(losses(built, comm, plan, rehearsal))
    built.gradients.fence()
    comm.close()
    return found


def test_all_pairs(pool: WorkerPool, tmp_path: Path) -> None:
    rehearsal = PLANS[0].rehearsal()
    roots = [tmp_path / case.name for case in PLANS]
    after = []
    for case, root in zip(PLANS, roots, strict=True):
        plan = case.plan()
        ranks = pool.run(save_and_go_on, plan, rehearsal, root, world_size=plan.world_size)
        after.append(ranks[0])
        assert after[-1] == pytest.approx(after[0], rel=1e-10), case.name
    assert len(set(after[0])) == 2
    for case in PLANS:
        plan = case.plan()
        ranks = pool.run(load_each, plan, rehearsal, roots, world_size=plan.world_size)
        for source, found in zip(PLANS, ranks[0], strict=True):
            assert found == pytest.approx(after[0], rel=1e-10), f"{source.name} -> {case.name}"
            if source is case:
                assert found == after[PLANS.index(case)], f"{case.name}: not bit-equal"


def test_a_layer_cut_between_its_parts_is_saved_like_a_whole_one(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """To a plan that cuts none and back: the same names, the same bits."""
    cut = next(case for case in PLANS if case.name == "zb-v-cut")
    rehearsal, roots = cut.rehearsal(), [tmp_path / name for name in ("cut", "whole", "back")]
    pool.run(save_and_go_on, cut.plan(), rehearsal, roots[0], world_size=2)
    for case, (source, root) in zip((PLANS[0], cut), pairwise(roots), strict=True):
        plan = case.plan()
        pool.run(load_and_save, plan, rehearsal, source, root, world_size=plan.world_size)
    first, whole, back = map(open_checkpoint, roots)
    assert {*first.names()} == {spec.name for spec in param_specs(rehearsal.spec)}
    assert not [*differences(first, whole), *differences(first, back)]
