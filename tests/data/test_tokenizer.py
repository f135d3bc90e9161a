"""Tokenizers: lossless, deterministic, the same as the library's own."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from weft.config.errors import ConfigError
from weft.data.tokenizer import (
    END,
    ByteTokenizer,
    FileTokenizer,
    byte_tokenizer_json,
    end_token_config,
    file_digest,
    load_tokenizer,
    train_bpe,
)

CORPUS = [
    "def square(x):\n    return x * x\n\n\n" * 20,
    "The quick brown fox jumps over the lazy dog. Ünïcödé, 漢字 and 🦊.\r\n" * 20,
]
VOCAB_SIZE = 330
BPE = train_bpe(CORPUS, VOCAB_SIZE)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@given(st.lists(TEXTS, max_size=4))
@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), FileTokenizer(BPE, END)], ids=["bytes", "bpe"]
)
def test_round_trip_loses_nothing(
    tokenizer: ByteTokenizer | FileTokenizer, texts: list[str]
) -> None:
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(tokens) for tokens in encoded] == texts
    for tokens in encoded:
        assert tokens.ndim == 1 and not (tokens == tokenizer.end_id).any()


@pytest.mark.parametrize(
    "text", [END, f"a{END}b", f"{END}{END}", "<|end|", "\0\x7f\ufeff", "\r\n \r"]
)
@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), FileTokenizer(BPE, END)], ids=["bytes", "bpe"]
)
def test_text_that_spells_the_end_token_is_text(
    tokenizer: ByteTokenizer | FileTokenizer, text: str
) -> None:
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.end_id not in tokens.tolist()
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.end_id]) == text


def test_batches_give_what_the_library_gives_one_by_one() -> None:
    ours, library = FileTokenizer(BPE, END), Library.from_str(BPE)
    texts = [text[i : i + 97] for text in CORPUS for i in range(0, len(text), 53)]
    for tokens, text in zip(ours.encode_batch(texts), texts, strict=True):
        assert tokens.tolist() == library.encode(text).ids


def test_bytes_are_utf8_and_the_library_agrees(tmp_path: Path) -> None:
    text = "".join(map(chr, range(256))) + "漢字🦊" + CORPUS[0]
    (tokens,) = ByteTokenizer().encode_batch([text])
    assert tokens.tolist() == list(text.encode())
    library = Library.from_str(byte_tokenizer_json())
    assert library.encode(text).ids == list(text.encode())
    assert library.decode(list(text.encode())) == text
    assert library.token_to_id(END) == 256 and library.get_vocab_size() == 257
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.json"), ByteTokenizer)


def _train(connection: object) -> None:
    connection.send_bytes(train_bpe(CORPUS, VOCAB_SIZE).encode())  # type: ignore[attr-defined]


def test_training_is_deterministic_across_processes() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(theirs,))
    process.start()
    assert ours.recv_bytes().decode() == BPE
    process.join()


def test_the_vocabulary_has_all_bytes_and_no_more_than_asked() -> None:
    assert FileTokenizer(BPE, END).vocab_size == VOCAB_SIZE
    assert FileTokenizer(train_bpe(["ab"], 400), END).vocab_size <= 258
    assert FileTokenizer(train_bpe(CORPUS, 257), END).vocab_size == 257


def write(folder: Path, **changes: object) -> Path:
    data = {**json.loads(BPE), **changes}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


def test_the_end_token_named_beside_the_file_wins(tmp_path: Path) -> None:
    tokens = [
        {"id": i, "content": c, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i, c in ((0, END), (VOCAB_SIZE, "<|stop|>"))
    ]
    path = write(tmp_path, added_tokens=tokens)
    assert load_tokenizer(path).end == END
    (tmp_path / "tokenizer_config.json").write_text(end_token_config("<|stop|>"))
    assert (load_tokenizer(path).end, load_tokenizer(path).end_id) == ("<|stop|>", VOCAB_SIZE)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}}')
    assert load_tokenizer(path).end_id == VOCAB_SIZE
    assert load_tokenizer(path).vocab_size == VOCAB_SIZE + 1


def test_refusals(tmp_path: Path) -> None:
    path = write(tmp_path, added_tokens=[])
    expected = "a tokenizer with an end-of-document token, such as <|end|>, <|endoftext|>, "
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(path)
    assert expected in str(caught.value) and "tokenizer_config.json" in caught.value.hint
    for content in (
        "",
        "[]",
        "{}",
        '{"model": {"type": "Nonsense"}, "added_tokens": [{"content": "</s>"}]}',
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match='"bpe", "bytes" or the path of a tokenizer'):
            load_tokenizer(path)
    for function in (load_tokenizer, file_digest):
        with pytest.raises(ConfigError, match="No such file"):
            function(tmp_path / "absent.json")


def test_byte_decoding_never_fails() -> None:
    assert ByteTokenizer().decode(np.array([0xFF, 65, 256, 66])) == "\ufffdAB"
