"""``weft bench mix``: what it runs and makes of it; and in a lab, that it stops when asked to."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import Path

import pytest
from lab.lab_cases import hosts
from mix.mix_cases import MACHINE

from weft.cli.main import run
from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import RunError
from weft.lab.lab import LOGS
from weft.lab.leftovers import find_labs
from weft.lab.steps import Moment
from weft.lab.tools import why_not_here
from weft.mix.job import load_job, micros_to_try, resolved_alone, target_of_trials, work_of
from weft.mix.measure import SURE, Bench
from weft.mix.mix import MixReport, uncertainty
from weft.mix.turns import REFUSED
from weft.models.registry import FAMILIES
from weft.plan.plan import Plan
from weft.planner.problem import Workload
from weft.planner.search import NoPlan
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
    noise: float = 0.0
    """A step of a mix is that part longer and shorter in turn."""
    hangs: bool = False
    """Every plan of several pipelines does, at once."""
    refuses: bool = False
    """The last rank's configuration cannot work."""
    killed: int = 0
    """The job that somebody outside ends."""
    runs: list[Plan] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """Numbers of the jobs that went on, one after another."""

    def job(
        self, cluster: ClusterFile, command: Sequence[str], out: Path, number: int
    ) -> "FakeJob":
        words = dict(word.split("=", 1) for word in command if "=" in word)
        plan = Plan.from_json(Path(words["plan.file"]).read_text())
        self.runs.append(plan)
        speeds = [chip.speed for _, chip in cluster.by_rank]
        busy = self._busy_s(plan, speeds)
        recompute = {stage.recompute for _, _, stage in plan.stages()}
        is_short = speeds == [0.4] and recompute == {self.kills}
        used = [part * speed for part, speed in zip(busy, speeds, strict=True)]
        noise = self.noise if len(speeds) > 1 else 0.0
        slowest = inf if self.hangs and len(plan.pipelines) > 1 else max(busy)
        return FakeJob(self, number, out, plan.global_batch, used, slowest, is_short, noise)

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


@dataclass
class FakeJob:
    """What a lab's job is to a bench, by a clock of its own."""

    lab: FakeLab
    number: int
    out: Path
    samples: int
    used_s: list[float]
    """A step, by rank."""
    step_s: float
    is_short: bool
    noise: float
    now_s: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    is_there: bool = False
    failed: int | None = None

    def __enter__(self) -> "FakeJob":
        self.is_there = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_there = False

    @property
    def step(self) -> int:
        return self.moments[-1].step

    @property
    def has_ended(self) -> bool:
        return self.failed is not None

    def in_words(self, rank: int) -> str:
        return f"{rank} was ended by SIGKILL, out of memory".removeprefix("0 ")

    def code(self, _rank: int) -> int:
        return REFUSED if self.lab.refuses else -9

    def is_ready(self) -> bool:
        self.moments = [Moment(0, 0.0, (1.0,) * len(self.used_s))]
        return True

    def run(self, seconds: float, step: int) -> bool:
        assert self.is_there
        self.lab.order.append(self.number)
        self.now_s += seconds
        done = self.step + 1
        length_s = self.step_s * (1 + self.noise * (-1) ** done)
        if self.lab.refuses:
            self.failed = len(self.used_s) - 1
        elif self.is_short or self.lab.killed == self.number:
            self.failed = 0
        elif self.now_s >= self.moments[-1].now_s + length_s:
            now_s = self.now_s = self.moments[-1].now_s + length_s
            used = tuple(1 + done * each for each in self.used_s)
            self.moments.append(Moment(done, now_s, used))
            line = {"step": done, "step_time_s": length_s, "loss": 1.0, "memory_gib": 2.25}
            (self.out / "metrics.jsonl").write_text(json.dumps({**line, "tokens": self.samples}))
        return self.has_ended or self.step >= step


def measured(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    lab: FakeLab,
    workload: Workload = WORKLOAD,
    minutes: float = 5.0,
    cluster: ClusterFile = TWO_KINDS,
) -> tuple[MixReport, list[str]]:
    monkeypatch.setattr("weft.mix.turns.HeldJob", lab.job)
    said: list[str] = []
    bench = Bench(
        cluster=cluster,
        machine=MACHINE,
        work=workload,
        micros=(4,),
        target=["demo"],
        out=out,
        minutes=minutes,
        say=said.append,
    )
    return bench.run(), said


def test_a_kind_without_a_plan_is_refused_before_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = FakeLab()
    small = {"kind": "small", "speed": 0.4, "memory_gib": 0.01}
    chips = hosts({"kind": "big", "speed": 1.0}, small)
    with pytest.raises(NoPlan):
        measured(tmp_path, monkeypatch, lab, cluster=ClusterFile.model_validate({"hosts": chips}))
    assert lab.runs == []


