"""Prompts out of held-out text begin where a reader would."""

from pathlib import Path

import pytest

from weft.config.sections import DataConfig
from weft.data.beginnings import LENGTH, beginnings
from weft.data.prepare import prepare
from weft.data.tokenizer import ByteTokenizer


def found(folder: Path, text: str, held_out: float = 0.3, count: int = 2) -> tuple[str, ...]:
    (folder / "my.txt").write_text(text)
    config = DataConfig(
        path=str(folder / "my.txt"),
        tokenizer="bytes",
        seq_len=64,
        held_out=held_out,
        cache_dir=str(folder / "cache"),
    )
    prepared = prepare(config, 1, report=lambda done, total, what: None)
    return beginnings(prepared.held_out.open(), ByteTokenizer(), count)


def test_they_are_of_the_text_and_begin_a_word(tmp_path: Path) -> None:
    words = [f"word{n}" for n in range(2000)]
    text = "\n".join(" ".join(words[n : n + 20]) for n in range(0, 2000, 20))
    prompts = found(tmp_path, text)
    assert len(prompts) == 2
    for prompt in prompts:
        assert 20 < len(prompt) <= LENGTH
        assert f" {prompt} " in f" {text} ".replace("\n", " ") or prompt in text
        assert set(prompt.split()) <= set(words), "whole words"


@pytest.mark.parametrize(
    ("text", "held_out"),
    [("\n".join(f"line {n} of many words" for n in range(300)), 0.0), ("é" * 6000, 0.3)],
    ids=["nothing held out", "one word without an end"],
)
def test_text_without_places_to_begin(tmp_path: Path, text: str, held_out: float) -> None:
    prompts = found(tmp_path, text, held_out)
    if not held_out:
        assert prompts == ()
    else:
        assert all(set(prompt) == {"é"} and len(prompt) <= LENGTH for prompt in prompts)
