"""What is offered for a name that is none: a slip of the pen, not what has another meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import ascii_lowercase

import pytest

from weft.cluster.cluster import catalogue
from weft.config.errors import ConfigErrors
from weft.config.load import load_config, recipe_names
from weft.config.names import nearest_name
from weft.config.schema import Node, root
from weft.models.registry import FAMILIES
from weft.optim.registry import OPTIMIZERS


def enumerated(node: Node) -> Iterator[tuple[str, ...]]:
    """Every list of allowed texts of the configuration."""
    if node.words:
        yield node.words
    for child in (*node.fields.values(), *node.variants.values(), *filter(None, [node.items])):
        yield from enumerated(child)


LISTS = {
    *enumerated(root()),
    *(tuple(family.sizes) for family in FAMILIES.values()),
    tuple(OPTIMIZERS),
    tuple(recipe_names()),
    tuple(name.lower() for name in catalogue()),
}


def test_there_are_lists_of_all_kinds() -> None:
    words = {word for words in LISTS for word in words}
    assert {"bf16", "cuda", "zb-h1", "gpt2", "demo-5m", "adamw", "cosine", "demo"} <= words


@pytest.mark.parametrize("words", sorted(LISTS), ids=lambda words: words[0])
def test_another_number_is_another_thing(words: tuple[str, ...]) -> None:
    """fp16 is not fp64, zb-h2 not zb-h1, llama3-7b not llama3-8b."""
    for word in words:
        for found in re.finditer("[0-9]+", word):
            other = f"{word[: found.start()]}{int(found[0]) * 3 + 1}{word[found.end() :]}"
            near = nearest_name(other, set(words) - {other})
            numbers, given = (re.findall("[0-9]+", each) for each in (near, other))
            assert not near or set(numbers) < set(given) or set(given) < set(numbers), (other, near)
            assert near != word


@pytest.mark.parametrize("words", sorted(LISTS), ids=lambda words: words[0])
def test_a_short_word_with_another_beginning_is_another_thing(words: tuple[str, ...]) -> None:
    """A gpu is no cpu, tsv no csv."""
    for word in (word for word in words if len(word) <= 4):
        others = {letter + word[1:] for letter in ascii_lowercase} - set(words)
        assert {nearest_name(other, words) for other in others} <= {"", *words} - {word}


@pytest.mark.parametrize("words", sorted(LISTS), ids=lambda words: words[0])
def test_a_slip_of_the_pen_is_still_found(words: tuple[str, ...]) -> None:
    """A letter twice; numbers stay."""
    for word in (word for word in words if re.search("[a-z]{3}", word)):
        slip = re.sub("([a-z]{2})([a-z])", r"\1\2\2", word, count=1)
        assert nearest_name(slip, words) == word


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("compute.precision=int8", "'fp8-delayed-fp64'. Of 8 bits or less there is fp8 alone."),
        ("compute.precision=float16", "Did you mean 'fp16'?"),
        ("compute.precision=bfloat16", "Did you mean 'bf16'?"),
        ("compute.precision=tf32", "TF32 is compute.precision=fp32 with compute.tf32=true."),
        ("compute.precision=float8", "Did you mean 'fp8'?"),
        ("compute.precision=fp128", "expected 'auto', 'fp64', 'fp32', 'bf16', 'fp16', 'fp8', "),
        ("compute.precision=bf61", "Did you mean 'bf16'?"),
        ("compute.device=gpu", "expected 'auto', 'cpu' or 'cuda'."),
        ("compute.device=tpu", "expected 'auto', 'cpu' or 'cuda'."),
        ("plan.schedule=zb-h2", "'dualpipe-v', or null."),
        ("plan.schedule=zbh1", "Did you mean 'zb-h1'?"),
    ],
)
def test_other_programs_values(pair: str, says: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config("debug", [pair])
    assert says in str(caught.value.errors[0])
    if "mean" not in says:
        assert "Did you mean" not in str(caught.value)
