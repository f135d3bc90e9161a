"""What ranks have copied becomes the same checkpoint as one that they write themselves, or none."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_cases import STATE, cut, rank_shards, save
from limits import file_size_limit

from weft.checkpoint.agent import agent, holding
from weft.checkpoint.agent.agent import Agent
from weft.checkpoint.agent.client import SLOTS, AgentClient, start_agent
from weft.checkpoint.agent.wire import Commit, Failed, Hello, Save, Saved, Wire
from weft.checkpoint.draft import LocalDraft
from weft.checkpoint.entry import JSON, CheckpointError, RankFile
from weft.checkpoint.index import rank_file_json
from weft.checkpoint.place import Place
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard
from weft.checkpoint.store import hold, is_free, read_latest
from weft.checkpoint.verify import verify
from weft.plan.box import Box

LIMIT_S = 300.0
"""For whatever is waited for, on a machine that may be very busy."""


class Machine:
    """An agent and the ranks that speak to it."""

    def __init__(
        self, folder: Path, root: Path, ranks: Sequence[int], keep_s: float, *, pushes: bool
    ) -> None:
        self.root: Place = root
        self.held = root
        self.node = folder.name
        self.log = folder / "agent.log"
        root.mkdir(parents=True, exist_ok=True)
        self.process, path = start_agent(
            self.log, root, node=self.node, commits=0 in ranks, keep_s=keep_s
        )
        self.ranks = {
            rank: AgentClient(
                path,
                Hello(rank=rank, ranks_here=len(ranks), commits=rank == 0, pushes=pushes),
            )
            for rank in ranks
        }
        self.socket = path

    def copy(self, step: int, *ranks: int) -> None:
        """Ranks copy what they hold after a step, and hand it over."""
        for rank in ranks:
            slot = self.ranks[rank].copy(rank_shards(step)[rank])
            self.hand_over(rank, slot, named(self.root, step))

    def hand_over(self, rank: int, slot: int, save: Save) -> None:
        """As the ranks of a job do; the first one of a machine says what there is to say."""
        state = {**STATE, "seed": save.step} if rank == min(self.ranks) else None
        self.ranks[rank].hand_over(slot, save, world_size=2, state=state)

    def commit(self, step: int, *, timeout_s: float = LIMIT_S) -> None:
        """What the first rank says."""
        self.ranks[0].commit(Commit(save=named(self.root, step, timeout_s), keep=2))

    def wait(self) -> list[Saved | Failed]:
        """Until nothing is left to do; what the first rank heard of it."""
        for client in self.ranks.values():
            client.wait()
        return self.ranks[0].events() if 0 in self.ranks else []

    def leave(self) -> int:
        """All ranks end, or are killed: the agent's exit code, once it has ended too."""
        for client in self.ranks.values():
            client.close()
        return self.process.wait(LIMIT_S)


def named(root: Place, step: int, timeout_s: float = LIMIT_S) -> Save:
    return Save(root=str(root), step=step, name=f"save{step}", timeout_s=timeout_s)


@contextmanager
def machine(
    folder: Path,
    root: Path,
    ranks: Sequence[int] = (0, 1),
    *,
    keep_s: float = 0.0,
    pushes: bool = False,
) -> Iterator[Machine]:
    folder.mkdir(exist_ok=True)
    made = Machine(folder, root, ranks, keep_s, pushes=pushes)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        for client in made.ranks.values():
            client.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[-5:] != ".json"}


def test_what_was_copied_is_what_is_saved(tmp_path: Path) -> None:
    """To the byte; and what ranks do to their tensors afterwards changes nothing."""
    root = tmp_path / "checkpoints"
    with machine(tmp_path, root) as one:
        for step in (1, 2, 3):
            shards = rank_shards(step)
            for rank, client in one.ranks.items():
                slot = client.copy(shards[rank])
                for shard in shards[rank]:
                    shard.tensor.fill_(torch.nan)
                one.hand_over(rank, slot, named(root, step))
            one.commit(step)
            (saved,) = one.wait()
            assert isinstance(saved, Saved)
            assert (saved.step, saved.bytes > 0) == (step, True)
        assert one.leave() == 0
        assert not one.socket.exists()
    assert one.log.read_text() == ""
    assert sorted(path.name for path in root.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000003",
    ]
    expected = save(tmp_path / "by ranks", 3, seed=3)
    assert files(root / "step-00000003") == files(expected)
    assert open_checkpoint(root).state == open_checkpoint(expected).state
    assert verify(root).ok


