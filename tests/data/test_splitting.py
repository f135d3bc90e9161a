"""What is held out: by hash, on every machine the same, never nothing and never all."""

import io
import random
from itertools import pairwise
from pathlib import Path

import pytest
from data_cases import config, documents, folder_of_texts, jsonl, megatron_pair, prepared, silent
from hypothesis import given
from hypothesis import strategies as st

from weft.config.errors import ConfigError
from weft.data.documents import (
    STREAM_BYTES,
    Part,
    Split,
    block_bytes,
    choose_limit,
    choose_split,
    parts,
    pieces,
    split_blocks,
)
from weft.data.hashing import identity_hash
from weft.data.prepare import prepare
from weft.data.sources import Request, open_source

IDENTITIES = st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=60)


@given(IDENTITIES, st.floats(0.001, 0.5), st.randoms(use_true_random=False))
def test_the_limit_leaves_neither_side_empty(
    identities: list[int], held_out: float, shuffle: random.Random
) -> None:
    limit = choose_limit(identities, held_out, enough=2)
    if len(set(identities)) == 1:
        assert limit is None
        return
    assert limit is not None
    assert min(identities) < limit <= max(identities)
    asked = int(held_out * 2.0**64)
    if min(identities) < asked <= max(identities):
        assert limit == asked
    shuffle.shuffle(identities)
    assert choose_limit(identities, held_out, enough=2) == limit


def test_the_limit_reads_no_further_than_it_must() -> None:
    endless = iter(int, 1)
    hashes = (identity_hash(i.to_bytes(8, "little")) for i, _ in enumerate(endless))
    assert choose_limit(hashes, 0.05, enough=20) == int(0.05 * 2**64)


def test_about_the_part_asked_for_is_held_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [f"document {i} {i * i}" for i in range(3000)])
    for held_out, expected in ((0.1, 300), (0.5, 1500)):
        data = prepared(path, tmp_path / "cache", held_out=held_out)
        assert abs(len(documents(data, "held_out")) - expected) < 5 * 27  # 5 deviations


def test_nothing_is_on_both_sides_and_nothing_is_lost(tmp_path: Path) -> None:
    texts = folder_of_texts(tmp_path / "text", 60)
    data = prepared(tmp_path / "text", tmp_path / "cache")
    train, held_out = documents(data, "train"), documents(data, "held_out")
    assert train and held_out
    assert sorted(train + held_out) == sorted(texts.values())
    in_order = [text for _, text in sorted(texts.items())]
    assert train == [text for text in in_order if text in set(train)]


def test_where_the_files_lie_does_not_matter(tmp_path: Path) -> None:
    held_out = []
    for place in ("here", "somewhere/else"):
        folder_of_texts(tmp_path / place, 40)
        held_out.append(documents(prepared(tmp_path / place, tmp_path / "cache"), "held_out"))
    assert held_out[0] == held_out[1]


def test_editing_a_file_does_not_move_it_and_adding_one_moves_no_other(tmp_path: Path) -> None:
    texts = folder_of_texts(tmp_path / "text", 40)
    before = set(documents(prepared(tmp_path / "text", tmp_path / "cache"), "held_out"))
    for name, text in texts.items():
        (tmp_path / "text" / name).write_text(text + "More.\n")
    (tmp_path / "text/new.txt").write_text("New.\n")
    after = set(documents(prepared(tmp_path / "text", tmp_path / "cache"), "held_out"))
    assert {text + "More.\n" for text in before} == after - {"New.\n"}


def test_the_order_of_rows_and_copies_do_not_matter(tmp_path: Path) -> None:
    rows = [f"row {i} of many words" for i in range(100)]
    first = prepared(jsonl(tmp_path / "a.jsonl", rows), tmp_path / "cache")
    shuffled = [*rows, *rows[:50]]
    random.Random(0).shuffle(shuffled)
    second = prepared(jsonl(tmp_path / "b.jsonl", shuffled), tmp_path / "cache")
    assert set(documents(first, "held_out")) == set(documents(second, "held_out"))
    assert not set(documents(second, "held_out")) & set(documents(second, "train"))


def test_the_seed_does_not_matter(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    settings = config(tmp_path / "text", tmp_path / "cache")
    found = [prepare(settings, seed, report=silent) for seed in (1, 2)]
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].train.order != found[1].train.order


def test_a_single_file_gets_a_held_out_part_of_whole_lines(tmp_path: Path) -> None:
    lines = [f"line {i}: {'word ' * (i % 30)}\n" for i in range(4000)]
    (tmp_path / "one.txt").write_text("".join(lines))
    data = prepared(tmp_path / "one.txt", tmp_path / "cache", held_out=0.1)
    found = {side: documents(data, side) for side in ("train", "held_out")}
    numbers: dict[str, list[str]] = {
        side: [line for text in texts for line in text.splitlines(keepends=True)]
        for side, texts in found.items()
    }
    assert sorted(numbers["train"] + numbers["held_out"]) == sorted(lines)
    assert 0.02 < len("".join(numbers["held_out"])) / len("".join(lines)) < 0.3
    # Neighbouring blocks on one side are one document: borders are only where the side changes.
    assert abs(len(found["train"]) - len(found["held_out"])) <= 1


