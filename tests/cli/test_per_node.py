"""Several commands on loopback are several machines, each of which guards its own ranks."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

import pytest
from cli import commands
from cli.commands import Command
from ports import free_port

from weft.cli.main import run
from weft.config.errors import STOPPED
from weft.elastic.move import REQUEST_FILE
from weft.report.events import EVENTS_FILE, read_events
from weft.train.run_folder import NODES_FILE

MOVE = ("elastic", "move", "mine")
EXACT = 1e-10
"""In fp64: sums of other plans are added in another order."""
KEPT = ("checkpoint.snapshot_every=1", "checkpoint.peers=1", "checkpoint.memory_s=600")
"""State is in the memory of two machines."""


class Job:
    """Commands that a launcher starts, or a person starts again."""

    def __init__(self, folder: Path, stack: ExitStack, size: int, *asked: str) -> None:
        self.folder, self._stack, self._asked = folder, stack, asked
        self.address = {"WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1"}
        self.address["MASTER_PORT"] = str(free_port())
        self.nodes = [self.start(index) for index in range(size)]

    def start(self, index: int, *more: str) -> Command:
        words = ("--nproc-per-node", "1", *self._asked, *more)
        environment = {"RANK": f"{index}", **self.address}
        command = commands.started(self.folder, "mine", *words, environment=environment)
        return self._stack.enter_context(command)


@contextmanager
def job(folder: Path, size: int, *asked: str) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(folder, stack, size, *asked)


def served(command: Command) -> set[int]:
    """What was forked from the warm server of a machine."""
    main = command.process.pid
    return {pid for pid in command.alive() if commands.parent(commands.parent(pid) or 0) == main}


@contextmanager
def frozen(pids: set[int]) -> Iterator[None]:
    """They do no step meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def is_kept(head: Command) -> None:
    """There is something to go on from."""

    def is_saved() -> bool:
        return any(event.kind == "save_finished" for event in read_events(head.out / EVENTS_FILE))

    head.wait_until(is_saved)
    head.wait_for_step(commands.steps(head.out)[-1]["step"] + 1)


def goes_on(head: Command, times: int) -> None:
    """The state was restored so often, and a step done after that."""

    def is_on() -> bool:
        events = read_events(head.out / EVENTS_FILE)
        after = [event.step for event in events if event.kind == "restore"]
        done = [record["step"] for record in commands.steps(head.out)]
        return len(after) == times and max(done, default=0) > (after[-1] or 0) + 1

    head.wait_until(is_on)


def ends(nodes: Sequence[Command]) -> list[tuple[int, str]]:
    """Exit code and standard error of each."""
    found = [command.finish() for command in nodes]
    return [(code, errors) for code, _, errors in found]


def test_machines_come_and_go(here: Path) -> None:
    """A rank is lost, then its machine, whose place a spare one takes, then that one: the first is
    there again. Rank 0 is one process until the machine that guides all is lost."""
    asked = ("data.workers=0", "train.steps=900")  # so many that none is the last
    with job(here, 3, *KEPT, *asked) as one:
        head, second, spare = one.nodes
        is_kept(head)
        stays = served(head)
        os.kill(second.rank(1), signal.SIGKILL)
        goes_on(head, 1)
        with frozen(stays):
            refused = one.start(3, "seed=5").finish()
        second.process.kill()
        assert second.is_gone(), "ranks do not outlive the command of their machine"
        goes_on(head, 2)
        assert spare.rank(1)
        with frozen(stays):
            again = one.start(1)
            again.wait_until(lambda: len(again.alive()) > 1)
        spare.process.kill()
        goes_on(head, 3)
        assert again.rank(1)
        assert served(head) == stays
        head.process.kill()
        codes = ends([head, again])
        assert all(command.is_gone() for command in (head, second, spare, again))
    assert codes[1][0] == 1
    assert "error: node 0 (127.0.0.1), which guides this job, is gone: its command" in codes[1][1]
    why = "seed = 5: expected 1234, as on node 0"
    assert refused[0] == 2 and why in refused[2]
    assert "node 3" in codes[0][1] and why in codes[0][1]
    out = here / "mine"
    events = read_events(out / EVENTS_FILE)
    lost = [event.message for event in events if event.kind == "epoch_end"]
    assert [("SIGKILL" in text, "node 1" in text, "node 2" in text) for text in lost] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert "memory" in [e.facts["source"] for e in events if e.kind == "restore"]
    as_far = ("--steps", str(commands.steps(out)[-1]["step"]))
    assert run(["train", "tiny.yaml", "--out", "one", "--quiet", *asked, *as_far]) == 0
    mine = commands.numbers(out)
    assert mine == commands.numbers(here / "one")[: len(mine)]


