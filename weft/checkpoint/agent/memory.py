"""What agents keep in memory, read as a checkpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from weft.checkpoint.agent.image import Image, opened_image
from weft.checkpoint.agent.lease import agent_address
from weft.checkpoint.agent.wire import Ask, Copy, Fetch, Message, Offers, State, Wire
from weft.checkpoint.entry import (
    JSON,
    CheckpointError,
    Piece,
    RankFile,
    StoredBox,
    StoredTensor,
    rank_file_name,
)
from weft.checkpoint.index import merge
from weft.checkpoint.rank_file_reader import RankFileReader
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.store import step_name

ANSWER_S = 10.0
"""How long an agent may take for each answer."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One save that an agent has in memory."""

    step: int
    name: str
    world_size: int
    ranks: Sequence[int]
    """Those whose state it has, of ``world_size``."""


class MemoryOfMachine:
    """What the agent of this machine has; nothing where there is none, or where it does not answer.
    A context manager."""

    def __init__(self, root: Path, node: str = "", *, answer_s: float = ANSWER_S) -> None:
        self._wire: Wire | None = None
        self.offers: Sequence[Offer] = ()
        self.latest = ""
        """The checkpoint that it made last; empty: it made none, as far as is known."""
        self.num_bytes = 0
        """Of all that it has in memory."""
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(answer_s)
        try:
            end.connect(str(agent_address(root, node)))
        except OSError:
            end.close()
            return
        self._wire = Wire(end)
        self._wire.send(Ask())
        for answer in self._read(1):
            assert isinstance(answer, Offers), f"the agent said {answer}"
            self.latest, self.num_bytes = answer.latest, answer.num_bytes
            self.offers = [Offer(**each) for each in answer.offers]

    def __enter__(self) -> MemoryOfMachine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, traceback: TracebackType | None
    ) -> None:
        if self._wire is not None:
            self._wire.close()

    def open(self, offer: Offer) -> Checkpoint:
        """The state of all ranks that an offer names. Raises CheckpointError as ``images``."""
        state, images = self.images(offer)
        pieces = {rank: image.pieces for rank, image in images.items()}
        return in_memory(offer, state, pieces, images.__getitem__)

    def images(self, offer: Offer) -> tuple[Mapping[str, JSON], dict[int, Image]]:
        """What a checkpoint would say besides tensors, and the copies that are here, by rank.

        Raises CheckpointError: it is gone, or is not what was copied.
        """
        assert self._wire is not None, "an offer of nobody"
        what = _folder(offer)
        self._wire.send(Fetch(name=offer.name))
        answers = self._read(1)
        state, copies = None, answers[1:]
        if answers:
            assert isinstance(answers[0], State), f"the agent said {answers[0]}"
            state = answers[0].state
            copies += self._read(answers[0].num_copies - len(copies))
        if state is None or len(copies) < len(offer.ranks):
            raise CheckpointError("is gone", file=what)
        images = {}
        for copy in copies:
            assert isinstance(copy, Copy), f"the agent said {copy}"
            image = opened_image(self._wire.take_file(), copy.pieces_bytes)
            if image.guard(offer.name) != copy.guard:
                file = what / rank_file_name(copy.rank)
                raise CheckpointError("is not what was copied (guard differs)", file=file)
            images[copy.rank] = image
        return state, images

    def _read(self, count: int) -> list[Message]:
        """So many messages, or more; fewer where the agent is gone."""
        found: list[Message] = []
        assert self._wire is not None, "answers of nobody"
        with suppress(TimeoutError):
            while len(found) < count and self._wire.is_open:
                found += self._wire.read()
        return found


def in_memory(
    offer: Offer,
    state: Mapping[str, JSON],
    pieces: Mapping[int, Sequence[Piece]],
    image_of: Callable[[int], Image],
) -> Checkpoint:
    """A checkpoint of what ranks have copied.

    Args:
        pieces: By rank.
        image_of: The copy of a rank; asked for once of each that is read.
    """
    what = _folder(offer)
    ranks = {rank_file_name(rank): rank for rank in pieces}

    def opened(facts: RankFile) -> RankFileReader:
        return RankFileReader(what / facts.file, os.dup(image_of(ranks[facts.file]).handle))

    files = [
        RankFile(file, 0, "", tuple(_stored(piece, file) for piece in pieces[rank]))
        for file, rank in ranks.items()
    ]
    return Checkpoint(what, merge(offer.step, files, state, 0.0), opened=opened)


def _folder(offer: Offer) -> Path:
    """As what a save in memory is named."""
    return Path(f"memory/{step_name(offer.step)}")


def _stored(piece: Piece, file: str) -> StoredTensor:
    """Without checksums: nobody has read it since it was copied."""
    boxes = (StoredBox(file, piece.box.offset, piece.box.size, ()),)
    return StoredTensor(piece.kind, piece.name, piece.shape, piece.dtype, boxes)