def test_it_outlives_the_ranks(tmp_path: Path) -> None:
    """They are gone before it begins; it holds the folder until it is done."""
    root = tmp_path / "checkpoints"
    with machine(tmp_path, root) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        one.copy(1, 0, 1)
        one.commit(1)
        one.copy(2, 0)  # the second rank is killed before it has copied this one
        one.commit(2)
        for client in one.ranks.values():
            client.close()
        assert not is_free(root, 0.0)
        os.kill(one.process.pid, signal.SIGCONT)
        assert is_free(root, LIMIT_S)
        assert one.process.wait(LIMIT_S) == 0
    assert read_latest(root) == "step-00000001"
    assert [path.name for path in sorted(root.iterdir())] == ["latest", "step-00000001"]
    assert verify(root).ok
    assert (
        "step 2: CheckpointError: a rank ended before it had copied step 2" in one.log.read_text()
    )


def test_slow_storage_holds_nobody_up(tmp_path: Path) -> None:
    """Two copies wait at most, and everything is written in the end."""
    root = tmp_path / "checkpoints"
    with machine(tmp_path, root) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        for step in range(1, SLOTS + 1):
            one.copy(step, 0, 1)
            one.commit(step)
        assert [client.num_waiting for client in one.ranks.values()] == [SLOTS, SLOTS]
        with pytest.raises(
            AssertionError, match="no place"
        ):  # whoever does not ask first has no place to copy to
            one.copy(9, 0)
        os.kill(one.process.pid, signal.SIGCONT)
        assert [event.step for event in one.wait()] == list(range(1, SLOTS + 1))
        assert [client.num_waiting for client in one.ranks.values()] == [0, 0]
    assert read_latest(root) == f"step-{SLOTS:08d}"


def test_an_agent_that_is_killed(tmp_path: Path) -> None:
    """Nobody waits for it, and the checkpoint before stays."""
    root = tmp_path / "checkpoints"
    save(root, 1, seed=1)
    with machine(tmp_path, root) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        one.copy(2, 0, 1)
        one.commit(2)
        one.process.kill()
        one.process.wait()
        assert one.wait() == []
        assert not any(client.is_alive for client in one.ranks.values())
        one.copy(3, 0, 1)  # to nobody
        one.commit(3)
        assert is_free(root, 0.0)
    assert read_latest(root) == "step-00000001"
    assert save(root, 4, seed=4).name == "step-00000004"


def test_what_the_disk_refuses(tmp_path: Path) -> None:
    """Is told to the rank that commits; memory is free again and the next save may work."""
    root = tmp_path / "checkpoints"
    with machine(tmp_path, root) as one:
        (root / "step-00000001.tmp").write_text("in the way")
        one.copy(1, 0, 1)
        one.commit(1)
        (failed,) = one.wait()
        assert isinstance(failed, Failed)
        assert failed.problem.startswith(f"{root}/step-00000001.tmp: cannot be created: ")
        (root / "step-00000001.tmp").unlink(missing_ok=True)
        one.copy(2, 0, 1)
        one.commit(2)
        (saved,) = one.wait()
        assert saved == Saved(step=2, seconds=saved.seconds, bytes=saved.bytes)
    assert verify(root).ok


def test_two_machines_make_one_checkpoint(tmp_path: Path) -> None:
    """Each writes the files of its own rank; what is left of an earlier save misleads nobody."""
    root = tmp_path / "checkpoints"
    (root / "step-00000001.tmp").mkdir(parents=True)
    (root / "step-00000001.tmp/save-killed").touch()
    (root / "step-00000001.tmp/rank-00001.facts.json").write_text('{"problem": "of old"}')
    with machine(tmp_path / "a", root, [0]) as first, machine(tmp_path / "b", root, [1]) as second:
        second.copy(1, 1)
        first.copy(1, 0)
        first.commit(1)
        assert isinstance(first.wait()[0], Saved)
        second.wait()
        first.copy(2, 0)
        first.commit(2)
        second.copy(2, 1)
        assert isinstance(first.wait()[0], Saved)
        second.wait()
        assert (first.leave(), second.leave()) == (0, 0)
    expected = save(tmp_path / "by ranks", 2, seed=2)
    assert files(root / "step-00000002") == files(expected)
    assert verify(root).ok


