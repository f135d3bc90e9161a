"""Small corpora and configurations that several tests of the data path use."""

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from weft.config.sections import DataConfig
from weft.data.dataset import StoreSpec
from weft.data.prepare import Prepared, prepare
from weft.data.tokens import TokenWriter


def silent(*_: object) -> None:
    """A report to nobody."""


def folder_of_texts(root: Path, count: int, words: int = 200) -> dict[str, str]:
    """Files in nested folders; each is made of words that no other file has."""
    texts = {}
    for i in range(count):
        name = f"{'abc'[i % 3]}/file{i:03}.txt"
        lines = [" ".join(f"w{i}x{j % 7}" for j in range(k, k + 10)) for k in range(words // 10)]
        texts[name] = "\n".join(lines) + "\n"
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[name])
    return texts


def jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts)))
    return path


def config(path: Path | str | None, cache: Path, **changes: object) -> DataConfig:
    values = {"seq_len": 16, "tokenizer": "bytes", "held_out": 0.2, "cache_dir": str(cache)}
    return DataConfig(**{"path": path if path is None else str(path), **values, **changes})


def prepared(path: Path | str | None, cache: Path, **changes: object) -> Prepared:
    return prepare(config(path, cache, **changes), 1, report=silent)


def prepares(answer: Connection, path: Path, cache: Path) -> None:
    """Tells the fingerprint, and whether there was work to do."""
    told = list[object]()
    settings = config(path, cache, tokenizer="bpe", vocab_size=300)
    data = prepare(settings, 1, report=lambda *args: told.append(args))
    answer.send((data.fingerprint, bool(told)))


def stream(data: Prepared, side: str) -> np.ndarray:
    """All tokens of one side, as one array."""
    spec = {"train": data.train, "held_out": data.held_out}[side]
    stores = [store.open() for store in spec.stores]
    return np.concatenate([store.read(0, store.num_tokens) for store in stores])


def documents(data: Prepared, side: str) -> list[str]:
    """The documents of one side, as text, in order."""
    tokens = stream(data, side)
    assert not tokens.size or tokens[-1] == data.end_id, "the last document does not end"
    ends = np.flatnonzero(tokens == data.end_id)
    tokenizer = data.tokenizer()
    return [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]


def write_store(folder: Path, shards: Sequence[Sequence[int]], end: int | None = None) -> StoreSpec:
    """A store of uint16 tokens in several shards; a document ends with each token ``end``."""
    folder.mkdir(exist_ok=True)
    names, crc32 = [], []
    for number, tokens in enumerate(shards):
        with TokenWriter(folder / f"s{number}", np.uint16) as writer:
            ends = [at + 1 for at, token in enumerate(tokens) if token == end]
            for low, high in pairwise([0, *ends, len(tokens)]):
                writer.add(tokens[low:high])
                writer.end_document()
        names.append((f"s{number}", len(tokens)))
        crc32.append(writer.crc32)
    return StoreSpec(folder=str(folder), shards=tuple(names), crc32=tuple(crc32), type_code=8)


def megatron_pair(prefix: Path, texts: Sequence[bytes]) -> None:
    """A .bin/.idx pair of bytes as int32 tokens, packed by hand."""
    sizes = [len(text) for text in texts]
    starts = [4 * sum(sizes[:i]) for i in range(len(sizes))]
    count = len(sizes)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, count, count + 1)
    index += struct.pack(f"<{count}i{count}q{count + 1}q", *sizes, *starts, *range(count + 1))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    data = b"".join(struct.pack(f"<{len(text)}i", *text) for text in texts)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
