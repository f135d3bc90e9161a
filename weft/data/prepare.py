"""Sources to token files, once: ``prepare`` does it, or finds that it was done, and opens it."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.config.errors import ConfigError
from weft.config.sections import DataConfig
from weft.data.cache import (
    FORMAT,
    TOKENIZER_FILE,
    Meta,
    Report,
    locked,
    new_folder,
    read_meta,
    write_meta,
)
from weft.data.dataset import PackedSpec, StoreSpec
from weft.data.documents import choose_split
from weft.data.encode import SIDES, Job, encode_job, make_jobs
from weft.data.hashing import make_key
from weft.data.order import TrainOrder
from weft.data.sources import BUILTIN_PYTHON, Request, Source, open_source
from weft.data.tokenizer import (
    CONFIG_FILE,
    END,
    MADE_HERE,
    Tokenizer,
    byte_tokenizer_json,
    end_token_config,
    file_digest,
    load_tokenizer,
    tokenizer_digest,
    train_bpe,
)
from weft.data.tokens import token_type, type_code

TOKENIZER_BYTES = 64 << 20
"""A tokenizer is trained on about this much text at most, taken from all over the sources."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Tokenized data, open to any process that sees the cache folder."""

    folder: Path
    vocab_size: int
    end_id: int
    """The end-of-document token."""
    fingerprint: str
    """Hash of all tokens and the tokenizer: equal on two machines when the data is."""
    train: PackedSpec
    held_out: PackedSpec
    """Without any samples when ``data.held_out`` is 0."""
    num_bytes: int
    """UTF-8 bytes of text that became tokens; 0 where sources held tokens already."""
    num_documents: int
    notes: tuple[str, ...]
    """What a person should know of this preparation; empty when it was done before."""

    @property
    def tokenizer_file(self) -> Path:
        """A ``tokenizer.json`` of the ``tokenizers`` library."""
        return self.folder / TOKENIZER_FILE

    @property
    def train_tokens(self) -> int:
        return sum(store.num_tokens for store in self.train.stores)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_file)

    def train_stream(self, limit: int) -> npt.NDArray[np.integer]:
        """The first tokens of every source, ``[at most limit]``, in proportion to their sizes."""
        total = self.train_tokens
        parts = []
        for spec in self.train.stores:
            kept = spec.num_tokens if total <= limit else spec.num_tokens * limit // total
            parts.append(spec.open().read(0, kept))
        return np.concatenate(parts)


def prepare(config: DataConfig, seed: int, *, report: Report) -> Prepared:
    """Tokenize the sources, or open what was tokenized before, in ``config.cache_dir``.

    Args:
        config: The ``data`` section.
        seed: Of the order of samples; tokens and the held-out part do not depend on it.
        report: Told how far it is.

    Raises:
        ConfigError: a source, the tokenizer, a size or the cache's folder cannot be used.
        PrepareError: another process holds the cache.
    """
    limit_bytes = None
    if config.limit_mb is not None:
        limit_bytes = max(int(config.limit_mb * 1e6 / len(config.all_sources)), 1)
    sources = [open_source(request, limit_bytes) for request in _requests(config)]
    cache_dir = Path(config.cache_dir).expanduser()
    _check_cache_dir(config, cache_dir.resolve())
    target = cache_dir / _slot(config, sources)
    stamp = f"{make_key(*(source.stamp() for source in sources)):016x}"
    meta = _fresh(target, stamp)
    notes: list[str] = []
    if meta is None:
        with _refusing_folder(config, cache_dir):
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked(target.with_name(f"{target.name}.lock")) as keeping_alive:
                builder = _Builder(config, sources, keeping_alive(report))
                meta, notes = _build(builder, target, stamp)
    return _open(config, seed, target, meta, tuple(notes))


@contextmanager
def _refusing_folder(config: DataConfig, cache_dir: Path) -> Iterator[None]:
    """Name the key where what is kept cannot be written; nothing else is written meanwhile."""
    try:
        yield
    except OSError as error:
        at = Path(error.filename) if isinstance(error.filename, str) else None
        ours = at is not None and (cache_dir in (at, *at.parents) or at in cache_dir.parents)
        if not ours and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        expected = f"a folder {'with room' if room else 'that can be written'} ({error.strerror})"
        hint = "Make room there, or name another." if room else "Name another."
        raise ConfigError("data.cache_dir", config.cache_dir, expected, hint) from error


def _build(builder: _Builder, target: Path, stamp: str) -> tuple[Meta, list[str]]:
    """Build the cache, unless another process did while this one waited for the lock."""
    meta = _fresh(target, stamp)
    if meta is not None:
        return meta, []
    notes = _why_again(target)
    with new_folder(target) as folder:
        meta = builder.build(folder, stamp)
    return meta, notes + builder.notes


def _fresh(folder: Path, stamp: str) -> Meta | None:
    meta = read_meta(folder)
    return meta if meta is not None and meta.stamp == stamp else None


