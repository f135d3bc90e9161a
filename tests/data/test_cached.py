"""The cache: no byte of it is used that is not what was written, and nothing in it is trusted."""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data_cases import folder_of_texts, prepared, stream
from hypothesis import given
from hypothesis import strategies as st
from test_loader import loader

from weft.config.errors import ConfigError, RunError
from weft.data import cache
from weft.data.loader import LoaderError
from weft.data.pieces import PIECE_BYTES, PieceSums, TokenFileError
from weft.data.prepare import Prepared
from weft.data.tokens import TokenWriter


def long_text(root: Path) -> Prepared:
    """Training tokens of four pieces and a bit, two bytes each."""
    (root / "x.txt").write_text("".join(f"line {i} of it\n" for i in range(40_000)))
    return prepared(root / "x.txt", root / "cache", held_out=0)


def train_file(data: Prepared) -> Path:
    ((name, _),) = data.train.stores[0].shards
    return data.folder / f"{name}.bin"


def overwrite(path: Path, byte: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        file.write(data)


def test_tokens_that_changed_are_never_given_out(tmp_path: Path) -> None:
    data = long_text(tmp_path)
    path, whole = train_file(data), stream(data, "train")
    assert path.stat().st_size > 4 * PIECE_BYTES
    byte = PIECE_BYTES + 4000
    overwrite(path, byte, b"\x07")  # another token of the vocabulary
    changed = byte // 2 // 16
    opened, half = data.train.open(), PIECE_BYTES // 2
    order = data.train.order
    assert order is not None
    samples = order.locate(np.arange(data.train.num_samples))[1].tolist()
    of = {sample: position for position, sample in enumerate(samples)}
    assert opened.batch([of[0], of[changed * 4]]).tokens.shape == (2, 16)
    with pytest.raises(RunError) as caught:
        opened.batch([of[0], of[changed]])
    assert str(caught.value) == (
        f"{path}: bytes {PIECE_BYTES} to {2 * PIECE_BYTES - 1} are not those that were written "
        f"(checksum differs). Delete the folder {data.folder}: the next run makes it again."
    )
    store = data.train.stores[0].open()
    assert store.read(0, half).tolist() == whole[:half].tolist()
    for low, high in ((0, half + 1), (half - 1, half + 1), (0, store.num_tokens)):
        with pytest.raises(TokenFileError):
            store.read(low, high)
    with pytest.raises(TokenFileError):
        data.train_stream(10**9)


def test_the_last_piece_and_the_last_byte_count(tmp_path: Path) -> None:
    data = long_text(tmp_path)
    path = train_file(data)
    overwrite(path, path.stat().st_size - 1, b"\x02")
    store = data.train.stores[0].open()
    store.read(0, store.num_tokens - PIECE_BYTES)
    with pytest.raises(TokenFileError, match="are not those that were written"):
        store.read(store.num_tokens - 1, store.num_tokens)


def test_a_folder_that_is_deleted_is_made_again_and_is_the_same(tmp_path: Path) -> None:
    data = long_text(tmp_path)
    overwrite(train_file(data), 0, b"\xff\xff")
    with pytest.raises(TokenFileError, match=f"Delete the folder {data.folder}:"):
        stream(data, "train")
    for path in data.folder.iterdir():
        path.unlink()
    data.folder.rmdir()
    again = long_text(tmp_path)
    assert again.fingerprint == data.fingerprint
    assert stream(again, "train").size


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_says_it_without_a_traceback(tmp_path: Path, workers: int) -> None:
    data = long_text(tmp_path)
    overwrite(train_file(data), 0, b"\xff" * 100)
    batches = loader(data.train, workers=workers, last_step=None)
    with batches, pytest.raises(RunError) as caught:
        list(islice(batches, data.train.num_samples // 12))
    assert f"Delete the folder {data.folder}: the next run makes it again." in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert isinstance(caught.value, LoaderError) == bool(workers)


def test_a_piece_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = long_text(tmp_path)
    compared: list[int] = []

    def crc32(piece: bytes, start: int = 0) -> int:
        compared.append(len(piece))
        return zlib.crc32(piece, start)

    monkeypatch.setattr("weft.data.pieces.zlib", SimpleNamespace(crc32=crc32))
    opened = data.train.open()
    positions = range(data.train.num_samples)
    opened.batch(positions)
    pieces = -(-train_file(data).stat().st_size // PIECE_BYTES)
    assert len(compared) == pieces
    opened.batch(positions)
    assert len(compared) == pieces


def test_what_is_written_to_a_file_that_is_read_is_never_given_out(tmp_path: Path) -> None:
    """A piece that was compared is compared again; what is gone would end the process."""
    data = long_text(tmp_path)
    path, store = train_file(data), data.train.stores[0].open()
    whole = store.read(0, store.num_tokens)
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))
    assert np.array_equal(store.read(0, store.num_tokens), whole), "it was touched alone"
    overwrite(path, 4000, b"\x07")
    os.utime(path, ns=(2 * later, 2 * later))
    with pytest.raises(TokenFileError, match="are not those that were written"):
        store.read(1990, 2010)
    os.truncate(path, PIECE_BYTES)
    with pytest.raises(TokenFileError, match=f"cut short while it was read, to {PIECE_BYTES} of"):
        store.read(store.num_tokens - 10, store.num_tokens)


def test_a_file_in_the_place_of_one_that_is_read_is_another(tmp_path: Path) -> None:
    data = long_text(tmp_path)
    path, store = train_file(data), data.train.stores[0].open()
    (tmp_path / "other").write_bytes(b"short")
    (tmp_path / "other").replace(path)
    assert store.read(0, store.num_tokens).size == store.num_tokens
    path.unlink()
    assert store.read(0, 10).size == 10


@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 2), max_size=6))
def test_checksums_do_not_depend_on_how_bytes_come(sizes: list[int]) -> None:
    data = bytes(range(256)) * (sum(sizes) // 256 + 1)
    sums, at = PieceSums(), 0
    for size in sizes:
        sums.add(data[at : at + size])
        at += size
    pieces = [data[low : min(low + PIECE_BYTES, at)] for low in range(0, at, PIECE_BYTES)]
    assert sums.text() == "".join(f"{zlib.crc32(piece):08x}" for piece in pieces)


def test_a_token_of_a_given_file_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    root = tmp_path / "given"
    root.mkdir()
    for name, wrong in (("a", 65), ("b", 300)):
        with TokenWriter(root / name, np.int32) as writer:
            for number in range(50):
                writer.add([65] * 9 + [wrong if number == 30 else 66])
                writer.end_document()
    with pytest.raises(ConfigError) as caught:
        prepared(root, tmp_path / "cache")
    assert str(caught.value) == (
        f"data.path = '{root}': expected tokens of data.tokenizer, 0 to 256. {root}/b.bin, byte "
        f"{4 * 309}, has 300. Name the tokenizer.json that made them."
    )


def test_every_file_is_on_the_disk_before_what_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of_texts(tmp_path / "text", 30)
    synced: list[str] = []
    sizes: dict[str, int] = {}

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append(path.name if path.is_file() else "/")
        sizes[path.name] = path.stat().st_size

    monkeypatch.setattr("weft.data.cache.os.fsync", fsync)
    data = prepared(tmp_path / "text", tmp_path / "cache")
    files = {path.name: path.stat().st_size for path in data.folder.iterdir()}
    last = synced.index("prepared.json")
    assert set(synced[:last]) | {"prepared.json"} == set(files)
    assert synced[last + 1 :] == ["/", "/"], "the folder's names, then its own"
    assert {name: size for name, size in sizes.items() if name in files} == files


def signed(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change what prepared.json says, and make its own checksum right again."""

    def damage(folder: Path) -> None:
        path = folder / "prepared.json"
        data = json.loads(path.read_text())
        data.pop("digest")
        change(data)
        path.write_text(json.dumps({**data, "digest": cache._digest(data)}))

    return damage


def written(text: str | bytes) -> Callable[[Path], None]:
    """Another prepared.json."""
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / "prepared.json").write_bytes(data) and None


def edited(old: str, new: str) -> Callable[[Path], None]:
    """A change of one file that its checksum does not know of."""

    def damage(folder: Path) -> None:
        path = folder / "prepared.json"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return damage


def other_end_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("end", "and"))


def other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"a": 97', '"a": 98'))


def a_folder(folder: Path) -> None:
    (folder / "prepared.json").unlink()
    (folder / "prepared.json").mkdir()


DAMAGE = {
    "a list": written("[]"),
    "a number": written("2"),
    "a list of it": written('[{"format": 2}]'),
    "nothing": written(""),
    "bytes": written(b"\xff\xfe\0"),
    "deep": written("[" * 100_000),
    "only the format": written('{"format": 2}'),
    "a folder": a_folder,
    "a key less": signed(lambda data: data.pop("stamp")),
    "a key less in a shard": signed(lambda data: data["shards"][0].pop("crc32")),
    "shards that are text": signed(lambda data: data.update(shards="none")),
    "a shard that is a list": signed(lambda data: data.update(shards=[[]])),
    "a number that is text": signed(lambda data: data.update(end_id="256")),
    "a number that is true": signed(lambda data: data.update(end_id=True)),
    "no such type": signed(lambda data: data.update(type_code=6)),
    "a negative count": signed(lambda data: data["shards"][0].update(tokens=-1)),
    "another end": edited('"end_id": 256', '"end_id": 255'),
    "the file that names the end": other_end_token,
    "the tokenizer": other_tokenizer,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_what_was_written_is_made_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder_of_texts(tmp_path / "text", 30)
    first = prepared(tmp_path / "text", tmp_path / "cache")
    damage(first.folder)
    second = prepared(tmp_path / "text", tmp_path / "cache")
    assert second.notes == ("data: what the cache held was damaged, so it was tokenized again",)
    assert (second.fingerprint, second.end_id) == (first.fingerprint, 256)
    assert second.tokenizer_file.read_bytes() == first.tokenizer_file.read_bytes()


def test_a_cache_that_may_not_be_read_is_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of_texts(tmp_path / "text", 30)
    first = prepared(tmp_path / "text", tmp_path / "cache")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("weft.data.cache.Path.read_bytes", refuse)
    with pytest.raises(RunError) as caught:
        cache.read_meta(first.folder)
    assert str(caught.value) == f"{first.folder}/prepared.json cannot be read: Permission denied."


def test_the_fingerprint_does_not_change_with_the_format(tmp_path: Path) -> None:
    """Or no checkpoint of an older Weft would go on."""
    folder_of_texts(tmp_path / "text", 30)
    data = prepared(tmp_path / "text", tmp_path / "cache")
    meta = cache.read_meta(data.folder)
    assert meta is not None
    assert (
        replace(meta, format=meta.format + 1).fingerprint
        == data.fingerprint
        == "08970d23151d0a4bab81386cb79353a8"
    )
