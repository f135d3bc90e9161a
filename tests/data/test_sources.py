"""Every kind of source, and every way in which one can be wrong."""

import errno
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import config, documents, folder_of_texts, jsonl, megatron_pair, prepared, stream

from weft.config.errors import ConfigError
from weft.data.rows import rows, stretches
from weft.data.sources import Request, open_source
from weft.data.tokens import TokenWriter, token_type

TEXTS = [f"document {i}\nwith two lines\n" for i in range(40)]


def test_a_folder_of_which_a_part_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()

    def scandir(folder: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(
        ConfigError, match=r"that can be read, with all in it\. .*texts: Permission"
    ):
        open_source(Request("data.path", str(tmp_path / "texts")), None)


def everything(path: Path | None, cache: Path, **changes: object) -> list[str]:
    return documents(prepared(path, cache, held_out=0, **changes), "train")


def test_jsonl_in_order_blank_lines_left_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", TEXTS)
    path.write_text("\n" + path.read_text().replace("\n", "\n \n", 3) + '{"text": ""}\n')
    assert everything(path, tmp_path / "cache") == TEXTS


def test_jsonl_without_a_last_newline_and_with_another_field(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.data", TEXTS, field="content")
    path.write_text(path.read_text().rstrip("\n"))
    source = {"path": str(path), "format": "jsonl", "field": "content"}
    assert everything(None, tmp_path / "cache", sources=(source,)) == TEXTS


def test_jsonl_that_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As some editors write; one that stands elsewhere is text."""
    path = jsonl(tmp_path / "x.jsonl", ["\ufeffa b", *TEXTS])
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert everything(path, tmp_path / "cache") == ["\ufeffa b", *TEXTS]


def write_parquet(path: Path, texts: list[str | None], column: str = "text") -> Path:
    table = pa.table({"id": range(len(texts)), column: pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=7)
    return path


def test_parquet_in_order_nulls_left_out(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [*TEXTS[:9], None, "", *TEXTS[9:]])
    assert everything(path, tmp_path / "cache") == TEXTS


def test_parquet_in_parts_is_the_whole(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", list(TEXTS))
    source = open_source(Request("data.path", str(path)), None)
    found = stretches(source.request, source.files[0], source.files[0].size // 4)
    assert len(found) > 2
    texts = [r.content for s in found for r in rows(source.request, source.files[0], *s)]
    assert texts == TEXTS
    middle = [r.content for r in rows(source.request, source.files[0], 5, 20)]
    assert middle == TEXTS[5:20]


def test_jsonl_in_parts_is_the_whole(tmp_path: Path) -> None:
    source = open_source(Request("data.path", str(jsonl(tmp_path / "x.jsonl", TEXTS))), None)
    for size in (1, 7, 60, 61, 62, 10_000):
        found = stretches(source.request, source.files[0], size)
        texts = [r.content for s in found for r in rows(source.request, source.files[0], *s)]
        assert texts == TEXTS, size


def test_megatron_files_keep_their_tokens(tmp_path: Path) -> None:
    texts = [text.encode() for text in TEXTS]
    megatron_pair(tmp_path / "corpus.v1", texts)
    for name in ("corpus.v1.idx", "corpus.v1.bin", "corpus.v1"):
        assert everything(tmp_path / name, tmp_path / "cache") == TEXTS


def test_a_document_that_has_its_end_token_gets_no_second_one(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "x", token_type(257)) as writer:
        for _ in range(30):
            writer.add([65, 66, 256])
            writer.end_document()
    data = prepared(tmp_path / "x.idx", tmp_path / "cache", held_out=0)
    assert stream(data, "train").tolist() == [65, 66, 256] * 30


def test_a_folder_of_all_kinds(tmp_path: Path) -> None:
    root = tmp_path / "mixed"
    texts = list(folder_of_texts(root, 25).values())
    jsonl(root / "rows.jsonl", TEXTS[:3])
    write_parquet(root / "table.parquet", list(TEXTS[3:6]))
    megatron_pair(root / "tokens", [text.encode() for text in TEXTS[6:9]])
    (root / ".hidden").write_text("hidden")
    (root / "empty.txt").write_text("")
    (root / "image.png").write_bytes(b"\x89PNG\0\0\0")
    (root / "__pycache__").mkdir()
    (root / "__pycache__/x.py").write_text("cached")
    (root / "list.json").write_text("[1, 2, 3]")
    data = prepared(root, tmp_path / "cache", held_out=0)
    assert sorted(documents(data, "train")) == sorted([*texts, *TEXTS[:9]])
    note = "data: 2 files (image.png, list.json) are not of a format that is read, and left out"
    assert data.notes == (note,)


def test_links_are_followed_and_a_circle_ends(tmp_path: Path) -> None:
    texts = list(folder_of_texts(tmp_path / "elsewhere", 25).values())
    root = tmp_path / "text"
    (root / "inner").mkdir(parents=True)
    (root / "inner/link").symlink_to(tmp_path / "elsewhere")
    (root / "inner/circle").symlink_to(root)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    assert sorted(everything(root, tmp_path / "cache")) == sorted(texts)


def test_a_cache_inside_a_source_is_refused(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 25)
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "text", tmp_path / "text/cache")
    assert str(caught.value) == (
        f"data.cache_dir = '{tmp_path}/text/cache': expected a folder not in {tmp_path}/text. "
        "A folder whose name starts with a dot is not read, and will do."
    )
    first = prepared(tmp_path / "text", tmp_path / "text/.cache")
    assert prepared(tmp_path / "text", tmp_path / "text/.cache") == first


def test_only_the_format_asked_for_is_read_from_a_folder(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "mixed", 25)
    path = jsonl(tmp_path / "mixed/rows.jsonl", TEXTS)
    source = {"path": str(path.parent), "format": "jsonl"}
    assert everything(None, tmp_path / "cache", sources=(source,)) == TEXTS


def test_the_builtin_source_is_the_library_without_tests_and_the_manual() -> None:
    source = open_source(Request("data.path", "builtin:python"), None)
    names = [file.name for file in source.files]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    assert not [n for n in names if "test" in n.split("/")[:-1] or "site-packages" in n]
    assert [file.name for file in source.files if file.kind == "topics"] == ["pydoc_data/topics.py"]
    assert 5e6 < sum(file.size for file in source.files) < 40e6


def test_a_limit_takes_a_fair_sample_and_cuts_the_last_file(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 50, words=400)
    size = sum(f.size for f in open_source(Request("k", str(tmp_path / "text")), None).files)
    source = open_source(Request("k", str(tmp_path / "text")), size // 3)
    taken = sum(file.size for file in source.files)
    assert size // 3 - 100 < taken <= size // 3
    assert len({file.name[0] for file in source.files}) == 3  # from all folders
    text = documents(prepared(tmp_path / "text", tmp_path / "cache", limit_mb=size / 3e6), "train")
    assert all(document.endswith("\n") for document in text)


def test_a_limit_cuts_every_kind(tmp_path: Path) -> None:
    whole = [f"{text}{i}" * 20 for i, text in enumerate(TEXTS)]
    jsonl(tmp_path / "x.jsonl", whole)
    write_parquet(tmp_path / "x.parquet", list(whole))
    megatron_pair(tmp_path / "x", [text.encode() for text in whole])
    for name in ("x.jsonl", "x.parquet", "x.idx"):
        half = (
            sum(f.size for f in open_source(Request("k", str(tmp_path / name)), None).files) / 2e6
        )
        found = everything(tmp_path / name, tmp_path / "cache", limit_mb=half)
        assert found == whole[: len(found)] and 15 <= len(found) <= 25, name


@pytest.mark.parametrize("text", ["é漢🦊" * 5000, "no line ends here " * 3000])
def test_a_limit_never_cuts_a_character(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    for limit in (20_000, 20_001, 20_002, 20_003, 20_004):
        (found,) = everything(tmp_path / "x.txt", tmp_path / "cache", limit_mb=limit / 1e6)
        assert text.startswith(found) and limit - 4 < len(found.encode()) <= limit


def test_bytes_that_are_not_utf8_are_replaced_and_told_once(tmp_path: Path) -> None:
    root = tmp_path / "text"
    folder_of_texts(root, 25)
    for name in ("latin1.txt", "latin2.txt"):
        (root / name).write_bytes("naïve café\n".encode("latin-1"))
    data = prepared(root, tmp_path / "cache", held_out=0)
    assert data.notes == (
        "data: 2 files (latin1.txt, latin2.txt) are not UTF-8 throughout; "
        "U+FFFD stands for what is not",
    )
    assert documents(data, "train").count("na\ufffdve caf\ufffd\n") == 2
    assert prepared(root, tmp_path / "cache", held_out=0).notes == ()


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud83eb, \\ud83e\\udd8a"}\n')
    data = prepared(path, tmp_path / "cache", held_out=0, seq_len=4)
    assert documents(data, "train") == ["a\ufffdb, 🦊"]
    assert data.notes and data.notes[0].startswith("data: 1 file (x.jsonl) is not UTF-8")


def make_absent(root: Path) -> Path:
    return root / "absent.txt"


def make_empty_file(root: Path) -> Path:
    (root / "empty.txt").touch()
    return root / "empty.txt"


def make_empty_folder(root: Path) -> Path:
    (root / "nothing").mkdir()
    return root / "nothing"


def make_folder_of_empty_files(root: Path) -> Path:
    (root / "empties").mkdir()
    (root / "empties/x.txt").touch()
    return root / "empties"


def make_binary(root: Path) -> Path:
    (root / "model.bin").write_bytes(b"\0\1\2\3")
    return root / "model.bin"


def make_folder_of_binaries(root: Path) -> Path:
    (root / "binaries").mkdir()
    (root / "binaries/x.so").write_bytes(b"\x7fELF\0")
    return root / "binaries"


def make_bad_line(root: Path) -> Path:
    path = jsonl(root / "x.jsonl", TEXTS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:24], '{"text": "cut of\n', *lines[24:]]))
    return path


def make_array_line(root: Path) -> Path:
    (root / "x.jsonl").write_text('{"text": "a"}\n[1, 2]\n')
    return root / "x.jsonl"


def make_other_field(root: Path) -> Path:
    return jsonl(root / "x.jsonl", TEXTS, field="content")


def make_number(root: Path) -> Path:
    (root / "x.jsonl").write_text('{"text": "a"}\n\n{"text": 3}\n')
    return root / "x.jsonl"


def make_parquet_without_column(root: Path) -> Path:
    return write_parquet(root / "x.parquet", list(TEXTS), column="body")


def make_parquet_of_numbers(root: Path) -> Path:
    pq.write_table(pa.table({"text": [1, 2, 3]}), root / "x.parquet")
    return root / "x.parquet"


def make_no_parquet(root: Path) -> Path:
    (root / "x.parquet").write_text("not parquet")
    return root / "x.parquet"


def make_lone_index(root: Path) -> Path:
    megatron_pair(root / "x", [b"abc"])
    (root / "x.bin").unlink()
    return root / "x.idx"


def make_cut_index(root: Path) -> Path:
    megatron_pair(root / "x", [b"abc"] * 30)
    (root / "x.idx").write_bytes((root / "x.idx").read_bytes()[:-3])
    return root / "x.idx"


def make_big_tokens(root: Path) -> Path:
    with TokenWriter(root / "x", token_type(50_000)) as writer:
        for i in range(30):
            writer.add([i, 40_000 + i])
            writer.end_document()
    return root / "x.idx"


ALLOWED = (
    "text, .jsonl, .csv or .tsv (each also as .gz or .zst), .parquet, .arrow or a Megatron .idx."
)
P, F = "data.path = '{path}': expected ", "data.sources[0].field = 'text': expected "
N = " Name another: data.path=null 'data.sources=[{path: {path}, field: NAME}]'."
REFUSALS: list[tuple[Callable[[Path], Path], str]] = [
    (make_absent, P + 'a file or a folder that exists. "builtin:python" needs no file.'),
    (make_empty_file, P + "a source with text in it. It is empty."),
    (make_empty_folder, P + "a folder with files. It has none."),
    (make_folder_of_empty_files, P + "a source with text in it. It is empty."),
    (
        make_binary,
        P + ALLOWED + " It holds zero bytes, as text does not.",
    ),
    (
        make_folder_of_binaries,
        P + "a folder with " + ALLOWED + " It has 1 files, such as x.so, of other formats.",
    ),
    (
        make_bad_line,
        P + "one JSON object a line. {path}:25: Invalid control character at, column 17. "
        "Correct or delete that line.",
    ),
    (make_array_line, P + "one JSON object a line. {path}:2 is a JSON list, not an object."),
    (make_other_field, F + "a field that holds text in every row. {path}:1 has: content, id." + N),
    (make_number, F + "a field that holds text in every row. {path}:3 has int there." + N),
    (
        make_parquet_without_column,
        F + "a field that holds text in every row. {path} has: body, id." + N,
    ),
    (make_parquet_of_numbers, F + "a column of strings. {path} has int64 there." + N),
    (make_no_parquet, P + "Parquet files. {path}: Parquet magic bytes not found in footer. .*"),
    (make_lone_index, P + "a .idx with its .bin beside it. x.bin is missing."),
    (
        make_cut_index,
        P + "a whole .bin/.idx pair. {path}: 639 bytes, but 30 sequences need 642: cut short. "
        "Copy it again, or delete its folder to rebuild it.",
    ),
    (
        make_big_tokens,
        P + "tokens of data.tokenizer, 0 to 256. {folder}/x.bin, byte 2, has 40000. "
        "Name the tokenizer.json that made them.",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSALS, ids=[r[0].__name__[5:] for r in REFUSALS])
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        prepared(path, tmp_path / "cache")
    expected = re.escape(message).replace(re.escape(".*"), ".*").replace(r"\{path\}", str(path))
    expected = expected.replace(r"\{folder\}", str(tmp_path))
    assert re.fullmatch(expected, str(caught.value), re.DOTALL), str(caught.value)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "x.parquet", list(TEXTS))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'weft\[parquet\]'"):
        prepared(path, tmp_path / "cache")


def test_tokens_need_the_tokenizer_that_made_them(tmp_path: Path) -> None:
    megatron_pair(tmp_path / "x", [b"abc" * 20] * 40)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'bpe'.*holds tokens, not text"):
        prepared(tmp_path / "x.idx", tmp_path / "cache", tokenizer="bpe", held_out=0)


def test_the_second_source_is_named_by_its_number(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    sources = [{"path": str(tmp_path / "text")}, {"path": str(tmp_path / "absent")}]
    with pytest.raises(ConfigError) as caught:
        prepared(None, tmp_path / "cache", sources=sources)
    assert caught.value.key == "data.sources[1].path"
    assert config("x", tmp_path).all_sources[0].path == "x"
