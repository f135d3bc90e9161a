"""What is saved comes back, bit for bit, in whatever boxes it is asked for."""

import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_cases import KINDS, SHAPES, STATE, cut, save, save_shards, values
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from weft.checkpoint.entry import CheckpointError, RankFile
from weft.checkpoint.index import rank_file_from_json, rank_file_json
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import DTYPES, Shard, write_rank
from weft.checkpoint.verify import verify
from weft.plan.box import Box


def test_whole_tensors_and_state_come_back(tmp_path: Path) -> None:
    save(tmp_path, 3, seed=5)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.notes) == (3, ())
    assert checkpoint.state == {**STATE, "seed": 5}
    assert checkpoint.kinds == sorted(KINDS)
    for kind in KINDS:
        assert checkpoint.names(kind) == list(SHAPES)
    for (kind, name), whole in values(5).items():
        assert checkpoint.shape(name, kind) == SHAPES[name]
        assert torch.equal(checkpoint.read(name, kind), whole)


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(code: str, tmp_path: Path) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    if code == "BOOL":
        bits = bits % 2
    whole = bits.view(DTYPES[code]).reshape(2, -1)
    save_shards(tmp_path, 0, [[Shard("w", "param", whole.shape, Box.whole(whole.shape), whole)]])
    back = open_checkpoint(tmp_path).read("w")
    assert back.dtype == whole.dtype
    assert torch.equal(back.view(torch.uint8), whole.view(torch.uint8))


def test_read_converts_on_request(tmp_path: Path) -> None:
    whole = torch.tensor([1.0, 1 / 3, -2.5e-3], dtype=torch.float64)
    save_shards(tmp_path, 0, [[cut("param", "w", whole, Box.whole((3,)))]])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dtype("w") == torch.float64
    assert torch.equal(checkpoint.read("w", dtype=torch.bfloat16), whole.to(torch.bfloat16))
    assert torch.equal(checkpoint.read("w"), whole)


def test_scalars_and_empty_boxes(tmp_path: Path) -> None:
    """A scalar has one element and no dimension; a rank may hold none of a tensor's elements."""
    scalar, none = torch.tensor(0.5, dtype=torch.float64), torch.zeros(0, 4)
    whole = torch.arange(12.0).reshape(3, 4)
    one, other = Box((0, 0), (3, 4)), Box((3, 0), (0, 4))
    first = [cut("param", "s", scalar, Box((), ())), cut("param", "w", whole, one)]
    second = [cut("param", "w", whole, other), cut("param", "z", none, Box.whole((0, 4)))]
    save_shards(tmp_path, 0, [first, second, []])
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("s"), scalar)
    assert torch.equal(checkpoint.read("w"), whole)
    assert checkpoint.read("w", box=other).shape == (0, 4)
    assert checkpoint.read("z").shape == (0, 4)
    assert verify(tmp_path).ok


def test_tensors_that_are_not_contiguous_or_need_gradients(tmp_path: Path) -> None:
    whole = torch.arange(20.0).reshape(4, 5).t()
    parameter = torch.nn.Parameter(torch.ones(3))
    shards = [cut("param", "w", whole, Box.whole((5, 4)))]
    shards.append(Shard("p", "param", (3,), Box.whole((3,)), parameter))
    save_shards(tmp_path, 0, [shards])
    assert torch.equal(open_checkpoint(tmp_path).read("w"), whole)
    assert torch.equal(open_checkpoint(tmp_path).read("p"), torch.ones(3))


def test_reading_gives_a_tensor_of_its_own(tmp_path: Path) -> None:
    """Training in place on what was read must not change what is read next."""
    save(tmp_path, 1, seed=2)
    checkpoint = open_checkpoint(tmp_path)
    first = checkpoint.read("norm.weight", box=Box((0,), (4,)))
    first.zero_()
    assert torch.equal(checkpoint.read("norm.weight"), values(2)["param", "norm.weight"])


def test_more_than_one_chunk_and_the_library_reads_it(tmp_path: Path) -> None:
    """The file is plain safetensors: the library alone finds the same elements."""
    whole = torch.arange(3_000_001, dtype=torch.float32)  # 12 MB, an odd length
    narrow = torch.arange(7, dtype=torch.bfloat16)
    shards = [
        cut("param", "b", narrow, Box.whole((7,))),
        cut("param", "w", whole, Box.whole(whole.shape)),
    ]
    folder = save_shards(tmp_path, 0, [shards])
    stored = load_file(folder / "rank-00000.safetensors")
    assert torch.equal(stored["param/w[0:3000001]"], whole)
    assert torch.equal(stored["param/b[0:7]"], narrow)
    assert torch.equal(open_checkpoint(tmp_path).read("w"), whole)
    assert verify(tmp_path).ok


def test_facts_of_a_file_travel_as_json(tmp_path: Path) -> None:
    shards = [cut("param", "w", torch.ones(2, 3), Box.whole((2, 3)))]
    facts = write_rank(tmp_path, 12, shards)
    assert facts.file == "rank-00012.safetensors"
    assert facts.bytes == (tmp_path / facts.file).stat().st_size
    back = rank_file_from_json(json.loads(json.dumps(rank_file_json(facts))))
    assert isinstance(back, RankFile) and back == facts
    with pytest.raises(CheckpointError, match="not the facts of a rank's file: bytes = None"):
        rank_file_from_json({"file": facts.file})


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = save(tmp_path / "a", 1, seed=3), save(tmp_path / "b", 9, seed=3)
    for file in ("rank-00000.safetensors", "rank-00001.safetensors"):
        assert (one / file).read_bytes() == (two / file).read_bytes()


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]], list[Box]]:
    """A shape, its boxes on three ranks (uneven, some empty), and boxes to read."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        old = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, old.size[dim]))
        low, high = list(old.size), list(old.size)
        low[dim], high[dim] = at, old.size[dim] - at
        start = list(old.offset)
        start[dim] += at
        boxes += [Box(old.offset, tuple(low)), Box(tuple(start), tuple(high))]
    ranks: list[list[Box]] = [[], [], []]
    for box in sorted(set(boxes)):
        ranks[draw(st.integers(0, 2))].append(box)
    wanted = [Box.whole(shape)]
    for _ in range(3):
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
        wanted.append(Box(offset, size))
    return shape, ranks, wanted


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(cuttings())
def test_any_boxes_in_any_boxes_out(
    case: tuple[tuple[int, ...], list[list[Box]], list[Box]],
) -> None:
    """Saved over three ranks in uneven boxes, read in boxes that have nothing to do with them."""
    shape, ranks, wanted = case
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        save_shards(root, 1, [[cut("param", "w", whole, box) for box in boxes] for boxes in ranks])
        checkpoint = open_checkpoint(root)
        for box in wanted:
            assert torch.equal(checkpoint.read("w", box=box), whole[box.slices()])
        assert verify(root).ok


def test_reads_only_the_files_that_a_box_needs(tmp_path: Path) -> None:
    """Rank 1's file is gone after opening: what rank 0 wrote can still be read."""
    folder = save(tmp_path, 1, seed=2)
    checkpoint = open_checkpoint(tmp_path)
    (folder / "rank-00001.safetensors").unlink()
    left = checkpoint.read("embed.weight", box=Box((0, 0), (6, 4)))
    assert torch.equal(left, values(2)["param", "embed.weight"][:, :4])
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors: is missing$"):
        checkpoint.read("embed.weight")


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, seed=2)
    checkpoint = open_checkpoint(tmp_path)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="older checkpoints: give the command again"):
        checkpoint.read("embed.weight")
