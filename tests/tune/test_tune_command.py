"""``weft tune``: real trials on this machine's processes, killed and started again; and what it
does not take."""

import json
import os
import signal
import subprocess
import sys
from math import nan
from pathlib import Path

import pytest
from resolve.profiles import profile
from tune.tune_cases import candidate

from weft.cli.main import run
from weft.cluster.cluster import Node
from weft.config.errors import ConfigError, ConfigErrors
from weft.cost.profile import Profile
from weft.lab.identity import fields_of
from weft.lab.tools import why_not_here
from weft.plan.plan import Plan
from weft.tune.job import GUESSED, Job
from weft.tune.record import FILE, VERSION, Record
from weft.tune.tuner import Outcome
from weft.tune.tuning import BEST_PLAN

TINY = [
    *["debug", "batch.samples=8", "data.tokenizer=bytes", "data.limit_mb=0.2", "data.workers=0"],
    *["data.seq_len=32", "model.d_model=32", "model.d_ff=64", "model.num_layers=2"],
    *["compute.device=cpu", "plan.auto.ranks=2", "tune.micros=[1,2]"],
    *["tune.layouts=[one-stage]", "tune.recompute=[off]", "metrics.report=false"],
]

QUICK = """\
from weft.mix import turns
turns.TURN_S = 0.1
from weft.__main__ import start
start()
"""
"""``weft`` whose trials take turns of a few steps."""


