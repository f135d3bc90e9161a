"""Tokenizers from elsewhere: what they would do to a run that nobody sees, and damaged files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from data_cases import prepared, stream
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from weft.config.errors import ConfigError
from weft.data.tokenizer import CONFIG_FILE, load_tokenizer, tokenizer_digest

PARTS = [("</s>", -1.0), ("a", -1.0), ("b", -1.0), ("<", -2.0), ("/", -2.0), ("s", -2.0)]
TEXT = "abs/ab <ab> sba\n" * 400


def kept(folder: Path, library: Library, **model: object) -> Path:
    path = folder / "tokenizer.json"
    data = json.loads(library.to_str())
    data["model"] |= model
    path.write_text(json.dumps(data))
    return path


def unigram(folder: Path, *, unk: int | None = 0) -> Path:
    library = Library(models.Unigram([("<unk>", 0.0), *PARTS], unk))
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["</s>", "<unk>"])
    return kept(folder, library)


def by_bytes(folder: Path, **model: object) -> Path:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<A>", "<B>", "</s>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    library.train_from_iterator(["the text that there is " * 50], trainer)
    return kept(folder, library, **model)


def test_no_word_of_the_vocabulary_ends_a_document(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(unigram(tmp_path))
    texts = ["a</s>b", "</s></s>", "ab"]
    encoded = tokenizer.encode_batch([text.replace(">", "") for text in texts])
    whole = tokenizer.encode_batch(texts)
    assert all(tokenizer.end_id not in tokens for tokens in (*encoded, *whole))
    assert whole[0].tolist() == [2, 4, 5, 6, 0, 3]
    assert whole[2].tolist() == [2, 3]


def test_text_without_a_token_is_refused_by_the_file(tmp_path: Path) -> None:
    path = unigram(tmp_path, unk=None)
    (tmp_path / "text").write_text(TEXT + "ü\n")
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "text", tmp_path / "cache", tokenizer=str(path))
    assert str(caught.value).startswith(f"data.tokenizer = '{path}': expected a tokenizer with a")


def test_what_a_tokenizer_loses_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT.replace("s", "ü"))
    lossy = prepared(
        tmp_path / "text", tmp_path / "lossy", held_out=0, tokenizer=str(unigram(tmp_path))
    )
    said = [note for note in lossy.notes if "can be read from its tokens again" in note]
    assert said and said[0].startswith("data: only ")
    whole = prepared(tmp_path / "text", tmp_path / "whole", tokenizer=str(by_bytes(tmp_path)))
    assert whole.notes == ()


def test_dropout_is_off(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(by_bytes(tmp_path, dropout=0.5))
    found = {tuple(tokenizer.encode_batch(["the text that there is"])[0].tolist()) for _ in "x" * 9}
    assert len(found) == 1


def test_another_end_token_makes_other_data(tmp_path: Path) -> None:
    path = by_bytes(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    ends = []
    for end in ("<A>", "<B>"):
        (tmp_path / CONFIG_FILE).write_text(json.dumps({"eos_token": end}))
        data = prepared(tmp_path / "text", tmp_path / "cache", tokenizer=str(path))
        ends.append((data.end_id, int(stream(data, "train")[-1])))
    assert ends == [(0, 0), (1, 1)]


def beside(text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / CONFIG_FILE).write_bytes(text)


def instead(text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "tokenizer.json").write_bytes(text)


def changed(**data: object) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **data}))

    return make


def far_away(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["far"] = 10**9
    path.write_text(json.dumps(data))


DAMAGED = {
    "an empty file beside it": beside(b""),
    "a list beside it": beside(b"[]"),
    "no text beside it": beside(b"\xff\xfe\0"),
    "no text": instead(b"\xff\xfe\0"),
    "deep": instead(b"[" * 100_000),
    "words for tokens": changed(added_tokens=["</s>"]),
    "a word for tokens": changed(added_tokens="x"),
    "an id far away": far_away,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_refused_by_their_name(tmp_path: Path, damage: str) -> None:
    path = by_bytes(tmp_path)
    DAMAGED[damage](tmp_path)
    (tmp_path / "text").write_text(TEXT)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = '"):
        load_tokenizer(path)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = '"):
        prepared(tmp_path / "text", tmp_path / "cache", tokenizer=str(path))


def test_the_digest_is_of_both_files(tmp_path: Path) -> None:
    path = by_bytes(tmp_path)
    alone = tokenizer_digest(path)
    (tmp_path / CONFIG_FILE).write_text('{"eos_token": "<A>"}')
    named = tokenizer_digest(path)
    (tmp_path / CONFIG_FILE).write_text('{"eos_token": {"content": "<A>"}, "other": 1}')
    assert alone != named == tokenizer_digest(path)
