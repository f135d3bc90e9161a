"""Whatever happened to the files: a typed refusal that names the place, never other elements."""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_cases import edit_index, save, save_shards, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.checkpoint.entry import CHUNK_BYTES, CheckpointError
from weft.checkpoint.index import from_text
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard
from weft.checkpoint.verify import verify
from weft.plan.box import Box

RANK0, RANK1, INDEX = "rank-00000.safetensors", "rank-00001.safetensors", "index.json"


def read_all(folder: Path) -> None:
    """Open and read everything, and compare it with what was saved."""
    checkpoint = open_checkpoint(folder)
    for (kind, name), whole in values(1).items():
        assert torch.equal(checkpoint.read(name, kind), whole)


def truncate(folder: Path) -> None:
    os.truncate(folder / RANK1, (folder / RANK1).stat().st_size - 5)


def lengthen(folder: Path) -> None:
    with (folder / RANK1).open("ab") as file:
        file.write(b"12345")


def flip(folder: Path, file: str, at: int, bit: int = 0) -> None:
    data = bytearray((folder / file).read_bytes())
    data[at] ^= 1 << bit
    (folder / file).write_bytes(data)


def swap(folder: Path) -> None:
    (folder / RANK0).rename(folder / "x")
    (folder / RANK1).rename(folder / RANK0)
    (folder / "x").rename(folder / RANK1)


def take_from_another_step(folder: Path) -> None:
    other = save(folder.parent / "other", 1, seed=2)
    shutil.copy(other / RANK0, folder / RANK0)


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside"
    (folder / RANK0).rename(outside)
    (folder / RANK0).symlink_to(outside)


def link_to_itself(folder: Path) -> None:
    (folder / RANK0).unlink()
    (folder / RANK0).symlink_to(RANK0)


def link_index_out(folder: Path) -> None:
    (folder / INDEX).rename(folder.parent / INDEX)
    (folder / INDEX).symlink_to(folder.parent / INDEX)


def pipe(folder: Path) -> None:
    (folder / RANK0).unlink()
    os.mkfifo(folder / RANK0)


def folder_for_file(folder: Path) -> None:
    (folder / RANK0).unlink()
    (folder / RANK0).mkdir()


def index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: edit_index(folder, change)


def rename_file(name: str) -> Callable[[Path], None]:
    """The index says another name for rank 0's file, everywhere."""

    def change(folder: Path) -> None:
        path = folder / INDEX
        path.write_text(path.read_text().replace(RANK0, name))
        edit_index(folder, lambda data: None)

    return change


def box(data: dict, tensor: int = 0, number: int = 0) -> dict:
    found: dict = data["tensors"][tensor]["boxes"][number]
    return found


def claim(data: dict) -> None:
    """A tensor of 4 TB in a small file."""
    data["tensors"][0]["shape"] = [10**6, 10**6]
    data["tensors"][0]["boxes"] = [{**box(data), "offset": [0, 0], "size": [10**6, 10**6]}]


