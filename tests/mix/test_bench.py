"""``weft bench mix``: what it runs and makes of it; and in a lab, that it stops when asked to."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.lab_cases import hosts
from mix.mix_cases import MACHINE

from weft.cli.main import run
from weft.cluster.cluster_file import ClusterFile
from weft.lab.rehearsal import Outcome, Rehearsal
from weft.lab.steps import Moment
from weft.lab.tools import why_not_here
from weft.mix.job import load_job, micros_to_try, resolved_alone, target_of_trials, work_of
from weft.mix.measure import Bench, Effort
from weft.mix.mix import MixReport
from weft.models.registry import FAMILIES
from weft.plan.plan import Plan
from weft.planner.problem import Workload
from weft.platform.detect import detect

needs_lab = pytest.mark.skipif(why_not_here() != "", reason=why_not_here() or "here")

SPEC = FAMILIES["llama"].sizes["demo-5m"]
TWO_KINDS = ClusterFile.model_validate(
    {
        "hosts": hosts(
            {"kind": "big", "speed": 1.0},
            {"kind": "small", "speed": 0.4, "memory_gib": 2.0},
        )
    }
)
WORKLOAD = Workload(spec=SPEC, seq_len=SPEC.seq_len, samples=140, precision="fp32")
OVERHEAD = 0.1
"""Part of the small chip's time that no measurement of it alone shows."""


@dataclass
class FakeLab:
    """Ranks that need a second for a sample on a core; the slow one is slower in company."""

    kills: str = ""
    """The recomputation setting under which the small chip alone runs out of memory."""
    runs: list[Plan] = field(default_factory=list)

    def rehearse(self, asked: Rehearsal, say: Any) -> Outcome:
        words = dict(word.split("=", 1) for word in asked.command if "=" in word)
        plan = Plan.from_json(Path(words["plan.file"]).read_text())
        self.runs.append(plan)
        speeds = [chip.speed for _, chip in asked.cluster.by_rank]
        stages = [stage for _, _, stage in plan.stages()]
        if speeds == [0.4] and {stage.recompute for stage in stages} == {self.kills}:
            rank: Any = SimpleNamespace(
                code=-9,
                rank=0,
                killed_for_memory=True,
                in_words=lambda: "was ended by SIGKILL, out of memory",
            )
            return Outcome(record={}, exit_code=1, ranks=[rank], missed=())
        busy = self._busy_s(plan, speeds)
        steps = int(asked.command[asked.command.index("--steps") + 1])
        step_s = max(busy)
        line = {
            "step_time_s": step_s,
            "tokens": plan.global_batch * SPEC.seq_len,
            "loss": 1.0,
            "memory_gib": 2.25,
        }
        lines = [json.dumps({"step": n, **line}) for n in range(1, steps + 1)]
        (asked.out / "metrics.jsonl").write_text("\n".join(lines))
        used = [part * speed for part, speed in zip(busy, speeds, strict=True)]
        moments = [
            Moment(n, n * step_s, tuple(1 + n * each for each in used)) for n in range(steps + 1)
        ]
        return Outcome(record={}, exit_code=0, ranks=(), missed=(), moments=moments)

    @staticmethod
    def _busy_s(plan: Plan, speeds: list[float]) -> list[float]:
        seconds = [0.0] * len(speeds)
        for pipeline in plan.pipelines:
            for number, stage in enumerate(pipeline.stages, start=1):
                head = number == len(pipeline.stages)  # as much as a layer
                part = (stage.layers[1] - stage.layers[0] + head) / (plan.num_layers + 1)
                again = 4 / 3 if stage.recompute == "full" else 1.0
                for rank in stage.mesh.ranks:
                    late = 1 + OVERHEAD * (len(speeds) > 1 and speeds[rank] < 1)
                    seconds[rank] += part * pipeline.samples * again * late / speeds[rank]
        return seconds


def measured(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    lab: FakeLab,
    workload: Workload = WORKLOAD,
    **effort: int,
) -> tuple[MixReport, list[str]]:
    monkeypatch.setattr("weft.mix.measure.rehearse", lab.rehearse)
    said: list[str] = []
    asked = Effort(**{"steps": 2, "repeats": 2, "tune_steps": 1, **effort})
    bench = Bench(
        cluster=TWO_KINDS,
        machine=MACHINE,
        work=workload,
        micros=(4,),
        target=["demo"],
        out=out,
        effort=asked,
        say=said.append,
    )
    return bench.run(), said


def test_parts_and_mixes_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone 256 and 102.4 tokens a second. What the small chip loses in company can be shared."""
    report, _ = measured(tmp_path, monkeypatch, FakeLab())
    assert {name: rates.middle for name, rates in report.parts.items()} == pytest.approx(
        {"big": 256, "small": 102.4}
    )
    assert report.best.trial.name == "1: data parallel by speed, micro 4, again"
    untuned = next(r.trial.plan for r in report.mixes if r.trial.generation == "1")
    assert [pipeline.samples for pipeline in untuned.pipelines] == [100, 40]
    shares = [pipeline.samples for pipeline in report.best.trial.plan.pipelines]
    assert shares == [103, 37]
    assert report.best.middle == pytest.approx(140 * 256 / 103)
    assert report.best.busy == pytest.approx((1, 37 * 1.1 / 0.4 / 103))
    assert report.efficiencies == pytest.approx([140 / 103 / 1.4] * 2)
    final = {rates.trial.generation: rates for rates in report.mixes if rates.is_final}
    assert set(final) == {"pooled", "1", "2"}
    assert {len(rates.values) for rates in final.values()} == {2}
    assert not report.reasons
    assert not any("recompute" in rates.trial.name for rates in report.mixes), "all ran without"


def test_a_chip_that_recomputes_alone_and_not_in_the_mix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another copy the optimizer's state is divided, which is room enough."""
    deep = replace(WORKLOAD, spec=replace(SPEC, num_layers=15))
    report, said = measured(tmp_path, monkeypatch, FakeLab(kills="off"), deep)
    assert any("failed, rank 0 was ended by SIGKILL, out of memory" in line for line in said)
    assert report.parts["small"].middle == pytest.approx(102.4 * 3 / 4)
    assert report.efficiency > 1
    (reason,) = report.reasons
    assert reason == (
        "small alone recomputes, as without that 2304 MiB are needed and it has 2048; "
        "in the mix it holds 15 of 15 layers and does not"
    )


