"""Ended at any moment and started again, a run computes what it would have computed anyway."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cli import commands
from limits import within_some_limit

from weft.checkpoint.store import is_free
from weft.cli.main import run
from weft.train.saver import LOST

WholeRun = Callable[..., Path]

PATIENT = "cli.patient"

IN_MEMORY = ("checkpoint.every=0", "checkpoint.minutes=0", "checkpoint.snapshot_every=1")
"""A copy after every step, and nothing on the disk before the end."""


def go_on(*arguments: str) -> None:
    """The same command, to its end."""
    assert run(["train", "tiny.yaml", "--out", "mine", "--quiet", *arguments]) == 0


def same_as(whole: Path, mine: Path) -> None:
    """Bit for bit: every step, every evaluation, and what the run came to."""
    assert commands.numbers(mine) == commands.numbers(whole)
    summaries = [json.loads((out / "summary.json").read_text()) for out in (whole, mine)]
    assert summaries[0]["held_out"] == summaries[1]["held_out"]
    assert summaries[0]["samples"] == summaries[1]["samples"]


def test_lost_ranks_are_replaced_and_the_others_stay(here: Path, whole_run: WholeRun) -> None:
    """One after the other, in the middle of a run; training goes on from what is in memory, as
    nothing is on the disk."""
    victims, seen = {6: 1, 12: 0}, []
    with commands.started(here, "mine", *IN_MEMORY, module=PATIENT) as command:
        for step, victim in victims.items():
            command.wait_for_step(step)
            seen.append(command.ranks())
            os.kill(seen[-1][victim], signal.SIGKILL)
        command.wait_for_step(15)
        seen.append(command.ranks())
        code, output, errors = command.finish()
        assert command.is_gone()
        assert not command.agents()
    assert code == 0
    kept = [[one[rank] == other[rank] for rank in (0, 1)] for one, other in pairwise(seen)]
    assert kept == [[True, False], [False, True]]
    found = re.findall(r"after step (\d+) was in memory", " ".join((output + errors).split()))
    steps = [int(step) for step in found]
    assert all(step >= victim - 1 for step, victim in zip(steps, victims, strict=True)), steps
    lines = [line.partition(", after step ")[0] for line in errors.splitlines() if "rank" in line]
    said = "warning: rank {}: was ended by SIGKILL from outside in phase run"
    assert lines == [said.format(victim) for victim in victims.values()]
    same_as(whole_run("fp32"), here / "mine")


def test_a_rank_whose_loader_is_killed_is_replaced(here: Path, whole_run: WholeRun) -> None:
    """As where a machine that lacks memory takes the rank itself."""
    with commands.started(here, "mine", *IN_MEMORY, "data.prefetch=1") as command:
        command.wait_for_step(6)
        (loader,) = command.loaders(1)
        os.kill(loader, signal.SIGKILL)
        code, _, errors = command.finish()
    assert code == 0, errors
    said = f"process {loader} was ended by SIGKILL (out of memory?)"
    assert re.search(f"rank 1: loader worker 0, .*{re.escape(said)}", " ".join(errors.split()))
    same_as(whole_run("fp32"), here / "mine")


def test_a_rank_that_dies_may_end_the_command(here: Path, whole_run: WholeRun) -> None:
    with commands.started(here, "mine", "recovery.restarts=0") as command:
        command.wait_for_step(8)
        os.kill(command.rank(1), signal.SIGKILL)
        code, _, errors = command.finish()
        assert command.is_gone()
    step = int((here / "mine/checkpoints/latest").read_text().removeprefix("step-"))
    assert step >= 6
    assert code == 1
    assert errors == (
        "error: rank 1: was ended by SIGKILL from outside\n"
        "  what it printed is in mine/logs/rank1.log; the other ranks were ended\n"
        f"  saved: step {step}; the same command with --out mine goes on from there\n"
    )
    go_on()
    same_as(whole_run("fp32"), here / "mine")


def test_a_server_of_ranks_that_dies_is_named(here: Path) -> None:
    with commands.started(here, "mine") as command:
        command.wait_for_step(4)
        fields = Path(f"/proc/{command.rank(1)}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(fields[1]), signal.SIGKILL)
        code, _, errors = command.finish()
        assert command.is_gone()
    assert code == 1
    assert errors.startswith(
        "error: rank 0: is lost: the process that ranks are forked from was ended from outside\n"
    )


def stops_answering(here: Path, capsys: pytest.CaptureFixture[str], limit_s: float) -> str:
    """Rank 1 does not, in the middle of a run, and no other command may; what the first says."""
    shutil.rmtree(here / "mine", ignore_errors=True)
    with commands.started(
        here, "mine", "recovery.restarts=0", f"train.timeout_s={limit_s:g}"
    ) as command:
        command.wait_for_step(8)
        os.kill(command.rank(1), signal.SIGSTOP)
        capsys.readouterr()
        assert run(["train", "tiny.yaml", "--out", "mine", "train.steps=1"]) == 2
        assert capsys.readouterr().err == (
            "error: --out = 'mine': expected a folder that no other command is working in. "
            "Choose another folder with --out, or wait.\n"
        )
        assert command.process.poll() is None
        code, _, errors = command.finish()
        assert command.is_gone()
    assert code == 1
    return errors


def test_a_rank_that_hangs_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until it is given up, no other command works in the folder."""
    errors = within_some_limit(partial(stops_answering, here, capsys), 6.0)
    record = json.loads((here / "mine/logs/flight-rank0.json").read_text())
    step, written = record["step"], commands.steps(here / "mine")[-1]["step"]
    assert step - written in (0, 1), "a step's line comes after what ranks still tell each other"
    first, second, *_ = errors.splitlines()
    assert first.startswith("error: rank 0 waits in '")
    assert first.endswith(f"for rank 1, which has not been heard of since step {step}")
    assert second == "  every rank that answered left its last calls in mine/logs/flight-rank*.json"
    assert record["waits_in"]["name"] in first
    assert not (here / "mine/logs/flight-rank1.json").exists()
    go_on()
    assert not list((here / "mine/logs").glob("flight*")), "of an earlier start"