def test_parts_and_mixes_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone 256 and 102.4 tokens a second. What the small chip loses in company can be shared."""
    lab = FakeLab()
    report, _ = measured(tmp_path, monkeypatch, lab)
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
    assert report.efficiencies == pytest.approx([140 / 103 / 1.4] * 3)
    final = {rates.trial.generation: rates for rates in report.mixes if rates.is_final}
    assert set(final) == {"pooled", "1", "2"}
    assert {len(rates.values) for rates in final.values()} == {3}, "it was sure at once"
    assert not report.reasons
    assert not any("recompute" in rates.trial.name for rates in report.mixes), "all ran without"
    last_turns = groupby(lab.order[-3 * 8 * 5 :])  # of five plans, an eighth of a step each
    assert max(len(list(same)) for _, same in last_turns) <= 2


def test_a_trial_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, said = measured(tmp_path, monkeypatch, FakeLab(hangs=True))
    hung = {r.trial.name for r in report.mixes if r.problem == "no step in 1800 s"}
    assert hung and hung == {r.trial.name for r in report.mixes if len(r.trial.plan.pipelines) > 1}
    assert any("failed, no step in 1800 s" in line for line in said)
    assert report.best.trial.plan.pipelines[0].stages[1:], "a pipeline goes on"


@pytest.mark.parametrize("prints", [True, False], ids=["into its log", "where people look"])
def test_a_refused_trial_says_where_the_reason_is(
    prints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FakeJob.__enter__

    def with_log(self: FakeJob) -> FakeJob:
        (self.out / LOGS).mkdir()
        (self.out / LOGS / f"rank{len(self.used_s) - 1}.log").write_text("error: model.size")
        return write(self)

    if prints:
        monkeypatch.setattr(FakeJob, "__enter__", with_log)
    with pytest.raises(RunError, match="was refused: see ") as refusal:
        measured(tmp_path, monkeypatch, FakeLab(refuses=True))
    where = str(refusal.value).rpartition("see ")[2]
    if prints:
        assert Path(where).read_text() == "error: model.size"
    else:
        assert where == "above"


def test_what_is_too_slow_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.mix.measure.MAY_BE_BEST", 0.99)
    report, _ = measured(tmp_path, monkeypatch, FakeLab())
    assert {rates.trial.generation for rates in report.mixes if rates.is_final} == {"1"}
    assert {rates.trial.generation for rates in report.mixes} == {"pooled", "1", "2"}


@pytest.mark.parametrize("minutes", [0.0, 5.0])
def test_turns_go_on_until_it_is_sure_or_late(
    minutes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 0.96 and 1.04 in turn: 95 % intervals of 4, 0.29 and so on, and 0.03 at the end."""
    report, said = measured(tmp_path, monkeypatch, FakeLab(noise=0.04), minutes=minutes)
    turns = len(report.efficiencies)
    within = [uncertainty(report.efficiencies[:n]) or 9 for n in range(3, turns + 1)]
    assert turns == 2 if minutes == 0 else [each <= SURE for each in within[-2:]] == [False, True]
    assert sum("of each: efficiency" in line for line in said) == turns
    assert ("again" in report.best.trial.name) == (minutes > 0)


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
def test_ctrl_c_ends_the_bench_and_all_trials(tmp_path: Path) -> None:
    process = bench(tmp_path, "--minutes", "9")
    assert process.stderr is not None
    line = process.stderr.readline()
    while "tokens/s" not in line:
        assert line, "it ended before it measured anything"
        line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 75
    assert "mix:" not in said
    assert [lab for lab in find_labs() if lab.identity.pid == process.pid] == []


NOT_TAKEN = {
    "plan.shares=[1]": "plan.shares has no effect on a bench. A bench makes its own plans.",
    "plan=auto": "plan has no effect on a bench. A bench makes its own plans.",
    "--compute.threads 2": "compute.threads has no effect on a bench. Every chip has one.",
    "train.steps=3": "train.steps has no effect on a bench. A bench takes as many as it has time",
    "batch.samples=1": "batch.samples = 1: expected at least 2, a sample for each chip",
    "model.num_layers=0": "model.num_layers = 0: expected an integer from 1 to 10000",
    "--minutes -1": "--minutes",
    "--out .": "--out = '.': expected a folder that is not there yet",
    "--out c.yaml/kept": "--out = 'c.yaml/kept': expected a folder that can be written",
    "--html nowhere/x.html": "a file in a folder that exists",
}


@pytest.mark.parametrize("words", NOT_TAKEN)
def test_what_a_bench_does_not_take(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work, with or without root."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CLUSTER)
    assert run(["bench", "mix", "c.yaml", "debug", *words.split()]) == 2
    assert NOT_TAKEN[words] in capsys.readouterr().err
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


def test_a_trial_trains_until_it_is_ended() -> None:
    pairs = ["batch.micro=8", "compute.precision=fp32", "optim.lr=1e-3"]
    endless = ["debug", "optim.lr=1e-3", "train.steps=1000000"]
    assert target_of_trials("debug", pairs) == endless