def test_a_bench_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = FakeLab()
    first, _ = measured(tmp_path, monkeypatch, lab)
    number = len(lab.runs)
    assert lab.runs.count(first.best.trial.plan) == 3, "tuned, and repeated twice"
    (tmp_path / "run002" / "bench.json").unlink()  # as if it had been stopped there
    again, said_again = measured(tmp_path, monkeypatch, lab)
    assert again.to_json() == first.to_json()
    assert len(lab.runs) == number + 1
    assert lab.runs[-1] == lab.runs[2]
    assert sum("(measured before)" in line for line in said_again) == len(said_again) - 1
    measured(tmp_path, monkeypatch, lab, steps=3)
    assert len(lab.runs) > number + 1


CLUSTER = """\
hosts:
  - {name: h1, chips: [{kind: big, speed: 0.8}]}
  - {name: h2, chips: [{kind: small, speed: 0.4}]}
"""
WORK = [
    "debug",
    "batch.samples=6",
    "batch.micro=2",
    "data.tokenizer=bytes",
    "data.limit_mb=0.2",
    "data.workers=0",
    "data.seq_len=32",
    "model.d_model=32",
    "model.d_ff=64",
    "model.num_layers=2",
]


def bench(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    words = [sys.executable, "-m", "weft", "bench", "mix", str(cluster), *WORK]
    words += [f"data.cache_dir={tmp_path / 'cache'}", "--out", str(tmp_path / "out"), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_lab
def test_ctrl_c_ends_the_bench_and_not_one_trial(tmp_path: Path) -> None:
    process = bench(tmp_path, "--steps", "3,2")
    assert process.stderr is not None
    first = process.stderr.readline()
    while "tokens/s" not in first:
        assert first, "it ended before it measured anything"
        first = process.stderr.readline()
    record = json.loads((tmp_path / "out" / "run000" / "bench.json").read_text())
    assert record["result"]["busy"][0] == pytest.approx(1, abs=0.7)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "mix:" not in said


REFUSED = {
    "plan.shares=[1]": "plan.shares has no effect on a bench. A bench makes its own plans.",
    "plan=auto": "plan has no effect on a bench. A bench makes its own plans.",
    "--compute.threads 2": "compute.threads has no effect on a bench. Every chip has one.",
    "train.steps=3": "train.steps has no effect on a bench. --steps says how many steps",
    "batch.samples=1": "batch.samples = 1: expected at least 2, a sample for each chip",
    "model.num_layers=0": "model.num_layers = 0: expected an integer >= 1",
    "--steps 0,2": "--steps = '0,2': expected two numbers above 0, such as 5,10.",
    "--html nowhere/x.html": "a file in a folder that exists",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_bench_does_not_take(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work, with or without root."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CLUSTER)
    assert run(["bench", "mix", "c.yaml", "debug", *words.split()]) == 2
    assert REFUSED[words] in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_one_kind_of_chip_is_no_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text(CLUSTER.replace("small", "big"))
    assert run(["bench", "mix", str(cluster), "debug"]) == 2
    assert "['big']: expected at least two kinds of chips" in capsys.readouterr().err


MINE = """\
extends: debug
batch: {samples: null, micro: 3, accumulation: 2}
"""


def test_any_batch_will_do_whatever_the_plan_of_the_recipe(tmp_path: Path) -> None:
    """`debug` alone wants a multiple of 12; a file may have a plan of its own."""
    machine = detect()
    for given in (["debug", "batch.samples=25"], ["demo", "batch.samples=25"]):
        loaded = load_job(given[0], given[1:])
        work = work_of(loaded, resolved_alone(loaded, machine), 3)
        assert (work.samples, micros_to_try(loaded)) == (25, (2, 4))
    mine = tmp_path / "mine.yaml"
    for plan, samples in (("plan: {shares: [4, 1]}", 30), ("compute: {device: cuda}", 18)):
        mine.write_text(f"{MINE}{plan}\n")
        loaded = load_job(str(mine), ["batch.micro=3"])
        work = work_of(loaded, resolved_alone(loaded, machine), 3)
        assert (work.samples, micros_to_try(loaded)) == (samples, (3,))
    mine.write_text("extends: debug\nplan: auto\nbatch: {samples: 7}\n")
    loaded = load_job(str(mine), [])
    assert work_of(loaded, resolved_alone(loaded, machine), 3).samples == 7


def test_a_trial_may_be_longer_than_the_recipe_trains() -> None:
    pairs = ["batch.micro=8", "compute.precision=fp32", "optim.lr=1e-3"]
    loaded = load_job("debug", pairs)
    assert target_of_trials("debug", pairs, loaded.config, 30) == ["debug", "optim.lr=1e-3"]
    longer = target_of_trials("debug", pairs, loaded.config, 31)
    assert longer == ["debug", "optim.lr=1e-3", "train.steps=31"]
