"""Tables by a column of theirs, compressed files, and what is refused because it is neither."""

import csv
import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from data_cases import documents, jsonl, prepared
from pyarrow import parquet

from weft.config.errors import ConfigError

TEXTS = [f'document {i}, of "several"\nlines, ü\n' for i in range(40)]
Pack = Callable[[bytes], bytes]


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


PACKS = [pytest.param(".gz", gzip.compress, id="gz"), pytest.param(".zst", zstd, id="zst")]


def everything(path: Path, cache: Path, **changes: object) -> list[str]:
    return documents(prepared(path, cache, held_out=0, **changes), "train")


def table(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([header, *rows])
    return path


def plain(root: Path, suffix: str) -> Path:
    """A file of ``TEXTS``, one a document."""
    if suffix == ".jsonl":
        return jsonl(root / "x.jsonl", TEXTS)
    return table(root / f"x{suffix}", list(enumerate(TEXTS)), ["id", "text"])


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_table_is_read_by_its_column(tmp_path: Path, suffix: str) -> None:
    assert everything(plain(tmp_path, suffix), tmp_path / "cache") == TEXTS


def test_another_column_a_mark_at_the_start_and_empty_cells(tmp_path: Path) -> None:
    path = table(tmp_path / "x.csv", [["a" * 200_000, 1], ["", 2], ["b", 3]], ["body", "id"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n")
    source = {"path": str(path), "field": "body"}
    data = prepared(None, tmp_path / "cache", sources=(source,), held_out=0)
    assert documents(data, "train") == ["a" * 200_000, "b"]


@pytest.mark.parametrize(("end", "pack"), PACKS)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv"])
def test_compressed_rows_are_the_rows(tmp_path: Path, suffix: str, end: str, pack: Pack) -> None:
    path = tmp_path / f"packed{suffix}{end}"
    data = plain(tmp_path, suffix).read_bytes()
    path.write_bytes(pack(data[:500]) + pack(data[500:]))  # two frames
    assert everything(path, tmp_path / "cache") == TEXTS
    limit = path.stat().st_size / 2
    found = everything(path, tmp_path / "cache", limit_mb=limit / 1e6)
    assert 0 < len(found) < 40 and found == TEXTS[: len(found)]


@pytest.mark.parametrize(("end", "pack"), PACKS)
def test_compressed_text_is_the_text(tmp_path: Path, end: str, pack: Pack) -> None:
    text = "".join(f"line {i} é\n" for i in range(200_000))
    path = tmp_path / f"x.txt{end}"
    path.write_bytes(pack(text.encode()))
    assert everything(path, tmp_path / "cache") == [text]
    half = path.stat().st_size // 2
    (cut,) = everything(path, tmp_path / "cache", limit_mb=half / 1e6)
    assert text.startswith(cut) and cut.endswith("\n") and half - 100 < len(cut.encode()) <= half
    data = prepared(path, tmp_path / "cache")
    sizes = [sum(map(len, documents(data, side))) for side in ("train", "held_out")]
    assert min(sizes) > 0 and sum(sizes) == len(text)


def test_padding_of_any_length_follows_a_gzip_file(tmp_path: Path) -> None:
    """As tapes have it; it does not come first, and what follows it counts."""
    lines = plain(tmp_path, ".jsonl").read_bytes()
    packed = [gzip.compress(part) + b"\0" * 200_000 for part in (lines[:500], lines[500:])]
    (tmp_path / "x.jsonl.gz").write_bytes(b"".join(packed))
    assert everything(tmp_path / "x.jsonl.gz", tmp_path / "cache") == TEXTS
    (tmp_path / "y.jsonl.gz").write_bytes(b"\0" * 200_000)
    with pytest.raises(ConfigError, match="incorrect header"):
        everything(tmp_path / "y.jsonl.gz", tmp_path / "cache")


def test_zstd_files_may_look_back_far(tmp_path: Path) -> None:
    """As ``zstd --long=28`` makes them: more than decoders allow by themselves."""
    zstandard = pytest.importorskip("zstandard")
    far = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=far).compressobj()
    packed = packer.compress(plain(tmp_path, ".jsonl").read_bytes()) + packer.flush()
    (tmp_path / "x.jsonl.zst").write_bytes(packed)
    assert everything(tmp_path / "x.jsonl.zst", tmp_path / "cache") == TEXTS


def saved_dataset(root: Path, texts: Sequence[str] = TEXTS) -> Path:
    """As ``Dataset.save_to_disk`` of Hugging Face's ``datasets`` leaves it."""
    root.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "cache-0.arrow"]
    for name, part in zip(names, (texts[:19], texts[19:], texts), strict=True):
        batches = [pa.record_batch({"text": part[i : i + 5]}) for i in range(0, len(part), 5)]
        new, schema = pa.ipc.new_stream, batches[0].schema
        with pa.OSFile(str(root / name), "wb") as file, new(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    state = {"_data_files": [{"filename": name} for name in names[:2]], "_split": "train"}
    (root / "state.json").write_text(json.dumps(state))
    (root / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string"}}}')
    return root


def test_a_saved_dataset_is_the_files_that_it_lists(tmp_path: Path) -> None:
    data = prepared(saved_dataset(tmp_path / "saved"), tmp_path / "cache", held_out=0)
    assert documents(data, "train") == TEXTS
    assert data.notes == ()


def test_an_arrow_file_in_both_layouts(tmp_path: Path) -> None:
    found = pa.table({"text": pa.array([*TEXTS, None], pa.large_string())})
    for name, new in (("a.arrow", pa.ipc.new_file), ("b.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as file, new(file, found.schema) as writer:
            writer.write_table(found, max_chunksize=300)
        assert everything(tmp_path / name, tmp_path / "cache") == TEXTS


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_an_empty_table_is_no_text(tmp_path: Path, name: str) -> None:
    """As a filter leaves it; beside others it is passed over."""
    (tmp_path / "data").mkdir()
    path, empty = tmp_path / "data" / name, pa.table({"text": pa.array([], pa.string())})
    if name == "x.parquet":
        parquet.write_table(empty, path)
    else:
        batch = pa.RecordBatch.from_pylist([], empty.schema)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, empty.schema) as stream:
            stream.write_batch(batch)
    with pytest.raises(ConfigError, match="empty"):
        everything(path, tmp_path / "cache")
    if name == "x.parquet":
        parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "data" / "y.parquet")
        assert everything(tmp_path / "data", tmp_path / "cache") == TEXTS


def damaged_parquet(root: Path) -> Path:
    """Its end, which says where what is, is whole."""
    parquet.write_table(pa.table({"text": TEXTS}), root / "x.parquet")
    whole = (root / "x.parquet").read_bytes()
    (root / "x.parquet").write_bytes(whole[:30] + bytes(300) + whole[330:])
    return root / "x.parquet"


def several_splits(root: Path) -> Path:
    (root / "all").mkdir()
    for split in ("train", "test"):
        saved_dataset(root / "all" / split)
    (root / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return root / "all"


def part_of_a_dataset(root: Path) -> Path:
    (saved_dataset(root / "part") / "data-00001-of-00002.arrow").unlink()
    return root / "part"


def no_arrow(root: Path) -> Path:
    (root / "x.arrow").write_bytes(b"not arrow")
    return root / "x.arrow"


def no_header(root: Path) -> Path:
    return table(root / "x.csv", [["1", "body"]], ["id", "body"])


def two_columns(root: Path) -> Path:
    return table(root / "x.csv", [["body", "other"]], ["text", "text"])


def two_columns_of_parquet(root: Path) -> Path:
    columns = [pa.array(["body"]), pa.array(["other"])]
    parquet.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), root / "x.parquet")
    return root / "x.parquet"


def wide_rows(root: Path) -> Path:
    (root / "x.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    return root / "x.jsonl"


def packed_wide_rows(root: Path) -> Path:
    path = wide_rows(root)
    (root / "x.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    return root / "x.jsonl.gz"


def wide_text(root: Path) -> Path:
    (root / "x.txt").write_bytes(("a line\n" * 99).encode("utf-16"))
    return root / "x.txt"


def too_wide(root: Path) -> Path:
    (root / "x.csv").write_text('id,text\n1,"a\nb"\n2,with, a comma\n')
    return root / "x.csv"


def open_quote(root: Path) -> Path:
    (root / "x.tsv").write_text('id\ttext\n1\t"open\n')
    return root / "x.tsv"


def cut_gzip(root: Path) -> Path:
    (root / "x.jsonl.gz").write_bytes(gzip.compress(plain(root, ".jsonl").read_bytes())[:-9])
    return root / "x.jsonl.gz"


def cut_zstd(root: Path) -> Path:
    (root / "x.jsonl.zst").write_bytes(zstd(plain(root, ".jsonl").read_bytes())[:-9])
    return root / "x.jsonl.zst"


def no_gzip(root: Path) -> Path:
    (root / "x.txt.gz").write_text("plain text\n" * 99)
    return root / "x.txt.gz"


def packed_binary(root: Path) -> Path:
    (root / "x.gz").write_bytes(gzip.compress(b"\0\1\2" * 99))
    return root / "x.gz"


def packed_parquet(root: Path) -> Path:
    (root / "x.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    return root / "x.parquet.gz"


def whole_json(root: Path) -> Path:
    (root / "x.json").write_text('[{"text": "a"}]')
    return root / "x.json"


ALLOWED = (
    "text, .jsonl, .csv or .tsv (each also as .gz or .zst), .parquet, .arrow or a Megatron .idx."
)
ROWS = "rows as wide as the header, with quotes around commas. "
REFUSALS = [
    (several_splits, "one split of a saved dataset. {path} has the splits test, train: name the "),
    (part_of_a_dataset, "a whole saved dataset. {path}/data-00001-of-00002.arrow is missing."),
    (no_arrow, "Arrow files. {path}: "),
    (damaged_parquet, "Parquet files. {path}: "),
    (no_header, "a field that holds text in every row. {path} has: body, id."),
    (two_columns, "a column of its own name. {path} has 2 such columns. Name another: "),
    (two_columns_of_parquet, "a column of its own name. {path} has 2 such columns. "),
    (wide_rows, "text in UTF-8. {path} is in UTF-16: convert it, with `iconv -f UTF-16"),
    (packed_wide_rows, "text in UTF-8. {path} is in UTF-16: convert it, with `iconv"),
    (wide_text, ALLOWED + " {path} is in UTF-16: convert it, with `iconv -f UTF-16 -t UTF-8`."),
    (too_wide, ROWS + "{path}:4: 3 columns, and the header has 2. Correct or delete that line."),
    (open_quote, ROWS + "{path}:2: unexpected end of data. Correct or delete that line."),
    (cut_gzip, "whole gzip files. {path}: it ends in the middle: cut short. Copy it again."),
    (cut_zstd, "whole zstd files. {path}: it ends in the middle: cut short. Copy it again."),
    (no_gzip, "whole gzip files. {path}: Error -3 while decompressing data: incorrect header"),
    (packed_binary, "text in what is compressed. {path} holds zero bytes, as text does not."),
    (packed_parquet, ALLOWED),
    (
        whole_json,
        ALLOWED
        + " data.path=null 'data.sources=[{path: {path}, format: text}]' reads it as text, ",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSALS, ids=[r[0].__name__ for r in REFUSALS])
def test_what_cannot_be_read_is_refused_in_words(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        prepared(path, tmp_path / "cache", held_out=0)
    assert f": expected {message}".replace("{path}", str(path)) in str(caught.value)


def test_a_source_of_a_list_is_changed_in_the_list(tmp_path: Path) -> None:
    sources = ({"path": str(whole_json(tmp_path))},)
    with pytest.raises(ConfigError, match=r"`format: text` in data\.sources\[0\] reads it as text"):
        prepared(None, tmp_path / "cache", sources=sources)


@pytest.mark.parametrize("name", ["x.parquet.gz", "x.tar.gz", "x.tgz", "x.bz2"])
def test_no_hint_makes_text_of_compressed_bytes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"\0" * 999))
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / name, tmp_path / "cache")
    assert "format=text" not in str(caught.value)


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'weft\[zstd\]'"):
        prepared(tmp_path / "x.jsonl.zst", tmp_path / "cache")