def test_a_reader_that_has_gone_stops_the_run(here: Path) -> None:
    """``weft train ... | head``."""
    with commands.started(here, "mine") as command:
        command.wait_for_step(4)
        assert command.process.stdout is not None
        command.process.stdout.close()
        command.process.stdout = None
        code, _, errors = command.finish()
        assert command.is_gone()
    assert code == 75
    step = int((here / "mine/checkpoints/latest").read_text().removeprefix("step-"))
    assert errors == (
        f"stopped before step 30; saved: step {step}; the same command with --out mine goes on "
        "from there\n"
    )


def is_killed_at(here: Path, moment: Callable[[], bool]) -> bool:
    """A start was, before it ended."""
    with commands.started(here, "mine") as command:
        while not (is_met := moment()) and command.process.poll() is None:
            time.sleep(0.002)
        command.kill_all()
        assert command.is_gone()
    return is_met


def test_a_machine_that_goes_down_costs_nothing(here: Path, whole_run: WholeRun) -> None:
    """SIGKILL to everything at once: during a save, and as soon as one is done. On a busy machine
    that save may be left out, or met too late: then the run is begun again."""
    out = here / "mine"
    moments: list[Callable[[], bool]] = [
        (out / "checkpoints/step-00000006.tmp").exists,
        (out / "checkpoints/step-00000021/index.json").exists,
    ]
    for _ in range(20):
        shutil.rmtree(out, ignore_errors=True)
        if all(is_killed_at(here, moment) for moment in moments) and len(commands.steps(out)) < 30:
            break
    else:
        raise AssertionError("never killed in time")
    reached = {record["step"] for record in commands.records(out) if "eval_loss" in record}
    assert 21 in reached, "an evaluation comes before the save of its step, or it may be lost"
    go_on()
    same_as(whole_run("fp32"), out)
    assert not list(out.glob(".*")), "left by the starts that were killed"


@contextmanager
def stopped_agent(here: Path) -> Iterator[tuple[commands.Command, int]]:
    """A run whose agent stands still before the first half is done. On a machine that is busy with
    others it may be met too late: then the run is begun again."""
    for _ in range(20):
        shutil.rmtree(here / "mine", ignore_errors=True)
        with commands.started(here, "mine") as command:
            while command.process.poll() is None:
                agents = list(filter(commands.has_begun, command.agents()))
                for agent in agents:
                    os.kill(agent, signal.SIGSTOP)
                if agents and len(commands.steps(command.out)) <= 12:
                    yield command, agents[0]
                    return
                if agents:
                    break
                time.sleep(0.002)
    raise AssertionError("the agent was never met")


