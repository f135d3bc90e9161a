"""Calibration: a run folder made by hand, the corrections it brings, and what is refused."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from weft.cluster.cluster import Cluster, Node
from weft.config.errors import ConfigError
from weft.config.load import load_config, to_yaml
from weft.cost.memory import memory_of_plan
from weft.cost.profile import AttentionTime, LinkTime, Machine, Product, Profile
from weft.cost.profile_file import from_data, to_json
from weft.diagnose.calibration import calibrated
from weft.report.metrics import StepMetrics
from weft.resolve.resolve import resolve
from weft.simulate.known import knowledge_of_local, local_view
from weft.simulate.step import time_of_plan

NODE = Node(host="here", cpu="C1", cores=2, memory_gib=16, cpu_bf16=False)
PROFILE = Profile(
    name="C1 core",
    machine=Machine(
        host="here", cpu="C1", cores=2, memory_gib=16, device="cpu", threads=1, torch="2", date="d"
    ),
    products=(Product("fp32", 512, 512, 512, 0.002, 0.002, 0.002),),
    attention=(AttentionTime("fp32", 128, 64, 1e-11, 2e-11),),
    moving=(),
    launch_s=1e-6,
    memory_bytes_s=1e10,
    update_bytes_s=1e10,
    accumulate_bytes_s=1e10,
    runtime_bytes=3e8,
)


STAGES = (
    "plan.stages=[{layers: 1}, {}]",
    "plan.schedule=1f1b",
    "batch.samples=24",
    "batch.micro=24",
)
"""Two ranks that compute in turn, so that each waits for half of a step."""


def write_run(
    folder: Path,
    *,
    slower: float,
    more_bytes: float,
    steps: int = 9,
    settings: tuple[str, ...] = (),
) -> Path:
    """A run that took so many times the predicted seconds, and more memory."""
    loaded = load_config("debug", ["compute.precision=fp32", *settings])
    cluster = Cluster(nodes=(NODE,))
    resolved = resolve(loaded, cluster)
    view, seq_len = local_view(NODE, PROFILE, 2), resolved.config.data.seq_len
    known = knowledge_of_local(PROFILE, 2)
    step = time_of_plan(resolved.plan, resolved.spec, view, seq_len=seq_len, knowledge=known)
    memory = memory_of_plan(resolved.plan, resolved.spec, seq_len, known.overheads)
    took = [(memory[rank].total + more_bytes) / 2**30 for rank in sorted(memory)]
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(resolved.config))
    (folder / "plan.json").write_text(resolved.plan.to_json())
    (folder / "cluster.json").write_text(cluster.to_json())
    (folder / "summary.json").write_text(
        json.dumps({"prediction": {"measured": {"memory_gib": took}}})
    )
    records = [
        StepMetrics(
            step=number + 1,
            loss=1.0,
            tokens=10,
            grad_norm=1.0,
            lr=1.0,
            step_time_s=step.step_s * (100 if number < 2 else slower),  # warm-up does not count
            tokens_per_s=1.0,
            memory_gib=max(took),
            mfu=None,
            samples=number,
            elapsed_s=1.0,
        )
        for number in range(steps)
    ]
    lines = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


@pytest.mark.parametrize("slower", [0.7, 1.25])
def test_a_run_corrects_its_machines_profile(tmp_path, slower) -> None:
    run = write_run(tmp_path / "run", slower=slower, more_bytes=5e7)
    found = calibrated(run, NODE, [PROFILE])
    assert found.errors.time_before == pytest.approx(1 / slower - 1)
    assert found.errors.time_after == pytest.approx(0, abs=1e-6)
    assert found.errors.memory_before < -0.05
    assert found.errors.memory_after == pytest.approx(0, abs=1e-6)
    made = found.after.corrections
    assert made.runtime_bytes == pytest.approx(5e7, rel=1e-6)
    assert (made.compute > 1) == (slower > 1)
    assert replace(found.after, corrections=PROFILE.corrections) == PROFILE
    again = calibrated(run, NODE, [found.after])
    assert again.after.corrections.compute == pytest.approx(made.compute, rel=1e-6)
    assert again.after.corrections.runtime_bytes == pytest.approx(5e7, rel=1e-6)
    assert "computing x" in found.in_words()[0]


def test_steps_that_are_mostly_something_else_correct_the_fixed_seconds(tmp_path) -> None:
    run = write_run(tmp_path / "run", slower=1.0, more_bytes=0)
    slow_start = replace(PROFILE, step_s=1.0)
    found = calibrated(run, NODE, [slow_start])
    assert found.after.corrections.compute == 1
    assert found.after.corrections.step_s == pytest.approx(-1.0)
    assert found.errors.time_after == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("settings", [(), STAGES], ids=["side by side", "in turn"])
def test_no_correction_takes_away_more_than_there_is(settings, tmp_path) -> None:
    """What waits for computing grows with it: a run of stages in turn is no slow start."""
    run = write_run(tmp_path / "run", slower=0.7, more_bytes=0, settings=settings)
    found = calibrated(run, NODE, [PROFILE])
    assert found.after.corrections.compute < 0.8 and found.after.corrections.step_s == 0
    assert found.errors.time_after == pytest.approx(0, abs=1e-6)
    links = (("send", 1.0, 10.0), ("all_reduce", 1.0, 10.0))
    waiting = replace(PROFILE, step_s=0.01, links=tuple(LinkTime(*link) for link in links))
    found = calibrated(run, NODE, [waiting])
    assert found.after.corrections.step_s == -waiting.step_s
    assert from_data(json.loads(to_json(found.after))) == found.after


@pytest.mark.parametrize(
    ("node", "profiles", "steps", "slower", "message"),
    [
        (replace(NODE, cores=8), [PROFILE], 9, 1.0, r"expected a run on this machine \(C1, 8"),
        (NODE, [], 9, 1.0, r"expected one of this machine's cpu. Measure it with"),
        (NODE, [PROFILE], 6, 1.0, r"RUN = '6 steps': expected a run of at least 7 steps"),
        (
            NODE,
            [PROFILE],
            9,
            9.0,
            r"RUN: step time = '[0-9.e+]+ times as predicted': expected what computing that is up ",
        ),
    ],
)
def test_runs_that_say_nothing_are_refused(
    node, profiles, steps, slower, message, tmp_path
) -> None:
    run = write_run(tmp_path / "run", slower=slower, more_bytes=0, steps=steps)
    with pytest.raises(ConfigError, match=message):
        calibrated(run, node, profiles)


@pytest.mark.parametrize("value", ["NaN", "0", "Infinity", "-1.5", '"x"'])
def test_steps_of_unknown_time_teach_nothing(value: str, tmp_path: Path) -> None:
    """As many others say what they would without them; of too few, or no memory, none does."""
    run = write_run(tmp_path / "run", slower=1.5, more_bytes=0, steps=14)
    file = run / "metrics.jsonl"
    *first, last = lines = file.read_text().splitlines()
    whole = calibrated(run, NODE, [PROFILE]).after.corrections
    assert whole.compute > 1.4

    def damaged(line: str) -> str:
        return re.sub(r'("step_time_s": )[^,]*', rf"\g<1>{value}", line)

    file.write_text("\n".join([*first, damaged(last), *map(damaged, first[-4:])]))
    assert calibrated(run, NODE, [PROFILE]).after.corrections == whole
    file.write_text("\n".join([lines[0], *map(damaged, lines[1:])]))
    with pytest.raises(ConfigError, match="RUN = '1 steps'"):
        calibrated(run, NODE, [PROFILE])
    file.write_text("\n".join(lines))
    measured = f'{{"prediction": {{"measured": {{"memory_gib": [{value}, 1.0]}}}}}}'
    (run / "summary.json").write_text(measured)
    with pytest.raises(ConfigError, match="how much memory"):
        calibrated(run, NODE, [PROFILE])


def test_a_folder_that_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        calibrated(tmp_path, NODE, [PROFILE])
