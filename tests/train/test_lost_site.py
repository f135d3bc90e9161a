"""Sites that lose ranks go on with the pipelines that are whole, the last one as one model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from train.small_jobs import losses
from train.test_life import live
from train.test_replan import EXACT, STEPS, asked, read, trains

from weft.elastic.failure import Epoch, Failure
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import run_ranks
from weft.elastic.recovery import Restarts


def test_a_site_is_lost_in_part_and_then_all_of_it(tmp_path: Path, pool: WorkerPool) -> None:
    """Rank 1 of 4, then the rest of its site: as if each plan began where the one before ended."""
    notes, said = tmp_path / "notes", list[str]()
    notes.mkdir()
    sites = "sites={every: 3, wire: fp64, pipelines: [[0, 1], [2, 3]]}"
    job, replans = asked(tmp_path / "left", sites)
    restarts, jobs = Restarts(job, said.append, replans), [job]

    def recover(failures: Sequence[Failure]) -> Epoch:
        epoch = restarts(failures)
        assert epoch is not None
        jobs.append(epoch.args[0])
        return replace(epoch, args=(*epoch.args, notes))

    run_ranks(trains, (job, notes), 4, folder=job.out, recover=recover)
    assert [each.plan.sites for each in jobs] == [((0, 1), (2, 3)), ((0,), (1, 2)), ()]
    assert {each.plan.global_batch for each in jobs} == {8}
    assert "2 sites of 2 go on with all samples" in said[1]
    assert "one site, from where all last met, of 2 go on with all samples" in said[3]
    began = [int((notes / f"{n}-0").read_text().split()[1]) for n in (4, 3, 2)]
    assert 0 == began[0] < began[1] < began[2], "from what was in memory"
    parts = tmp_path / "parts"
    for each, until in zip(jobs, [*began[1:], STEPS], strict=True):
        part = replace(each, out=parts, last_step=until)
        pool.run(live, [part], world_size=each.plan.world_size)
    found = losses(job.out)
    assert found == pytest.approx(losses(parts), rel=EXACT)
    assert [data for _, data in read(job.out)] == [data for _, data in read(parts)]