def test_a_machine_that_is_lost(tmp_path: Path) -> None:
    """Its files never come: there is no checkpoint, and the one before stays."""
    root = tmp_path / "checkpoints"
    save(root, 1, seed=1)
    with machine(tmp_path / "a", root, [0]) as first, machine(tmp_path / "b", root, [1]) as second:
        second.process.kill()
        first.copy(2, 0)
        first.commit(2, timeout_s=0.2)
        (failed,) = first.wait()
        assert isinstance(failed, Failed)
        assert failed.problem == "waited 0 s for rank-00001.safetensors of another machine"
    left = ["latest", "step-00000001", "step-00000002.save2.abandoned"]
    assert [path.name for path in sorted(root.iterdir())] == left


def test_a_save_that_was_given_up_before_the_other_machine_looked(tmp_path: Path) -> None:
    """It hears so, and has its part in the next one; it waited as long as a save may take."""
    root = tmp_path / "checkpoints"
    with machine(tmp_path / "a", root, [0]) as first, machine(tmp_path / "b", root, [1]) as second:
        (root / "step-00000001.tmp").write_text("in the way")
        first.copy(1, 0)
        first.commit(1)
        assert isinstance(first.wait()[0], Failed)
        (root / "step-00000001.tmp").unlink()
        second.copy(1, 1)
        second.wait()
        (failed,) = second.ranks[1].events()
        assert isinstance(failed, Failed) and failed.problem == "who commits it gave it up"
        first.copy(2, 0)
        first.commit(2)
        second.copy(2, 1)
        assert isinstance(first.wait()[0], Saved)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000002"]


def test_a_machine_that_cannot_even_say_that_it_cannot_write(tmp_path: Path) -> None:
    draft = LocalDraft(tmp_path, 1, "save1")
    draft.begin()
    with (
        file_size_limit(1),
        pytest.raises(CheckpointError, match=r"facts\.json: cannot be written"),
    ):
        draft.leave(1, {"problem": "no room"})
    assert draft.left(1) == {"problem": "the storage does not take what became of its file"}
    assert draft.left(0) is None


@contextmanager
def gone_on(tmp_path: Path, *, commits: bool) -> Iterator[tuple[Agent, agent._Pending]]:
    """An agent whose ranks others have replaced, and what it still has of theirs."""
    (tmp_path / "agent").touch()
    one = Agent(socket.socket(), tmp_path / "agent", 0, root=0, keep_s=0.0)
    wire = Wire(socket.socket())
    for crew in ("first", "second"):
        hello = Hello(rank=0, ranks_here=1, commits=commits, crew=crew)
        one._join(agent._Rank(wire), hello)
    assert one._others_since(one._crews["second"]) is None
    yield one, agent._Pending(named(tmp_path, 2), one._crews["first"])
    for each in (wire, one._done, one._tell, one._listener, one._select):
        each.close()


class Elsewhere(LocalDraft):
    """What another machine does there meanwhile, one thing at each look."""

    look_s = 0.0

    def __init__(self, root: Path, step: int, *does: Callable[[LocalDraft], object]) -> None:
        super().__init__(root, step, f"save{step}")
        self._does = [*does]

    def left(self, rank: int) -> dict[str, JSON] | None:
        self._do()
        return super().left(rank)

    def is_open(self) -> bool:
        self._do()
        return super().is_open()

    def _do(self) -> None:
        if self._does:
            self._does.pop(0)(LocalDraft(self._root, self._step, f"save{self._step}"))


def nothing(_: LocalDraft) -> None: ...


def test_a_job_that_has_gone_on_waits_for_no_lost_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks were lost before they had copied, so its agent knows of no save; or it was lost
    while it wrote."""
    monkeypatch.setattr(holding, "GIVEN_UP_S", 0.0)
    said = "ranks were lost before rank-00001.safetensors of another machine came"
    with gone_on(tmp_path, commits=True) as (one, pending):
        draft = Elsewhere(tmp_path, 2)
        draft.begin()
        with pytest.raises(CheckpointError, match=said):
            one._from_others(draft, pending, [1])
        monkeypatch.setattr(holding, "SILENT_S", 0.0)
        draft.hold(1, 7)
        with pytest.raises(CheckpointError, match=said):
            one._from_others(draft, pending, [1])
        draft.abandon()
    with gone_on(tmp_path, commits=False) as (one, pending):
        one._before = LocalDraft(tmp_path, 1, "save1")
        with pytest.raises(CheckpointError, match="ranks were lost before step 2 came"):
            one._wait_for(pending.save.draft(), pending)


def test_a_job_that_has_gone_on_completes_what_all_had_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long another machine takes for its part, or for the save before."""
    monkeypatch.setattr(holding, "GIVEN_UP_S", 0.0)
    facts = RankFile("rank-00001.safetensors", 0, "", ())
    with gone_on(tmp_path, commits=True) as (one, pending):
        draft = Elsewhere(
            tmp_path,
            2,
            lambda theirs: theirs.hold(1, 0),
            nothing,
            lambda theirs: theirs.hold(1, 1),
            lambda theirs: theirs.leave(1, rank_file_json(facts)),
        )
        draft.begin()
        assert one._from_others(draft, pending, [1]) == [facts]
        assert [path.name for path in (tmp_path / "step-00000002.tmp").iterdir()] == ["save-save2"]
    with gone_on(tmp_path, commits=False) as (one, pending):
        one._before = before = LocalDraft(tmp_path, 1, "save1")
        before.begin()
        one._wait_for(Elsewhere(tmp_path, 2, nothing, nothing, LocalDraft.begin), pending)