def tune(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", QUICK, "tune", *TINY, f"data.cache_dir={tmp_path / 'cache'}"]
    words += ["--out", str(tmp_path / "out"), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(tmp_path: Path, kind: str) -> list[dict]:
    file = tmp_path / "out" / FILE
    return [
        each for line in file.read_text().splitlines() if (each := json.loads(line))["kind"] == kind
    ]


def descendants(tmp_path: Path) -> list[int]:
    """Processes that have the folder in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(tmp_path / "out").encode() in words and fields_of(int(entry.name))[:1] != ["Z"]:
                found.append(int(entry.name))
    return found


def test_a_tuning_that_is_killed_goes_on_and_trains_with_the_best(tmp_path: Path) -> None:
    """Killed after its first trial, which is not tried again; nothing that it began outlives it."""
    words = ["train.steps=1000000", "--trials", "2"]
    with tune(tmp_path, *words) as first:
        assert first.stderr is not None
        said = ""
        while "trial 2:" not in said and (line := first.stderr.readline()):
            said += line
        first.send_signal(signal.SIGKILL)
    began = lines(tmp_path, "trial")
    assert len(began) == 1 and "trial 2:" in said, said
    with (tmp_path / "out" / FILE).open("a") as file:
        file.write('{"kind": "trial", "outcome": {"cand')  # as a kill may leave it
    with tune(tmp_path, *words) as again:
        _, said = again.communicate(timeout=900)
    assert again.returncode == 0, said
    assert "trial 1:" not in said and "trial 2:" in said
    trials = lines(tmp_path, "trial")
    assert trials[0] == began[0] and len(trials) == 2
    assert [len(trial["outcome"]["values"]) >= 3 for trial in trials] == [True, True]
    (last,) = lines(tmp_path, "final")
    assert last["outcomes"][0]["times"] == 1.0
    assert all(each["times"] >= 1.0 and len(each["values"]) >= 6 for each in last["outcomes"])
    assert descendants(tmp_path) == []
    with tune(tmp_path, "train.steps=4", "--trials", "2", "--then-run", "--json") as then:
        summary, said = then.communicate(timeout=900)
    assert json.loads(summary)["step"] == 4, said
    assert "trial 3:" not in said
    plan = Plan.from_json((tmp_path / "out/run/plan.json").read_text())
    best = Plan.from_json((tmp_path / "out" / BEST_PLAN).read_text())
    assert plan == best
    page = (tmp_path / "out/tune.html").read_text()
    assert (
        "Best so far" in page and "<script" not in page and "http" not in page.split("</style>")[1]
    )
    result = json.loads((tmp_path / "out/tune.json").read_text())
    assert len(result["trials"]) == 2 and len(result["final"]) == len(last["outcomes"])


def test_a_record_is_read_back_as_it_was(tmp_path: Path) -> None:
    """Plans, trials with and without intervals, and what is not whole."""
    record = Record.opened(tmp_path, {"a": 1, "b": None})
    record.begin()
    plans = [candidate(0, 1.25, memory={"weights": 2.5}), candidate(1, 2.0, is_given=True)]
    record.add_plans(plans, 1.3, 1.5)
    ran = Outcome(candidate=1, step_s=0.1, times=1.01, within=0.02, against=0, values=(1.0, 2.0))
    short = Outcome(candidate=0, step_s=None, problem="rank 0", short=0)
    for number, outcome in enumerate((ran, short), start=2):
        record.add(outcome, float(number))
    record.add_final([ran], 3.0)
    again = Record.opened(tmp_path, {"a": 1, "b": None})
    assert again.final == [ran]
    again.add(short, 3.0)
    assert again.final == Record.opened(tmp_path, {"a": 1, "b": None}).final == []  # of fewer
    assert again.file.read_text().endswith("}\n")
    record.file.write_text(record.file.read_text() + '{"kind"')
    again = Record.opened(tmp_path, {"a": 1, "b": None})
    again.begin()
    assert (again.candidates, again.outcomes, again.used_s) == (plans, [ran, short, short], 3.0)
    assert again.times == 1.3
    record.file.write_text('{"kind": "jo')  # ended in its first line
    (tmp_path / "tune.json").touch()
    again = Record.opened(tmp_path, {"a": 1, "b": None})
    again.begin()
    assert not again.candidates and again.file.read_text().count("\n") == 1
    assert Record.opened(tmp_path, {"a": 1, "b": None}).asked == again.asked


@pytest.mark.parametrize(
    "wrong",
    [
        {"candidate": 1},
        {"step_s": "abc"},
        {"step_s": -1.0},
        {"step_s": nan},
        {"values": [None]},
        {"within": nan},
    ],
)
def test_a_trial_that_cannot_be_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    record = Record.opened(tmp_path, {})
    record.begin()
    record.add_plans([candidate(0, 1.25)], 1.3, 1.5)
    record.add(Outcome(candidate=0, step_s=0.1), 2.0)
    *lines, trial = record.file.read_text().splitlines()
    told = json.loads(trial)
    told["outcome"] |= wrong
    record.file.write_text("\n".join([*lines, json.dumps(told)]) + "\n")
    with pytest.raises(ConfigError, match=r"trials\.jsonl:3"):
        Record.opened(tmp_path, {})


@pytest.mark.parametrize(
    "wrong", [{"predicted_s": None}, {"predicted_s": 0.0}, {"leans": {"calls": "many"}}]
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    record = Record.opened(tmp_path, {})
    record.begin()
    record.add_plans([candidate(0, 1.25)], 1.3, 1.5)
    job, plans = map(json.loads, record.file.read_text().splitlines())
    plans["plans"][0] |= wrong
    record.file.write_text(f"{json.dumps(job)}\n{json.dumps(plans)}\n")
    with pytest.raises(ConfigError, match=r"trials\.jsonl:2"):
        Record.opened(tmp_path, {})


@pytest.mark.parametrize("wrong", [{"candidate": 1}, {"within": -1.0}])
def test_a_comparison_that_cannot_be_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    """Of a plan that never ran, or known better than exactly."""
    record = Record.opened(tmp_path, {})
    record.begin()
    record.add_plans([candidate(0, 1.25), candidate(1, 1.5)], 1.3, 1.5)
    record.add(Outcome(candidate=0, step_s=1.0), 2.0)
    record.add_final([Outcome(candidate=0, step_s=1.0)], 3.0)
    *before, final = record.file.read_text().splitlines()
    other = json.loads(final)
    other["outcomes"][0] |= wrong
    record.file.write_text("\n".join([*before, json.dumps(other), ""]))
    with pytest.raises(ConfigError, match=r"trials\.jsonl:4"):
        Record.opened(tmp_path, {})


def test_of_another_job_what_differs_is_said(tmp_path: Path) -> None:
    """Of a plan one number, for all of it does not fit into a line."""
    stages = [{"ranks": list(range(99)), "zero": level} for level in (0, 1)]
    Record.opened(tmp_path, {"plan": {"stages": stages}, "a": 1}).begin()
    other = [stages[0], {**stages[1], "zero": 2}]
    with pytest.raises(ConfigErrors) as refused:
        Record.opened(tmp_path, {"plan": {"stages": other}, "a": 1})
    (error,) = refused.value.errors
    assert str(error).startswith("plan.stages[1].zero = 2: expected 1. The tuning in ")


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"kind": "job", "version": %d, "asked": [1]}\n' % VERSION,
        b'{"kind": "job", "version": %d}\n{"foo": 1}\n' % VERSION,
        b'{"kind": "job", "version": %d}\n{"kind": "final", "outcomes": [], "used_s": NaN}\n'
        % VERSION,
        b'{"kind": "job", "version": %d}\n{"kind": "plans", "plans": [{}], "times": 1}\n' % VERSION,
        b'{"kind": "job", "version": %d}\n{"kind": "plans", "plans": [], "times": 0}\n' % VERSION,
        b'{"kind": "job", "version": %d}\n{"kind": "trial", "outcome": {"new": 1}}\n' % VERSION,
    ],
)
def test_a_damaged_record_is_refused_by_name(text: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(ConfigError, match=r"trials.jsonl.*expected lines of JSON, as `weft tune`"):
        Record.opened(tmp_path, {})


CLUSTER = (
    "hosts: [{name: a, chips: [{kind: big}]}, {name: b, chips: [{kind: small, speed: 0.4}]}]\n"
)
REFUSED = {
    "tune.micro=[1]": "unknown key",
    "tune.layouts=[two]": "tune.layouts",
    "tune.schedules=[nothing]": "tune.schedules",
    "tune.recompute=[auto,full:1]": "tune.recompute = 'full:1': expected modes without numbers of",
    "sites.every=10": "sites.every = 10: expected no section sites to tune. Trials compare",
    "tune.micros=[1] batch.micro=2": "tune.micros = [1]: expected null beside batch.micro = 2",
    "--minutes -1": "--minutes",
    "--cluster nowhere.yaml": "nowhere.yaml",
    "--cluster pools.yaml": "--cluster = 'pools.yaml': expected a file with hosts, not pools",
    "--cluster lab.yaml compute.device=cuda": "compute.device = 'cuda': expected auto or cpu in a",
    "--cluster lab.yaml --then-run recovery.alarm=replan": (
        "recovery.alarm = 'replan': expected off or warn with --cluster and --then-run"
    ),
    "--out taken": "--out",
    "--out other": "seed",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_does_not_take(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work; nothing is left, and nothing that is there changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.cli.tune.why_not_here", lambda: "")
    Path("lab.yaml").write_text(CLUSTER)
    Path("pools.yaml").write_text("pools: [{chip: H100-SXM5-80GB, chips_per_node: 8}]\n")
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    Path("other").mkdir()
    job = {"kind": "job", "version": VERSION, "asked": {"seed": 7}}
    Path("other", FILE).write_text(json.dumps(job) + "\n")
    before = sorted(path for path in tmp_path.rglob("*"))
    assert run(["tune", *TINY, *words.split()]) == 2
    assert REFUSED[words] in capsys.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_without_a_profile_it_says_so_or_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the first trial; a tuning that goes on keeps to what its forecasts were made of."""
    profiles, times = tmp_path / "profiles", list[float]()

    def no_trials(job: Job, record: Record, *_: object) -> None:
        record.begin()
        record.add_plans([candidate(0, 1.0)], job.times, 0.0)
        times.append(job.times)
        raise ConfigError("tune", "a test", "no trials")

    def measured(node: Node, **_: object) -> Profile:
        return profile(node)

    monkeypatch.setenv("WEFT_PROFILES", str(profiles))
    monkeypatch.setattr("weft.cli.tune._tuned", no_trials)
    monkeypatch.setattr("weft.elastic.chip_profile.profile_chip", measured)
    monkeypatch.setattr("weft.lab.turns.measure_parts", lambda **_: ())

    def said(*words: str) -> str:
        assert run(["tune", *TINY, *words]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "this machine has no profile" in said("--out", str(tmp_path / "a"))
    assert "profile:" in said("--out", str(tmp_path / "b"), "--profile")
    assert len(list(profiles.iterdir())) == 1
    assert "profile" not in said("--out", str(tmp_path / "c"), "--profile")
    assert times[0] == GUESSED > 1.5 > times[1] == times[2]
    assert "profile" not in said("--out", str(tmp_path / "a"), "--profile")


def test_no_lab_no_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(CLUSTER)
    monkeypatch.setattr("weft.cli.tune.why_not_here", lambda: "only root may")
    assert run(["tune", "debug", "batch.samples=8", "--cluster", str(file)]) == 2
    assert "to be root on Linux. No lab here: only root may." in capsys.readouterr().err


def test_an_own_plan_of_more_ranks_than_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    asked = ["debug", "plan.shares=[1,1,1]", "--out", str(tmp_path / "out")]
    assert run(["tune", *asked]) == 2
    assert "plan = '3 ranks': expected at most 2 of them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_plan_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is short is named, as `weft plan` names it."""
    if why_not_here():
        pytest.skip("a lab's file is refused before that")
    file = tmp_path / "lab.yaml"
    file.write_text(CLUSTER.replace("{kind: big}", "{kind: big, memory_gib: 0.1}"))
    words = ["debug", "batch.samples=8", "tune.layouts=[one-pipeline]", "tune.micros=[1]"]
    assert run(["tune", *words, "--cluster", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "GiB" in capsys.readouterr().err
