"""Text to token ids and back: bytes, a byte-pair tokenizer trained here, or one from a file.

Every tokenizer is kept as a ``tokenizer.json`` that the ``tokenizers`` library reads, so an
exported model carries its own. Only ``bytes`` works without that library.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.config.errors import ConfigError
from weft.data.pieces import Tokens

END = "<|end|>"
"""The end-of-document token of the tokenizers that are made here."""
MADE_HERE = ("bpe", "bytes")
"""Values of ``data.tokenizer`` that need no file."""
CONFIG_FILE = "tokenizer_config.json"
"""Beside a tokenizer.json; names its end-of-document token as ``eos_token``."""
_KNOWN_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MOST_IDS = 1 << 24
"""A model has a row for each: more are a mistake."""


class ByteTokenizer:
    """Each byte of UTF-8 is its own id; 256 ends a document."""

    vocab_size = 257
    end_id = 256
    end = END

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: npt.ArrayLike) -> str:
        """The text of ids ``[n]``; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(tokens)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library.

    All ids are below ``vocab_size``. The end-of-document token is ``end_id``, written ``end``; no
    text contains it, whatever the text says. The same text gives the same tokens. ``encode_batch``
    uses as many threads as RAYON_NUM_THREADS and TOKENIZERS_PARALLELISM allow.
    """

    def __init__(self, text: str, end: str, path: Path | None = None) -> None:
        """``path``: of its file, for messages."""
        from tokenizers import Tokenizer as Library

        self._path, self._tokenizer = path, Library.from_str(text)
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        # Text that spells a special token is text.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        end_id = self._tokenizer.token_to_id(end)
        assert end_id is not None, f"the tokenizer has no {end}"
        self.end_id = end_id
        self.end = end

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Token ids ``[n]`` of each text, without any special tokens.

        Raises ConfigError: it has no token for what a text holds.
        """
        found = self._encoded(texts)
        for number, ids in enumerate(found):
            if (ids == self.end_id).any():
                found[number] = self._without_end(texts[number])
        return found

    def _encoded(self, texts: Sequence[str]) -> list[Tokens]:
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing more special
            expected = "a tokenizer with a token for all text"
            hint = f"{error}. Name the one for what it does not know, as unk_token or unk_id."
            raise ConfigError("data.tokenizer", str(self._path), expected, hint) from error
        return [np.array(one.ids, dtype=np.int32) for one in encoded]

    def _without_end(self, text: str) -> Tokens:
        """Ids of a text that spells the end token, which the vocabulary has as a word: it is cut
        inside the word."""
        middle = max(len(self.end) // 2, 1)
        first, *others = text.split(self.end)
        parts = [first]
        for other in others:
            parts[-1] += self.end[:middle]
            parts.append(self.end[middle:] + other)
        ids = np.concatenate(self._encoded(parts))
        return np.asarray(ids[ids != self.end_id])

    def decode(self, tokens: npt.ArrayLike) -> str:
        """The text of ids ``[n]``; end-of-document tokens give nothing."""
        ids = np.asarray(tokens).tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


Tokenizer = ByteTokenizer | FileTokenizer


def copy_tokenizer(file: Path, folder: Path) -> None:
    """Put a ``tokenizer.json`` into a folder, with the file beside it that names its end token."""
    for source in (file, file.with_name(CONFIG_FILE)):
        if source.is_file():
            shutil.copyfile(source, folder / source.name)


def tokenizer_digest(path: Path) -> str:
    """Hash of a ``tokenizer.json`` and of the end token that is named beside it.

    Raises ConfigError: there is no such file, or what is beside it cannot be read.
    """
    named = json.dumps([file_digest(path), _named_end(path)])
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def file_digest(path: Path) -> str:
    """Hash of a ``tokenizer.json``.

    Raises ConfigError: there is no such file.
    """
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise _unusable(path, f'{error.strerror}; "bpe" and "bytes" need no file.') from None


def end_token_config(end: str) -> str:
    """The text of a ``CONFIG_FILE`` that names the end-of-document token."""
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})


def load_tokenizer(path: Path, named: Path | None = None) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``.

    ``named``: the file that it is a copy of, for messages.

    Raises ConfigError: it is not one, or has no end-of-document token.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, f"{error}.") from None
    if text == byte_tokenizer_json():
        return ByteTokenizer()
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise _unusable(path, "It has no model inside.")
    end = _end_token(path, data)
    try:
        found = FileTokenizer(text, end, named or path)
    except Exception as error:  # the library raises nothing more special
        raise _unusable(path, f"{error}.") from error
    if found.vocab_size > MOST_IDS:
        raise _unusable(path, f"It has the id {found.vocab_size - 1}, and {MOST_IDS} are the most.")
    return found


def _unusable(path: Path, hint: str) -> ConfigError:
    expected = '"bpe", "bytes" or the path of a tokenizer.json'
    return ConfigError("data.tokenizer", str(path), expected, hint)


def _end_token(path: Path, data: dict[str, Any]) -> str:
    """The end-of-document token: as the file beside it says, or one of the usual ones."""
    added = data.get("added_tokens")
    every = added if isinstance(added, list) else []
    special = [token.get("content") for token in every if isinstance(token, dict)]
    for token in (_named_end(path), *_KNOWN_ENDS):
        if token in special:
            return str(token)
    expected = f"a tokenizer with an end-of-document token, such as {', '.join(_KNOWN_ENDS[:3])}"
    hint = f"A {CONFIG_FILE} beside it may name its own as eos_token."
    raise ConfigError("data.tokenizer", str(path), expected, hint)


def _named_end(path: Path) -> str | None:
    """As the file beside a ``tokenizer.json`` names it, if it does."""
    beside = path.with_name(CONFIG_FILE)
    if not beside.is_file():
        return None
    try:
        data = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, f"{beside}: {error}.") from None
    if not isinstance(data, dict):
        raise _unusable(path, f"{beside}: not an object.")
    named = data.get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    return named if isinstance(named, str) else None


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level byte-pair tokenizer; the result is the text of its ``tokenizer.json``.

    The vocabulary is ``END``, the 256 bytes and as many merges as fit ``vocab_size`` (at least
    257) and occur. The same texts in the same order give the same tokenizer.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=False))


def byte_tokenizer_json() -> str:
    """``ByteTokenizer`` as the ``tokenizers`` library would write it."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": 256, "content": END, "normalized": False, "special": True}
    nothing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model: dict[str, Any] = {
        "type": "BPE",
        **dict.fromkeys(nothing),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
        "merges": [],
    }
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": model,
    }
    return json.dumps(data, ensure_ascii=False)


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it prints."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]