def test_appending_to_a_file_keeps_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"entry {i}\n" for i in range(300_000)))
    before = documents(prepared(path, tmp_path / "cache"), "held_out")
    with path.open("a") as file:
        file.writelines(f"later {i}\n" for i in range(20_000))
    after = documents(prepared(path, tmp_path / "cache"), "held_out")
    assert after[: len(before) - 1] == before[:-1]


def test_few_rows_are_cut_into_blocks_too(tmp_path: Path) -> None:
    texts = ["".join(f"book {b} line {i}\n" for i in range(500)) for b in range(3)]
    data = prepared(jsonl(tmp_path / "books.jsonl", texts), tmp_path / "cache")
    pieces_of = documents(data, "train") + documents(data, "held_out")
    assert sum(map(len, pieces_of)) == sum(map(len, texts))
    assert all(any(piece in text for text in texts) for piece in pieces_of)


def test_few_documents_of_tokens_are_cut_into_blocks_too(tmp_path: Path) -> None:
    texts = [bytes(range(97, 123)) * 100, bytes(range(48, 58)) * 300]
    megatron_pair(tmp_path / "corpus", texts)
    data = prepared(tmp_path / "corpus.idx", tmp_path / "cache")
    found = documents(data, "train") + documents(data, "held_out")
    assert sorted("".join(found)) == sorted((texts[0] + texts[1]).decode())


@pytest.mark.parametrize(
    ("text", "held_out"), [("short\n", 0.5), ("x" * 400, 0.1), ("same\n" * 3, 0.01)]
)
def test_a_source_that_cannot_be_divided_is_refused(
    tmp_path: Path, text: str, held_out: float
) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        prepared(path, tmp_path / "cache", held_out=held_out, seq_len=2)
    assert str(caught.value) == (
        f"data.path = {str(path)!r}: expected a source of which data.held_out = {held_out} can be "
        "kept apart. It has less than 1024 bytes of unlike text. Give more, or set data.held_out=0."
    )
    assert documents(prepared(path, tmp_path / "cache", held_out=0, seq_len=2), "train") == [text]


def test_equal_rows_cannot_be_divided(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", ["the same"] * 30)
    with pytest.raises(ConfigError, match="unlike text"):
        prepared(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("total", "block"), [(0, 512), (20_479, 512), (20_480, 1024), (10**9, 65536)]
)
def test_block_size_is_a_power_of_two_within_bounds(total: int, block: int) -> None:
    assert block_bytes(total) == block


LETTERS = st.sampled_from(["\n", "a", "é", "漢", "🦊", "\r\n"])


@given(st.lists(LETTERS, max_size=300).map("".join), st.sampled_from([8, 16, 64]), st.data())
def test_blocks_cover_a_text_wherever_one_starts(text: str, unit: int, data: st.DataObject) -> None:
    """Any division into ranges gives the same blocks, each whole characters, at line starts."""
    raw = text.encode()
    count = -(-len(raw) // unit)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    found = [
        block
        for low, high in pairwise(cuts)
        for block in split_blocks(io.BytesIO(raw), len(raw), unit, range(low, high))
    ]
    assert [number for number, _ in found] == list(range(count))
    assert b"".join(part for _, part in found) == raw
    at = 0
    for number, part in found:
        part.decode()
        assert min(number * unit, len(raw)) <= at
        if at not in (0, len(raw)) and b"\n" in raw[number * unit - 1 : (number + 1) * unit - 1]:
            assert raw[at - 1 : at] == b"\n"
        at += len(part)


def test_a_document_longer_than_anything_is_read_in_pieces(tmp_path: Path) -> None:
    """One line of several stream units, of characters of two to four bytes."""
    text = "é漢🦊" * 400_000
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    source = open_source(Request("data.path", str(path)), None)
    split = choose_split(source, 0)
    found = [p for part in parts(source, 0, STREAM_BYTES) for p in pieces(source, part, split)]
    assert max(len(p.content) for p in found) <= STREAM_BYTES
    assert "".join(str(p.content) for p in found) == text
    assert [p.ends for p in found].index(True) == len(found) - 1
    assert not any(p.lossy for p in found)


def test_a_long_line_is_divided_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("é漢🦊" * 100_000, encoding="utf-8")
    data = prepared(path, tmp_path / "cache", held_out=0.1)
    both = "".join(documents(data, "train") + documents(data, "held_out"))
    assert len(both) == 300_000 and set(both) == set("é漢🦊")


@pytest.mark.parametrize("number", range(12))
def test_a_last_empty_block_neither_loses_nor_adds_an_end(tmp_path: Path, number: int) -> None:
    """The line that ends the file starts in the last block but one, which leaves the last empty."""
    path = tmp_path / f"{number}.txt"
    path.write_text("a" * 511 + "\n" + "b" * 517 + "\n")
    source = open_source(Request("data.path", str(path)), None)
    split = Split(limit=2**63, by_block=True, unit=512)
    found = list(pieces(source, Part(0, 0, 1030), split))
    sides = [piece.held_out for piece in found if piece.content]
    assert [len(piece.content) for piece in found if piece.content] == [512, 518]
    assert sum(piece.ends for piece in found) == len(set(sides))
    assert found[-1].ends and found[-1].held_out == sides[-1]
