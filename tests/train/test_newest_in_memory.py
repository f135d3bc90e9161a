"""Whether a run goes on from memory, by what its machines and its storage say."""

from pathlib import Path
from types import TracebackType

import pytest

from weft.checkpoint.agent.image import Image, new_image
from weft.checkpoint.agent.lease import Lease, agent_address
from weft.checkpoint.agent.memory import Offer
from weft.checkpoint.entry import CheckpointError
from weft.comm.comm import Comm
from weft.train import from_memory
from weft.train.from_memory import new_start, newest_in_memory, node_of

WRITTEN, COPIED = 3, 5


class OneMemory:
    """Of a machine that has the state after step ``COPIED`` and wrote the one of ``WRITTEN``."""

    offers = (Offer(COPIED, "save", 1, [0]),)
    latest = f"step-{WRITTEN:08d}"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "OneMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, traceback: TracebackType | None
    ) -> None:
        pass

    def images(self, _: Offer) -> tuple[dict[str, int], dict[int, Image]]:
        return {"step": COPIED}, {0: new_image([])}


def test_what_was_left_behind_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was lost is back, and has the state of a later step of before."""
    old, new = new_start(), new_start()
    offers = [Offer(7, f"{old}b", 1, [0]), Offer(4, f"{new}c", 1, [0]), Offer(5, f"{new}a", 1, [0])]
    monkeypatch.setattr(OneMemory, "offers", offers)
    monkeypatch.setattr(from_memory, "read_latest", lambda _: OneMemory.latest)
    monkeypatch.setattr(from_memory, "MemoryOfMachine", OneMemory)
    _, why = newest_in_memory(tmp_path, tmp_path, Comm(), before=9, lease=Lease())
    assert why[0].startswith("the state after step 5 was in memory")


FOUND = f"the state after step {COPIED} was in memory"


@pytest.mark.parametrize(
    ("latest", "said"),
    [
        (WRITTEN, f"{FOUND}; the newest checkpoint on disk is of step {WRITTEN}"),
        (None, f"{FOUND}; {{root}} does not answer"),
        (WRITTEN - 1, "{root}/latest was changed since: what is in memory is left"),
        (COPIED + 1, None),
    ],
    ids=["older", "no answer", "set back", "newer"],
)
def test_what_storage_says_decides(
    latest: int | None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_latest(root: Path) -> str:
        if latest is None:
            raise CheckpointError("cannot be read: Connection refused", file=root / "latest")
        return f"step-{latest:08d}"

    lease = Lease()
    held: list[Path] = []
    monkeypatch.setattr(lease, "take", held.append)
    monkeypatch.setattr(from_memory, "MemoryOfMachine", OneMemory)
    monkeypatch.setattr(from_memory, "read_latest", read_latest)
    checkpoint, why = newest_in_memory(tmp_path, tmp_path, Comm(), before=COPIED + 1, lease=lease)
    assert list(why) == ([] if said is None else [said.format(root=tmp_path)])
    assert (checkpoint is not None) == (FOUND in (said or ""))
    agent = agent_address(tmp_path, node_of(Comm()))
    assert held == ([] if checkpoint is None else [agent]), "it stays until there is a newer copy"