def test_a_machine_says_what_it_has_and_what_it_cannot_write(tmp_path: Path) -> None:
    """To whoever commits, who waits for it, and then need not."""
    root = tmp_path / "checkpoints"
    theirs, step = LocalDraft(root, 1, "save1"), root / "step-00000001.tmp"
    with machine(tmp_path / "b", root, [1]) as second:
        step.mkdir()
        os.mkfifo(step / "rank-00001.safetensors")  # it cannot go on before somebody reads there
        (step / "save-save1").touch()
        second.copy(1, 1)
        until(lambda: theirs.held(1) is not None)
        assert theirs.left(1) is None
        os.close(os.open(step / "rank-00001.safetensors", os.O_RDONLY))
        until((step / "rank-00001.facts.json").exists)
        second.wait()
        left = theirs.left(1)
    assert left is not None
    assert "rank-00001.safetensors: cannot be written: " in str(left["problem"])
    assert [path.name for path in step.iterdir()] == ["save-save1"]


def test_a_first_rank_that_is_lost(tmp_path: Path) -> None:
    """Before it had copied: whoever copied already is not waited for, on any machine."""
    root = tmp_path / "checkpoints"
    with machine(tmp_path / "a", root) as one:
        one.copy(1, 1)
        one.ranks[0].close()
        one.ranks[1].wait()
        assert one.leave() == 0
    with machine(tmp_path / "b", root, [1]) as other:  # its first rank never says anything
        client = other.ranks[1]
        other.hand_over(1, client.copy(rank_shards(2)[1]), named(root, 2, 0.2))
        client.wait()
        assert other.leave() == 0
    assert list(root.iterdir()) == []
    assert "waited 0 s for step 2" in other.log.read_text()


def test_an_agent_whose_ranks_never_came(tmp_path: Path) -> None:
    """Ends with the process that started it."""
    root = tmp_path / "checkpoints"
    code = "import sys; from pathlib import Path; "
    code += "from weft.checkpoint.agent.client import start_agent; "
    code += "start_agent(Path(sys.argv[1]) / 'log', Path(sys.argv[1]) / 'checkpoints')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=LIMIT_S)
    assert is_free(root, LIMIT_S)


def test_a_folder_is_held_as_long_as_anyone_does(tmp_path: Path) -> None:
    first, second = (hold(tmp_path / "checkpoints") for _ in range(2))
    assert not is_free(tmp_path / "checkpoints", 0.0)
    os.close(first)
    assert not is_free(tmp_path / "checkpoints", 0.0)
    os.close(second)
    assert is_free(tmp_path / "checkpoints", 0.0)
    assert is_free(tmp_path / "nothing here", 0.0)


def test_an_agent_that_nobody_speaks_to_is_small(tmp_path: Path) -> None:
    """It needs no PyTorch: so it starts at once, and takes little beside what it writes."""
    with machine(tmp_path, tmp_path / "checkpoints") as one:
        one.copy(1, 0, 1)
        one.commit(1)
        one.wait()
        maps = Path(f"/proc/{one.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "_multiarray_umath" not in maps


def test_pieces_of_every_kind(tmp_path: Path) -> None:
    """Empty boxes, scalars, and elements of unlike widths."""
    tensors = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "narrow": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 6).t(),
    }
    shards = [cut("param", name, t, Box.whole(tuple(t.shape))) for name, t in tensors.items()]
    both: list[list[Shard]] = [shards, []]
    root = tmp_path / "checkpoints"
    with machine(tmp_path, root) as one:
        for rank, client in one.ranks.items():
            one.hand_over(rank, client.copy(both[rank]), named(root, 1))
        one.commit(1)
        (saved,) = one.wait()
        assert isinstance(saved, Saved)
    checkpoint = open_checkpoint(root)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name, "param"), tensor)
