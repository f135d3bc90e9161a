"""Token files against the published format, built by hand, and against damage."""

import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.data.pieces import TokenFileError
from weft.data.tokens import (
    TOKEN_TYPES,
    TokenStore,
    TokenWriter,
    map_tokens,
    read_index,
    token_type,
)

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def by_hand(documents: list[list[int]], code: int, letter: str) -> tuple[bytes, bytes]:
    """(.bin, .idx) with the standard library alone, field by field."""
    flat = [token for document in documents for token in document]
    width = struct.calcsize(letter)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(documents)) + struct.pack("<Q", len(documents) + 1)
    at = 0
    pointers = []
    for document in documents:
        pointers.append(at * width)
        at += len(document)
    index += b"".join(struct.pack("<i", len(document)) for document in documents)
    index += b"".join(struct.pack("<q", pointer) for pointer in pointers)
    index += b"".join(struct.pack("<q", number) for number in range(len(documents) + 1))
    return b"".join(struct.pack(f"<{letter}", token) for token in flat), index


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_reads_what_was_built_by_hand(tmp_path: Path, code: int, letter: str) -> None:
    data, index = by_hand(DOCUMENTS, code, letter)
    (tmp_path / "a.b.bin").write_bytes(data)
    (tmp_path / "a.b.idx").write_bytes(index)
    found = read_index(tmp_path / "a.b")
    assert found.dtype is TOKEN_TYPES[code]
    assert found.document_offsets().tolist() == [0, 3, 4, 8]
    store = TokenStore([map_tokens(tmp_path / "a.b", found.num_tokens, found.dtype)])
    assert store.read(0, store.num_tokens).tolist() == [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("vocab_size", "code", "letter"), [(257, 8, "H"), (65536, 8, "H"), (65537, 4, "i")]
)
def test_writes_what_is_built_by_hand(
    tmp_path: Path, vocab_size: int, code: int, letter: str
) -> None:
    with TokenWriter(tmp_path / "x", token_type(vocab_size)) as writer:
        for document in DOCUMENTS:
            writer.add(document[:2])
            writer.add(document[2:])
            writer.end_document()
    data, index = by_hand(DOCUMENTS, code, letter)
    assert (tmp_path / "x.bin").read_bytes() == data
    assert (tmp_path / "x.idx").read_bytes() == index
    assert (writer.num_tokens, writer.num_documents) == (8, 3)


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Megatron can split a document into sentences: its document index then skips."""
    data, index = by_hand(DOCUMENTS, 8, "H")
    index = index[:-32] + struct.pack("<3q", 0, 2, 3)
    index = index[:26] + struct.pack("<Q", 3) + index[34:]
    (tmp_path / "x.bin").write_bytes(data)
    (tmp_path / "x.idx").write_bytes(index)
    assert read_index(tmp_path / "x").document_offsets().tolist() == [0, 4, 8]


def test_a_token_that_does_not_fit_is_our_mistake(tmp_path: Path) -> None:
    with (
        TokenWriter(tmp_path / "x", np.uint16) as writer,
        pytest.raises(AssertionError, match="65536"),
    ):
        writer.add([65536])


GOOD_DATA, GOOD_INDEX = by_hand(DOCUMENTS, 8, "H")
DAMAGE = [
    ("empty", GOOD_DATA, b"", "x.idx: 0 bytes, too short for an index header"),
    ("header", GOOD_DATA, GOOD_INDEX[:20], "x.idx: 20 bytes, too short for an index header"),
    ("cut", GOOD_DATA, GOOD_INDEX[:-1], "x.idx: 101 bytes, but 3 sequences need 102: cut short"),
    ("magic", GOOD_DATA, b"X" + GOOD_INDEX[1:], "not an index"),
    ("version", GOOD_DATA, GOOD_INDEX[:9] + b"\2" + GOOD_INDEX[10:], "version 2: not an index"),
    ("float", GOOD_DATA, GOOD_INDEX[:17] + b"\6" + GOOD_INDEX[18:], "token type 6 is not one of"),
    ("sizes", GOOD_DATA, GOOD_INDEX[:34] + b"\4" + GOOD_INDEX[35:], "do not follow each other"),
    ("negative", GOOD_DATA, GOOD_INDEX[:37] + b"\xff" + GOOD_INDEX[38:], "a sequence of -"),
    ("documents", GOOD_DATA, GOOD_INDEX[:-8] + b"\2" + GOOD_INDEX[-7:], "the document index"),
    ("count", GOOD_DATA, GOOD_INDEX[:25] + b"\x7f" + GOOD_INDEX[26:], "cut short"),
    ("data cut", GOOD_DATA[:-1], GOOD_INDEX, "x.bin: 15 bytes, but its index says 16"),
    ("data more", GOOD_DATA + b"\0", GOOD_INDEX, "x.bin: 17 bytes, but its index says 16"),
    ("no data", None, GOOD_INDEX, "x.bin: no such file"),
    ("no index", GOOD_DATA, None, "x.idx: no such file"),
]


@pytest.mark.parametrize(
    ("data", "index", "message"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_damage_is_named(
    tmp_path: Path, data: bytes | None, index: bytes | None, message: str
) -> None:
    for name, content in (("x.bin", data), ("x.idx", index)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenFileError) as caught:
        read_index(tmp_path / "x")
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    """Any file is an index or an error in words."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.bin").write_bytes(b"")
        (Path(folder) / "x.idx").write_bytes(GOOD_INDEX[: len(data) % 40] + data)
        with suppress(TokenFileError):
            assert read_index(Path(folder) / "x").num_tokens == 0


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 12),
    st.lists(st.integers(0, 10**6), max_size=20),
)
def test_windows_are_slices_of_the_whole(sizes: list[int], length: int, picks: list[int]) -> None:
    total = sum(sizes)
    length = min(length, total)
    stream = np.arange(1000, 1000 + total, dtype=np.uint16)
    shards = np.split(stream, np.cumsum(sizes)[:-1])
    store = TokenStore([shards[0], np.zeros(0, np.uint16), *shards[1:]])
    starts = np.array([pick % (total - length + 1) for pick in picks], dtype=np.int64)
    found = store.windows(starts, length)
    assert found.dtype == np.int32 and found.shape == (len(picks), length)
    for row, start in zip(found, starts, strict=True):
        assert row.tolist() == stream[start : start + length].tolist()
        assert store.read(start, start + length).tolist() == row.tolist()


def test_windows_beyond_the_end_are_our_mistake() -> None:
    store = TokenStore([np.arange(10, dtype=np.uint16)])
    with pytest.raises(AssertionError, match="of 10"):
        store.windows(np.array([6]), 5)


def test_mapped_tokens_are_read_only(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(GOOD_DATA)
    tokens = map_tokens(tmp_path / "x", 8, np.uint16)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