def test_a_checkpoint_outlives_those_who_copied_it(
    here: Path,
    whole_run: WholeRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Storage that stands still holds no step up; ranks are killed, and their last copy is written
    all the same; who wants to go on waits for that."""
    out = here / "mine"
    monkeypatch.setattr("weft.cli.train.AGENT_S", 1.0)  # it stands still however long one waits
    with stopped_agent(here) as (command, agent):
        command.wait_for_step(20)
        command.kill_ranks()
        assert command.is_gone()
        left = latest(out)
        within_some_limit(partial(waits_in_vain, capsys), 1.0)
        os.kill(agent, signal.SIGCONT)
        assert is_free(out / "checkpoints", commands.TIMEOUT_S)
    assert latest(out) >= left + 6, "both copies were written"
    go_on()
    assert latest(out) == 30
    same_as(whole_run("fp32"), out)


def waits_in_vain(capsys: pytest.CaptureFixture[str], limit_s: float) -> None:
    """As another process writes, a start does, for as long as it was told to."""
    arguments = ["train", "tiny.yaml", "--out", "mine", "--quiet", f"train.timeout_s={limit_s:g}"]
    code, words = run(arguments), "s a process of an earlier run still writes into"
    assert (code, words in (said := capsys.readouterr().err)) == (1, True), said


def latest(out: Path) -> int:
    """The step of the last checkpoint; 0 before the first."""
    file = out / "checkpoints/latest"
    return int(file.read_text().removeprefix("step-")) if file.exists() else 0


def test_an_agent_that_is_killed_costs_one_checkpoint(here: Path, whole_run: WholeRun) -> None:
    out = here / "mine"
    with stopped_agent(here) as (command, agent):
        command.wait_for_step(9)
        os.kill(agent, signal.SIGKILL)
        code, output, errors = command.finish()
    assert (code, latest(out)) == (0, 30)
    assert LOST in " ".join((output + errors).split())
    same_as(whole_run("fp32"), out)


def test_a_start_soon_after_goes_on_from_memory(here: Path, whole_run: WholeRun) -> None:
    """The command and all of its ranks are killed, and nothing was on the disk."""
    out, arguments = here / "mine", (*IN_MEMORY, "checkpoint.memory_s=600")
    with commands.started(here, "mine", *arguments) as command:
        command.wait_for_step(9)
        command.kill_ranks()
        assert command.is_gone()
        assert latest(out) == 0
        with commands.started(here, "mine", *arguments) as again:
            code, output, errors = again.finish()
        said = " ".join((output + errors).split())
        assert code == 0, said
        step = int(said.partition("note: the state after step ")[2].split()[0])
        assert f"after step {step} was in memory; there is no checkpoint on disk" in said
        assert step >= 8, "at most the step that was not copied yet is lost"
    same_as(whole_run("fp32"), out)


def test_signals_of_job_systems(here: Path, whole_run: WholeRun) -> None:
    """SIGTERM to the command and to its group, as ``timeout`` sends it, stops after the step and
    saves, and so does SIGHUP, as a shell whose terminal is closed sends it; SIGKILL to the command
    takes every rank with it."""
    out = here / "mine"
    with commands.started(here, "mine") as command:
        command.wait_for_step(4)
        os.kill(command.process.pid, signal.SIGTERM)
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.killpg(command.process.pid, number)
        code, _, errors = command.finish()
        assert command.is_gone()
    done = commands.steps(out)[-1]["step"]
    assert code == 75
    assert errors == (
        f"stopped before step 30; saved: step {done}; "
        "the same command with --out mine goes on from there\n"
    )
    assert 4 <= done < 30
    with commands.started(here, "mine") as command:
        command.wait_for_step(done + 3)
        command.process.kill()
        assert command.is_gone()
    assert len(commands.steps(out)) < 30, "the ranks lived on without their command"
    go_on()
    same_as(whole_run("fp32"), out)


def test_ctrl_c_stops_and_other_shares_go_on(here: Path, whole_run: WholeRun) -> None:
    """A terminal sends SIGINT to every process of the job at once."""
    out = here / "mine"
    asked = "compute.precision=fp64"
    with commands.started(here, "mine", asked, program=commands.COLD) as command:
        command.wait_for_step(3)
        assert command.interruptible() == [command.process.pid], "the command passes it on"
        os.killpg(command.process.pid, signal.SIGINT)
        code, _, errors = command.finish()
        assert command.is_gone()
    done = commands.steps(out)[-1]["step"]
    assert code == 75
    assert errors == (
        f"stopped before step 30; saved: step {done}; "
        "the same command with --out mine goes on from there\n"
    )
    assert 3 <= done < 30
    go_on("compute.precision=fp64", "plan.shares=[1,1,1]", "train.steps=30", "--steps", "17")
    go_on("compute.precision=fp64", "plan.shares=[3]")
    whole = whole_run("fp64")
    mine, theirs = commands.steps(out), commands.steps(whole)
    assert [record["step"] for record in mine] == [record["step"] for record in theirs]
    assert [r["loss"] for r in mine[:done]] == [r["loss"] for r in theirs[:done]]
    for name in ("loss", "grad_norm"):
        values = [[record[name] for record in records] for records in (mine, theirs)]
        np.testing.assert_allclose(*values, rtol=1e-10, err_msg=name)


def test_a_run_that_diverges_ends_with_76(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks; the first update makes parameters that nothing finite follows from."""
    arguments = ["train", "tiny.yaml", "--out", "mine", "--quiet", "checkpoint.every=1"]
    assert run([*arguments, "optim.lr=1e30", "train.stop_after_non_finite=3"]) == 76
    records = commands.steps(here / "mine")
    (first,) = [r["step"] for r in records if r["loss"] is not None]
    assert records[-1]["step"] == first + 3
    assert capsys.readouterr().err == (
        f"error: training has diverged: loss nan, grad_norm nan at step {first + 3}, and no "
        f"finite numbers since step {first}. The last finite checkpoint is step-0000000{first}: "
        "the same command with --out mine goes on from there. A lower optim.lr, a longer warm-up "
        "or optim.max_grad_norm may help\n"
    )
    assert [p.name for p in (here / "mine/checkpoints").glob("step*")] == [f"step-0000000{first}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_data_is_prepared(here: Path, number: signal.Signals) -> None:
    (here / "text.txt").write_text("some words to be cut into tokens. " * 400_000)
    before = commands.contents(here)
    with commands.started(here, "mine", "data.tokenizer=bpe") as command:
        command.wait_until((here / ".weft").exists)
        os.killpg(command.process.pid, number)
        os.kill(command.process.pid, number)
        code, output, errors = command.finish()
        assert command.is_gone()
    assert (code, errors) == (75, "stopped before training began\n")
    assert output.endswith("data ...\n")
    kept = {n: c for n, c in commands.contents(here).items() if not n.startswith(".weft")}
    assert kept == before


@pytest.fixture
def out(here: Path, finished: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(finished, here / "mine"))


def test_the_checkpoint_before_is_used_with_a_note(here: Path, out: Path) -> None:
    (out / "checkpoints/step-00000030/rank-00001.safetensors").unlink()
    with commands.started(here, "mine", "train.steps=31", "--quiet") as command:
        code, output, errors = command.finish()
    assert (code, errors) == (0, "")
    assert output == (
        "note: mine/checkpoints/step-00000030/rank-00001.safetensors: is missing; "
        "opened step-00000027, which is complete.\n"
    )
    assert [record["step"] for record in commands.steps(out)] == list(range(1, 32))


def test_changed_bytes_are_an_error_with_a_way_out(
    here: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = out / "checkpoints/step-00000030/rank-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = commands.contents(out)
    assert run(["train", "tiny.yaml", "--out", "mine", "train.steps=31", "--quiet"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("error: rank ")
    assert ": mine/checkpoints/step-00000030/rank-00000.safetensors: " in first
    assert first.endswith(
        "Without mine/checkpoints/step-00000030 the run goes on from the checkpoint before it, "
        "or begins again."
    )
    assert len(rest) == 1 and rest[0].startswith("  what it printed is ")
    after = commands.contents(out)
    events = [contents.pop("events.jsonl").splitlines() for contents in (before, after)]
    assert after == before
    facts = json.loads(events[1][-1])["facts"]
    assert facts.pop("since_began_s") > 0
    assert facts == {"cause": "machine", "phase": "restore"}
    assert events[1][:-1] == events[0], "a start that was refused is one more event"


def test_a_summary_of_an_earlier_end_is_not_the_end(here: Path, out: Path, finished: Path) -> None:
    """Killed after the last save and before the summary: the next start makes up for it."""
    whole = json.loads((out / "summary.json").read_text())
    for text in (json.dumps({**whole, "step": 20}), '{"step": 30, "par'):
        (out / "summary.json").write_text(text)
        go_on()
        again = json.loads((out / "summary.json").read_text())
        assert again["step"] == 30
        assert again["held_out"] == whole["held_out"]
        assert commands.numbers(out) == commands.numbers(finished)