def set_box(**fields: object) -> Callable[[Path], None]:
    return index(lambda data: box(data).update(fields))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, f"{RANK1}: has 587 bytes, 592 were written"),
    "lengthened": (lengthen, f"{RANK1}: has 597 bytes, 592 were written"),
    "missing": (lambda f: (f / RANK0).unlink(), f"{RANK0}: is missing"),
    "a folder": (folder_for_file, f"{RANK0}: is not a file"),
    "a pipe": (pipe, f"{RANK0}: is not a file"),
    "swapped": (swap, f"{RANK0}: param/embed.weight[0:6,0:4]: is not in the file"),
    "from another step": (take_from_another_step, "the elements are not those that were written"),
    "element flipped": (lambda f: flip(f, RANK1, -1), "the elements are not those that were"),
    "header flipped": (lambda f: flip(f, RANK0, 9), f"{RANK0}: cannot be read: "),
    "header length": (lambda f: flip(f, RANK0, 7, 6), f"{RANK0}: cannot be read: "),
    "link out": (link_out, f"{RANK0}: leads out of the checkpoint's folder"),
    "link to itself": (link_to_itself, RANK0),
    "index links out": (link_index_out, f"{INDEX}: leads out of the checkpoint's folder"),
    "index missing": (lambda f: (f / INDEX).unlink(), f"{INDEX}: is missing"),
    "index cut": (lambda f: os.truncate(f / INDEX, 99), f"{INDEX}: not a readable index"),
    "index empty": (lambda f: os.truncate(f / INDEX, 0), f"{INDEX}: not a readable index"),
    "index binary": (lambda f: (f / INDEX).write_bytes(b"\xff\x00"), "not a readable index"),
    "index deep": (lambda f: (f / INDEX).write_text("[" * 10**6), "not a readable index"),
    "index a list": (
        lambda f: (f / INDEX).write_text("[1]"),
        "schema = None: Input should be a valid integer",
    ),
    "not finite": (lambda f: (f / INDEX).write_text('{"schema": NaN}'), "NaN is not JSON"),
    "edited": (
        lambda f: (f / INDEX).write_text((f / INDEX).read_text().replace('"step": 1', '"step": 2')),
        f"{INDEX}: it is not what was written (sha256)",
    ),
    "schema 3": (
        index(lambda d: d.update(schema=3)),
        f"{INDEX}: schema 3, and this Weft reads schemas 1 to 2",
    ),
    "checksums lost": (set_box(crc32=[]), "0 checksums"),
    "checksum of another": (set_box(crc32=[0]), "the elements are not those that were written"),
    "a checksum too many": (set_box(crc32=[0, 0]), "2 checksums"),
    "schema true": (
        index(lambda d: d.update(schema=True)),
        "schema = True: Input should be a valid int",
    ),
    "other step": (index(lambda d: d.update(step=2)), f"{INDEX}: says step 2"),
    "no state": (
        index(lambda d: d.pop("state")),
        "state = None: Input should be a valid dictionary",
    ),
    "path up": (rename_file(f"../{RANK0}"), f"file = '../{RANK0}': String should match"),
    "path absolute": (
        rename_file("/etc/passwd"),
        "file = '/etc/passwd': String should match pattern '^rank-",
    ),
    "file unknown": (set_box(file="rank-00007.safetensors"), "is not among the files of the index"),
    "file twice": (index(lambda d: d["files"].append(d["files"][0])), "is listed twice"),
    "tensor twice": (index(lambda d: d["tensors"].append(d["tensors"][0])), "is listed twice"),
    "box lost": (
        index(lambda d: d["tensors"][0]["boxes"].pop()),
        "param/embed.weight: no file holds Box(offset=(0, 4), size=(6, 4))",
    ),
    "box twice": (
        set_box(size=[6, 5]),
        "param/embed.weight: Box(offset=(0, 4), size=(6, 1)) is stored more than once",
    ),
    "box outside": (set_box(size=[9, 4]), "is outside (6, 8)"),
    "box negative": (
        set_box(offset=[0, -1]),
        "tensors.0.boxes.0.offset.1 = -1: Input should be greater",
    ),
    "box of another rank": (set_box(offset=[0], size=[4]), "is outside (6, 8)"),
    "box of unequal lengths": (set_box(offset=[0]), "expected equal lengths"),
    "shape": (index(lambda d: d["tensors"][0].update(shape=[8, 6])), "is outside (8, 6)"),
    "dtype": (
        index(lambda d: d["tensors"][0].update(dtype="F16")),
        "the file holds F32 (6, 4), the index says F16 (6, 4)",
    ),
    "dtype unknown": (
        index(lambda d: d["tensors"][0].update(dtype="F31")),
        "dtype = 'F31': String should match pattern '^(F64|F32|",
    ),
    "huge claim": (index(claim), f"{RANK0}: 592 bytes cannot hold 4000000000128"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_and_told(damage: str, tmp_path: Path) -> None:
    """Reading raises and ``verify`` lists it, both with the same words or the checksum's."""
    folder = save(tmp_path, 1, seed=1)
    hurt, words = DAMAGES[damage]
    hurt(folder)
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert words in str(caught.value)
    result = verify(folder)
    assert not result.ok
    assert any(words in problem or "sha256" in problem for problem in result.problems)


def test_an_untouched_checkpoint_verifies(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, seed=1)
    read_all(folder)
    result = verify(folder)
    assert (result.ok, result.files, result.bytes, result.problems) == (True, 2, 1184, [])


@pytest.mark.parametrize("element", range(4))
def test_an_element_that_changed_is_refused_with_any_part_of_its_box(
    element: int, tmp_path: Path
) -> None:
    """As another plan reads it."""
    folder = save(tmp_path, 1, seed=1)
    flip(folder, RANK1, -1 - 4 * element)
    for half in (Box((4,), (2,)), Box((6,), (2,))):
        with pytest.raises(CheckpointError, match="the elements are not those that were written"):
            open_checkpoint(folder).read("norm.weight", box=half)


def big() -> Tensor:
    """Two chunks and a half, in 10 rows of a quarter of a chunk."""
    return torch.arange(10 * CHUNK_BYTES // 16, dtype=torch.float32).reshape(10, -1)


@pytest.mark.parametrize("row", [0, 3, 4, 9])
def test_a_chunk_that_changed_is_refused_and_the_others_are_read(row: int, tmp_path: Path) -> None:
    whole = big()
    shard = Shard("w", "param", tuple(whole.shape), Box.whole(tuple(whole.shape)), whole)
    folder = save_shards(tmp_path, 1, [[shard]])
    size = (folder / RANK0).stat().st_size
    flip(folder, RANK0, size - whole.nbytes + row * CHUNK_BYTES // 4 + 5)
    checkpoint = open_checkpoint(folder)
    for other in range(10):
        box = Box((other, 0), (1, whole.shape[1]))
        if other // 4 == row // 4:
            with pytest.raises(CheckpointError, match="the elements are not those"):
                checkpoint.read("w", box=box)
        else:
            assert torch.equal(checkpoint.read("w", box=box), whole[other : other + 1])
    with pytest.raises(CheckpointError, match="the elements are not those"):
        checkpoint.read("w", box=Box((0, 0), (10, 1)))


@pytest.mark.parametrize("half", [Box((0, 0), (5, 8)), Box((0, 2), (10, 3)), Box((9, 7), (1, 1))])
def test_a_checkpoint_with_one_checksum_a_box_is_read(half: Box, tmp_path: Path) -> None:
    """As schema 1 wrote them."""
    whole = big()
    shard = Shard("w", "param", tuple(whole.shape), Box.whole(tuple(whole.shape)), whole)
    folder = save_shards(tmp_path, 1, [[shard]])

    def to_schema_1(data: dict) -> None:
        data["schema"] = 1
        box(data)["crc32"] = zlib.crc32(whole.numpy().tobytes())

    edit_index(folder, to_schema_1)
    assert torch.equal(open_checkpoint(folder).read("w", box=half), whole[half.slices()])
    flip(folder, RANK0, -1)
    with pytest.raises(CheckpointError, match="the elements are not those"):
        open_checkpoint(folder).read("w", box=half)


def test_verify_reports_what_nobody_listed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, seed=1)
    shutil.copy(folder / RANK0, folder / "rank-00002.safetensors")
    assert verify(folder).problems == [f"{folder}/rank-00002.safetensors: is not in the index"]
    (folder / "rank-00002.safetensors").unlink()
    edit_index(folder, lambda data: data["tensors"].pop())
    problems = verify(folder).problems
    assert f"{folder / RANK0}: exp_avg/norm.weight[0:4]: is not in the index" in problems


def test_verify_counts_every_checkpoint_of_a_root(tmp_path: Path) -> None:
    """One is damaged: the others count, and the words say which."""
    for step in (1, 2, 3):
        save(tmp_path, step, seed=1)
    flip(tmp_path / "step-00000002", RANK0, -1)
    result = verify(tmp_path)
    assert (result.ok, result.files, len(result.problems)) == (False, 5, 1)
    assert "step-00000002/rank-00000.safetensors" in result.problems[0]


def test_verify_of_nothing(tmp_path: Path) -> None:
    assert verify(tmp_path).problems == [f"{tmp_path}: no checkpoint here"]
    assert verify(tmp_path / "no").problems == [f"{tmp_path / 'no'}: no such folder"]


def test_verify_tells_a_dangling_latest(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    (tmp_path / "latest").write_text("step-00000002\n")
    expected = f"{tmp_path}/latest: names no checkpoint that is here (step-00000002)"
    assert verify(tmp_path).problems == [expected]
    (tmp_path / "latest").unlink()
    assert verify(tmp_path).ok


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    file=st.sampled_from([RANK0, RANK1, INDEX]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_flipped_bit_is_found(
    file: str, place: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unless the index still says the same, as where JSON spells one number in two ways."""
    folder = save(tmp_path_factory.mktemp("flip"), 1, seed=1)
    before = (folder / INDEX).read_bytes()
    flip(folder, file, int(place * (folder / file).stat().st_size), bit)
    result = verify(folder)
    if result.ok:
        after = (folder / INDEX).read_bytes()
        assert file == INDEX and from_text(after, folder) == from_text(before, folder)
