"""Makes the contents of a cache folder: the split, the tokenizer, the token shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weft.config.errors import ConfigError
from weft.config.sections import DataConfig
from weft.data.cache import FORMAT, TOKENIZER_FILE, Meta, Report, write_meta
from weft.data.documents import choose_split, pieces
from weft.data.encode import Encoded, Encoding, Job, encode_job, make_jobs
from weft.data.hashing import make_key
from weft.data.sources import Source
from weft.data.splitting import Split
from weft.data.tokenizer import (
    CONFIG_FILE,
    END,
    byte_tokenizer_json,
    end_token_config,
    file_digest,
    load_tokenizer,
    train_bpe,
)
from weft.data.tokens import TOKEN_TYPES, token_type

TOKENIZER_BYTES = 64 << 20
"""A tokenizer is trained on about this much text at most, taken from all over the sources."""


class Builder:
    """Builds one cache folder. ``notes`` then says what a person should know of it."""

    def __init__(self, config: DataConfig, sources: Sequence[Source], report: Report) -> None:
        self.notes: list[str] = []
        self._config = config
        self._sources = sources
        self._report = report
        self._total = sum(file.size for source in sources for file in source.files)

    def build(self, folder: Path, stamp: str) -> Meta:
        """Write everything into ``folder``.

        Raises:
            ConfigError: a source or the tokenizer cannot be used.
        """
        self._report(0, self._total, "dividing the sources")
        splits = [choose_split(source, self._config.held_out) for source in self._sources]
        jobs = make_jobs(self._sources)
        path = folder / TOKENIZER_FILE
        text, end = self._tokenizer(splits, jobs)
        path.write_text(text, encoding="utf-8")
        path.with_name(CONFIG_FILE).write_text(end_token_config(end), encoding="utf-8")
        tokenizer = load_tokenizer(path)
        self._note_vocabulary(tokenizer.vocab_size)
        code = next(c for c, t in TOKEN_TYPES.items() if t is token_type(tokenizer.vocab_size))
        encoding = Encoding(
            sources=tuple(self._sources),
            splits=tuple(splits),
            tokenizer=tokenizer,
            type_code=code,
            folder=folder,
        )
        tell = self._tell()
        encoded = [encode_job(encoding, job, tell) for job in jobs]
        self._note_files(encoded)
        meta = Meta(
            format=FORMAT,
            stamp=stamp,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            type_code=code,
            tokenizer_digest=file_digest(path),
            shards=tuple(shard for result in encoded for shard in result.shards),
        )
        write_meta(folder, meta)
        return meta

    def _tell(self) -> Callable[[int], None]:
        """Counts bytes as they are tokenized."""
        done = 0

        def tell(count: int) -> None:
            nonlocal done
            done += count
            self._report(done, self._total, "tokenizing")

        return tell

    def _tokenizer(self, splits: Sequence[Split], jobs: Sequence[Job]) -> tuple[str, str]:
        """(text of the tokenizer.json, its end-of-document token)."""
        config = self._config
        if config.tokenizer == "bytes":
            return byte_tokenizer_json(), END
        if config.tokenizer == "bpe":
            return train_bpe(self._training_text(splits, jobs), config.vocab_size), END
        path = Path(config.tokenizer).expanduser()
        return path.read_text(encoding="utf-8"), load_tokenizer(path).end

    def _training_text(self, splits: Sequence[Split], jobs: Sequence[Job]) -> Iterator[str]:
        """Text to train a tokenizer on: nothing held out, from jobs in the order of a hash."""
        done = 0
        for job in sorted(jobs, key=lambda job: make_key("tokenizer", job.number)):
            if done >= TOKENIZER_BYTES:
                share = done / self._total
                self.notes.append(f"data: the tokenizer was trained on {share:.0%} of the text")
                return
            yield from _train_text(self._sources[job.source], job, splits[job.source])
            done += job.num_bytes
            self._report(done, self._total, "training the tokenizer")

    def _note_vocabulary(self, found: int) -> None:
        if self._config.tokenizer == "bpe" and found < self._config.vocab_size:
            self.notes.append(
                f"data: the text has only {found} different tokens"
                f" (data.vocab_size = {self._config.vocab_size})"
            )

    def _note_files(self, encoded: Sequence[Encoded]) -> None:
        lossy = sorted({name for result in encoded for name in result.lossy})
        if lossy:
            self.notes.append(
                f"data: {_files(lossy)} not UTF-8 throughout; U+FFFD stands for what is not"
            )
        skipped = sorted({name for source in self._sources for name in source.skipped})
        if skipped:
            self.notes.append(f"data: {_files(skipped)} not text, and left out")


def _train_text(source: Source, job: Job, split: Split) -> Iterator[str]:
    for part in job.parts:
        for piece in pieces(source, part, split):
            if not isinstance(piece.content, str):
                raise _needs_tokenizer(source)
            if not piece.held_out:
                yield piece.content


def _files(names: Sequence[str]) -> str:
    few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"1 file ({few}) is" if len(names) == 1 else f"{len(names)} files ({few}) are"


def _needs_tokenizer(source: Source) -> ConfigError:
    return ConfigError(
        "data.tokenizer",
        "bpe",
        "the tokenizer.json that made the tokens of the sources",
        f"{source.request.path} holds tokens, not text.",
    )