def _why_again(target: Path) -> list[str]:
    if not target.exists():
        return []
    why = "was damaged" if read_meta(target) is None else "was of older sources"
    return [f"data: what the cache held {why}, so it was tokenized again"]


def _requests(config: DataConfig) -> Iterator[Request]:
    for number, source in enumerate(config.all_sources):
        key = _key_of(config, number)
        yield Request(key, source.path, source.format, source.field)


def _check_cache_dir(config: DataConfig, cache_dir: Path) -> None:
    """A cache inside a source would be read as a part of it, and make it look changed."""
    for source in config.all_sources:
        root = Path(source.path).expanduser().resolve()
        if not cache_dir.is_relative_to(root) or source.path == BUILTIN_PYTHON:
            continue
        if not any(name.startswith(".") for name in cache_dir.relative_to(root).parts):
            hint = "A folder whose name starts with a dot is not read, and will do."
            raise ConfigError("data.cache_dir", config.cache_dir, f"a folder not in {root}", hint)


def _slot(config: DataConfig, sources: Sequence[Source]) -> str:
    """Name of the cache folder: of all settings that the tokens depend on."""
    tokenizer: tuple[object, ...] = (config.tokenizer,)
    if config.tokenizer == "bpe":
        tokenizer = ("bpe", config.vocab_size)
    elif config.tokenizer not in MADE_HERE:
        tokenizer = ("file", tokenizer_digest(Path(config.tokenizer).expanduser()))
    requests = [source.request for source in sources]
    settings = [(_place(request.path), request.format, request.field) for request in requests]
    text = json.dumps([FORMAT, settings, *tokenizer, config.held_out, config.limit_mb])
    label = Path(requests[0].path.removeprefix("builtin:")).name  # for people
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", label).strip("-")[:32] or "data"
    return f"{readable}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _place(path: str) -> str:
    return path if path == BUILTIN_PYTHON else str(Path(path).expanduser().resolve())


def _open(
    config: DataConfig, seed: int, folder: Path, meta: Meta, notes: tuple[str, ...]
) -> Prepared:
    """Cut the stores into samples, and see that there are some.

    Raises ConfigError: too few tokens for a single sample, or a source that its weight leaves out.
    """
    stores = {
        side: tuple(meta.store(folder, n, side) for n in range(len(config.all_sources)))
        for side in SIDES
    }
    _check_samples(config, stores["train"], stores["held_out"])
    order = TrainOrder(
        seed,
        tuple(store.num_samples(config.seq_len) for store in stores["train"]),
        tuple(source.weight for source in config.all_sources),
    )
    for number, share in enumerate(order.shares):
        if share == 0:
            key, weight = f"data.sources[{number}].weight", order.weights[number]
            expected = f"enough for one of the {order.epoch_samples} samples of an epoch"
            hint = "Give it more weight, or remove the source."
            raise ConfigError(key, weight, expected, hint)
    spec = PackedSpec(
        stores=stores["train"],
        seq_len=config.seq_len,
        end_id=meta.end_id,
        mask_documents=config.mask_documents,
        order=order,
    )
    return Prepared(
        folder=folder,
        vocab_size=meta.vocab_size,
        end_id=meta.end_id,
        fingerprint=meta.fingerprint,
        train=spec,
        held_out=replace(spec, stores=stores["held_out"], order=None),
        num_bytes=sum(shard.num_bytes for shard in meta.shards),
        num_documents=sum(shard.documents for shard in meta.shards),
        notes=notes,
    )


def _key_of(config: DataConfig, number: int) -> str:
    return "data.path" if config.path is not None else f"data.sources[{number}].path"


def _check_samples(
    config: DataConfig, train: Sequence[StoreSpec], held_out: Sequence[StoreSpec]
) -> None:
    seq_len = config.seq_len
    for number, (source, store) in enumerate(zip(config.all_sources, train, strict=True)):
        if store.num_tokens < MIN_TOKENS:
            hint = f"It has {store.num_tokens} tokens to train on. Give another file, or more text."
            raise ConfigError(_key_of(config, number), source.path, "text to train on", hint)
        if not store.num_samples(seq_len):
            expected = f"at most {max(store.num_tokens - 1, 0)}, for one sample to fit"
            hint = f"{source.path} has {store.num_tokens} tokens to train on. Give more text."
            raise ConfigError("data.seq_len", seq_len, expected, hint)
    if config.held_out and not any(store.num_samples(seq_len) for store in held_out):
        found = sum(store.num_tokens for store in held_out)
        expected = f"a part with room for one sample of {seq_len} tokens and its last target"
        hint = f"It has {found} tokens. Give more text, a larger part, or a smaller data.seq_len."
        raise ConfigError("data.held_out", config.held_out, expected, hint)


SEEN_DOCUMENTS, SEEN_CHARS = 64, 4096
"""By which a tokenizer is judged, and how much of each."""
LEAST_KEPT = 0.98
"""Part of their signs that one keeps that loses nothing: some write a few otherwise."""
MIN_TOKENS = 2
"""One to read, and one to foresee."""


