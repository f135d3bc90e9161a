"""What ranks have copied stays in memory, and whoever begins next reads it as a checkpoint."""

import gc
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import STATE, rank_shards, values
from test_agent import LIMIT_S, Machine, machine, named

from weft.checkpoint.agent import memory as memory_of
from weft.checkpoint.agent.client import AgentClient, start_agent
from weft.checkpoint.agent.image import Image, memory_file, opened_image
from weft.checkpoint.agent.kept import Kept, KeptCopy, Memory
from weft.checkpoint.agent.lease import Lease, agent_address
from weft.checkpoint.agent.memory import MemoryOfMachine
from weft.checkpoint.agent.wire import Hello
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import Checkpoint
from weft.plan.box import Box


def in_memory(one: Machine, step: int, *ranks: int) -> None:
    """Ranks copy what they hold after a step, which is not written."""
    for rank in ranks:
        slot = one.ranks[rank].copy(rank_shards(step)[rank])
        one.hand_over(rank, slot, replace(named(one.root, step), is_written=False))


def steps(one: Machine) -> list[int]:
    """What is in memory."""
    with MemoryOfMachine(one.root, one.node) as memory:
        return [offer.step for offer in memory.offers]


def newest(one: Machine) -> Checkpoint:
    with MemoryOfMachine(one.root, one.node) as memory:
        return memory.open(memory.offers[-1])


def same_as(checkpoint: Checkpoint, step: int) -> None:
    """Every element, as a whole and in parts as another plan asks for them."""
    assert checkpoint.step == step
    for (kind, name), whole in values(step).items():
        assert torch.equal(checkpoint.read(name, kind), whole)
        box = Box((1,) * whole.ndim, tuple(size - 2 for size in whole.shape))
        part = torch.empty(box.size, dtype=torch.float64)
        checkpoint.read_into(part, name, kind, box)
        assert torch.equal(part, whole[box.slices()].double())


def test_the_newest_whole_copy_is_in_memory(tmp_path: Path) -> None:
    """Written or not; a copy that some rank did not make leaves the one before."""
    with machine(tmp_path, tmp_path / "checkpoints") as one:
        assert steps(one) == []
        one.copy(1, 0, 1)
        one.commit(1)
        one.wait()
        same_as(newest(one), 1)
        in_memory(one, 2, 0, 1)
        with MemoryOfMachine(one.root, one.node) as memory:
            files = sum(file.stat().st_size for file in one.root.glob("step-00000001/rank*"))
            assert memory.num_bytes == len(memory.offers) * files > 0
        checkpoint = newest(one)
        same_as(checkpoint, 2)
        assert checkpoint.state == {**STATE, "seed": 2}
        for step in (3, 4):  # one more goes when the next begins, which all ranks have then
            in_memory(one, step, 0)
            assert steps(one) == [step - 1]
            in_memory(one, step, 1)
            assert steps(one)[-1] == step
        assert sorted(path.name for path in one.root.iterdir()) == ["latest", "step-00000001"]


def test_a_copy_that_another_overwrites_is_not_offered(tmp_path: Path) -> None:
    """A rank is killed while it copies the third state into the place of the first."""
    with machine(tmp_path, tmp_path / "checkpoints") as one:
        in_memory(one, 1, 0, 1)
        in_memory(one, 2, 0)  # the other is killed before it says so
        one.ranks[1].copy(rank_shards(2)[1])
        assert steps(one) == [1]
        in_memory(one, 3, 0)
        assert steps(one) == []