def test_what_is_left_goes_on_until_a_machine_is_back(
    here: Path, whole_run: Callable[..., Path]
) -> None:
    """Under a plan for one rank, then under the first plan again, then under one that somebody asks
    for, until a signal stops all."""
    asked = ("compute.precision=fp64", "recovery.when_lost=replan", "data.workers=0")
    with job(here, 2, *KEPT, *asked) as one:
        head, second = one.nodes
        is_kept(head)
        stays = served(head)
        second.process.kill()
        goes_on(head, 1)
        with frozen(stays):
            again = one.start(1)
            again.wait_until(lambda: len(again.alive()) > 1)
        goes_on(head, 2)
        moved = list[int]()
        asks = Thread(target=lambda: moved.append(run([*MOVE, "plan.shares=[2,1]"])))
        with frozen(stays):
            assert again.rank(1)
            assert served(head) == stays
            assert run([*MOVE, "--ranks", "1"]) == 2
            asks.start()
            head.wait_until(lambda: bool(moved) or (head.out / REQUEST_FILE).exists())
        asks.join()
        left = served(head)
        os.kill(head.process.pid, signal.SIGTERM)
        said_by_both = ends([head, again])
        assert all(command.is_gone() for command in (head, second, again))
    assert moved == [0]
    codes = [code for code, _ in said_by_both]
    was_done = codes == [0, 0]  # the last few steps, before the signal came
    assert was_done or (codes == [STOPPED] * 2 and left == stays), said_by_both
    out = here / "mine"
    assert not (out / NODES_FILE).exists()
    events = read_events(out / EVENTS_FILE)
    said = [event.message for event in events if event.kind == "replan"]
    assert [text.partition(";")[0] for text in said] == [
        "the plan is now 1 rank, instead of 2 ranks: 1 + 1",
        "the plan is now 2 ranks: 1 + 1, instead of 1 rank",
    ]
    (move,) = [event for event in events if event.kind == "move"]
    assert move.message.startswith("the plan is now 2 ranks")
    restored = [event for event in events if event.kind == "restore"][-1]
    assert restored.facts["source"] == "memory"
    assert restored.step == move.step, "no step is done again where all stop together"
    assert run(["train", "tiny.yaml", "--out", "mine", "--quiet", *asked]) == 0
    mine, whole = commands.steps(out), commands.steps(whole_run("fp64"))
    for key in ("loss", "grad_norm"):
        values = [row[key] for row in whole]
        assert [row[key] for row in mine] == pytest.approx(values, rel=EXACT)
    assert [row["data"] for row in mine] == [row["data"] for row in whole]


def test_a_site_that_is_away_is_left_out_and_catches_up(here: Path) -> None:
    """Killed, it is missing in no step; back, it goes on from what the other has. The run's file of
    events says when, and a run that is started so three times has the same numbers."""
    sites = "sites={every: 3, wire: fp64}"
    steps = "train.steps=120", "train.eval_every=60", "checkpoint.every=30"
    asked = ("compute.precision=fp64", "data.workers=0", "plan.shares=[2,1]", *steps)
    with job(here, 2, *KEPT, *asked, sites, "recovery.when_lost=replan") as one:
        head, second = one.nodes
        is_kept(head)
        second.process.kill()
        goes_on(head, 1)
        with frozen(served(head)):
            again = one.start(1)
            again.wait_until(lambda: len(again.alive()) > 1)
        goes_on(head, 2)
        assert [code for code, _ in ends([head, again])] == [0, 0]
    events = read_events(here / "mine" / EVENTS_FILE)
    said = [event.message for event in events if event.kind == "replan"]
    assert "one site, from where all last met, of 2 go on with all samples" in said[0]
    assert said[1].startswith("the plan is now 2 ranks")
    away, back = (event.step for event in events if event.kind == "restore")
    assert away is not None and back is not None and 0 < away < back
    parts = (
        ("--steps", f"{away}", *asked, sites),
        ("--steps", f"{back}", *asked[:2], *steps, "plan.shares=[3]"),
    )
    for words in (*parts, (*asked, sites)):
        assert run(["train", "tiny.yaml", "--out", "parts", "--quiet", *words]) == 0
    mine, whole = ({*commands.numbers(here / name)} for name in ("mine", "parts"))
    assert mine <= whole, "what was said before some step was called away is missing"
    assert {dict(row)["step"] for row in mine} >= {1, away, back + 2, 120}


def test_what_is_refused_ends_all(here: Path) -> None:
    """Once, before any work, and nothing is left."""
    before = commands.contents(here)
    with job(here, 2, "data.path=none.txt", "--quiet") as one:
        (code, said), *others = ends(one.nodes)
        assert code == 2
        assert said.count("data.path = 'none.txt': expected a file or a folder that exists") == 1
        assert others == [(2, "")]
    assert commands.contents(here) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected a launcher that starts one command on each machine."),
        (("--out", "mine"), "expected a launcher that starts one command on each machine."),
    ],
)
def test_one_command_alone_has_no_machines(
    here: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], said: str
) -> None:
    assert run(["train", "tiny.yaml", "--nproc-per-node", "1", *words]) == 2
    assert said in capsys.readouterr().err