class _Builder:
    """Builds one cache folder. ``notes`` then says what a person should know of it."""

    def __init__(self, config: DataConfig, sources: Sequence[Source], report: Report) -> None:
        self.notes: list[str] = []
        self._config = config
        self._sources = sources
        self._report = report
        self._total = sum(file.size for source in sources for file in source.files)
        self._tokenized = 0

    def build(self, folder: Path, stamp: str) -> Meta:
        """Write everything into ``folder``.

        Raises ConfigError: a source or the tokenizer cannot be used.
        """
        self._report(0, self._total, "dividing the sources")
        splits = [choose_split(source, self._config.held_out) for source in self._sources]
        jobs = make_jobs(self._sources, splits)
        path = folder / TOKENIZER_FILE
        text, end = self._tokenizer(jobs)
        path.write_text(text, encoding="utf-8")
        path.with_name(CONFIG_FILE).write_text(end_token_config(end), encoding="utf-8")
        asked = self._config.tokenizer
        tokenizer = load_tokenizer(path, None if asked in MADE_HERE else Path(asked))
        encoded = [encode_job(job, tokenizer, folder, self._tell) for job in jobs]
        self._note(tokenizer.vocab_size, {name for _, lossy in encoded for name in lossy})
        if asked not in MADE_HERE:
            self._note_lost(jobs, tokenizer)
        meta = Meta(
            format=FORMAT,
            stamp=stamp,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            type_code=type_code(token_type(tokenizer.vocab_size)),
            tokenizer_digest=file_digest(path),
            config_digest=file_digest(path.with_name(CONFIG_FILE)),
            shards=tuple(shard for shards, _ in encoded for shard in shards),
        )
        write_meta(folder, meta)
        return meta

    def _tell(self, count: int) -> None:
        """So many more bytes are tokenized."""
        self._tokenized += count
        self._report(self._tokenized, self._total, "tokenizing")

    def _tokenizer(self, jobs: Sequence[Job]) -> tuple[str, str]:
        """(text of the tokenizer.json, its end-of-document token)."""
        config = self._config
        if config.tokenizer == "bytes":
            return byte_tokenizer_json(), END
        if config.tokenizer == "bpe":
            return train_bpe(self._training_text(jobs), config.vocab_size), END
        path = Path(config.tokenizer).expanduser()
        end = load_tokenizer(path).end
        return path.read_text(encoding="utf-8"), end

    def _training_text(self, jobs: Sequence[Job]) -> Iterator[str]:
        """Text to train a tokenizer on: nothing held out, from jobs in the order of a hash."""
        done = 0
        for job in sorted(jobs, key=lambda job: make_key("tokenizer", job.number)):
            if done >= TOKENIZER_BYTES:
                share = done / self._total
                self.notes.append(f"data: the tokenizer was trained on {share:.0%} of the text")
                return
            for _, piece in job.pieces():
                if not isinstance(piece.content, str):
                    expected = "the tokenizer.json that made the tokens of the sources"
                    hint = f"{job.source.request.path} holds tokens, not text."
                    raise ConfigError("data.tokenizer", "bpe", expected, hint)
                if not piece.held_out:
                    yield piece.content
            done += job.num_bytes
            self._report(done, self._total, "training the tokenizer")

    def _note(self, found: int, lossy: set[str]) -> None:
        asked = self._config.vocab_size
        if self._config.tokenizer == "bpe" and found < asked:
            different = f"data: the text has only {found} different tokens"
            self.notes.append(f"{different} (data.vocab_size = {asked})")
        if lossy:
            replaced = "not UTF-8 throughout; U+FFFD stands for what is not"
            self.notes.append(f"data: {_files(lossy)} {replaced}")
        skipped = {name for source in self._sources for name in source.skipped}
        if skipped:
            self.notes.append(f"data: {_files(skipped)} not of a format that is read, and left out")

    def _note_lost(self, jobs: Sequence[Job], tokenizer: Tokenizer) -> None:
        """What the tokenizer does not know, or throws away, of the beginning of the text."""
        every = (piece.content for job in jobs for _, piece in job.pieces())
        texts = list(islice((text for text in every if isinstance(text, str)), SEEN_DOCUMENTS))
        texts = [text[:SEEN_CHARS] for text in texts]
        back = map(tokenizer.decode, tokenizer.encode_batch(texts))
        signs, kept = (sum(len("".join(each.split())) for each in some) for some in (texts, back))
        if kept < LEAST_KEPT * signs:
            unknown = f"only {kept / signs:.0%} of the text can be read from its tokens again"
            why = "what the tokenizer does not know is not there, and bits a byte count it as free"
            self.notes.append(f"data: {unknown}: {why}")


def _files(found: set[str]) -> str:
    names = sorted(found)
    few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"1 file ({few}) is" if len(names) == 1 else f"{len(names)} files ({few}) are"