def test_it_outlives_everybody_for_a_while(tmp_path: Path) -> None:
    """Another crew of other ranks begins with what the first had, and its own takes its place."""
    with machine(tmp_path, tmp_path / "checkpoints", keep_s=LIMIT_S) as one:
        in_memory(one, 5, 0, 1)
        os.kill(one.process.pid, signal.SIGSTOP)
        for client in one.ranks.values():
            client.close()
        os.kill(one.process.pid, signal.SIGCONT)
        same_as(newest(one), 5)
        hello = Hello(rank=0, ranks_here=1, commits=True, crew="second")
        lonely = AgentClient(one.socket, hello)
        one.ranks = {0: lonely}
        whole = [shard for shards in rank_shards(6) for shard in shards]
        for step in (6, 7):
            save = replace(named(one.root, step), is_written=False)
            lonely.hand_over(lonely.copy(whole), save, world_size=1, state=STATE)
            assert steps(one) == [step - 1, step]
        lonely.forget()
        assert one.leave() == 0, "nobody wants it any more"
    assert steps(one) == []


def test_it_goes_when_nobody_holds_on_to_it(tmp_path: Path) -> None:
    lease = Lease()
    with machine(tmp_path, tmp_path / "checkpoints", keep_s=0.0) as one:
        lease.take(one.socket)
        in_memory(one, 1, 0, 1)
        for client in one.ranks.values():
            client.close()
        same_as(newest(one), 1)
        time.sleep(2.5)  # longer than an agent waits before it looks around
        same_as(newest(one), 1)
        lease.let_go()
        assert one.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("changed", ["torn", "the last bytes"])
def test_memory_that_was_changed_is_refused(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(handle: int, pieces_bytes: int) -> Image:
        image = memory_of_image(handle, pieces_bytes)
        where = image.place(image.pieces[0]).start if changed == "torn" else len(image) - 4
        os.pwrite(handle, b"\xff\xff", where)
        return image

    memory_of_image = memory_of.opened_image
    monkeypatch.setattr(memory_of, "opened_image", opened)
    with machine(tmp_path, tmp_path / "checkpoints") as one:
        in_memory(one, 1, 0, 1)
        said = r"memory/step-00000001/rank-00000.safetensors: is not what was copied \(guard"
        with pytest.raises(CheckpointError, match=said):
            newest(one)


def test_a_handle_of_no_image_stays_the_callers() -> None:
    """Who opened it closes it: closed twice it might be somebody else's by then."""
    handle = memory_file()
    os.write(handle, b"[]")
    with pytest.raises(ValueError, match="mmap"):
        opened_image(handle, 2)
    gc.collect()
    os.close(handle)


def test_another_folder_of_the_same_name_has_another_agent(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    before = agent_address(root)
    assert before.parent.stat().st_mode & 0o077 == 0
    assert agent_address(root, "other machine") != before
    root.rename(tmp_path / "moved")
    assert agent_address(tmp_path / "moved") == before
    root.mkdir()
    assert agent_address(root) != before


def test_a_place_that_others_may_use_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"weft-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"weft-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="is not a folder of this user alone"):
        start_agent(tmp_path / "log", tmp_path)
    with MemoryOfMachine(tmp_path) as memory:
        assert memory.offers == ()


def test_each_crew_leaves_one_state_at_most() -> None:
    """A run that goes on after one step, again and again: what it last went on from stays, for a
    newer state may be whole on this machine alone."""
    image: Any = SimpleNamespace(pieces_bytes=2, handle=0)
    wire: Any = SimpleNamespace(send=lambda *_, **__: None)
    kept = Memory()

    def add(crew: str, step: int) -> None:
        save = replace(named(Path("checkpoints"), step), name=f"save{step}", is_written=False)
        kept.begins(crew, None)
        kept.add(Kept(save, crew, 1, STATE, {0: KeptCopy(image, 0)}))

    def has() -> list[int]:
        return [offer["step"] for offer in kept.offers()]

    add("first", 1)
    for crew, step in [("second", 2), ("third", 3)]:
        kept.hand_over(f"save{step - 1}", wire)
        add(crew, step)
        assert has() == [step - 1, step]
    kept.hand_over("save2", wire)  # other machines have nothing of 3
    add("fourth", 4)
    assert has() == [2, 4]
    add("fourth", 5)
    assert has() == [4, 5]
    add("fifth", 1)  # begun anew
    assert has() == [5, 1]
