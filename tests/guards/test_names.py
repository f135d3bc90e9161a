"""No family of models or devices, no vendor and no chip is named outside its own folder.

Seen in the syntax tree. Docstrings may name an example; recipes, data files and tests are not
looked at. The names are those of the registries and of the catalogue, so that a new one is kept to
the rule from its first day.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from guards.sources import trees

from weft.cluster.cluster import HOST, catalogue
from weft.models.registry import FAMILIES
from weft.platform.registry import PLATFORMS


@cache
def homes() -> dict[str, str]:
    """Name in small letters -> the folder or file that may use it; empty: none may."""
    found = {name: f"weft/models/{name}/" for name in FAMILIES}
    found |= {name: f"weft/platform/{name}.py" for name in PLATFORMS if name != HOST}
    for chip in catalogue().values():
        home = f"weft/platform/{chip.device}.py" if chip.device in PLATFORMS else ""
        series = chip.name.partition("-")[0]
        found |= {word.lower(): home for word in (chip.vendor, chip.name, series)}
    return found


def words(text: str) -> set[str]:
    """The text and its parts: ``LlamaForCausalLM``, ``_nvidia_smi``, ``H100-SXM``."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()
    return {text.lower(), *re.split(r"[^a-z0-9]+", apart)}


def texts(tree: ast.Module) -> Iterator[str]:
    """Every identifier and every text that is no docstring."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        fields = (value for _, value in ast.iter_fields(node))
        yield from (value for value in fields if isinstance(value, str))


def named(code: str, path: str = "weft/x.py") -> set[str]:
    return strange(ast.parse(code), path)


def strange(tree: ast.Module, path: str) -> set[str]:
    """What a file names of which it is not the home."""
    found = set().union(*map(words, set(texts(tree))))
    known = homes()
    return {
        name for name in found & known.keys() if not (path + "/").startswith(known[name] or "-")
    }


def test_names_stay_in_their_folders() -> None:
    strangers = {name: strange(tree, name) for name, tree in trees().items()}
    assert not {name: found for name, found in strangers.items() if found}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('if spec.family == "gpt2": pass', "gpt2"),
        ("from weft.models.llama.sizes import SIZES", "llama"),
        ("class LlamaThing: ...", "llama"),
        ("def f(cuda): ...", "cuda"),
        ('x = f"on {y} of Huawei"', "huawei"),
        ('MARKS = ("H100-SXM",)', "h100"),
        ('"""A docstring."""\nx.nvidia_smi()', "nvidia"),
    ],
)
def test_each_kind_of_name_is_seen(code: str, name: str) -> None:
    assert named(code) == {name}


def test_docstrings_and_homes_may_name_them() -> None:
    assert not named('"""Such as gpt2 on an H100."""\nx: int = 1\n"""Llama."""')
    assert not named('x = "llama"', "weft/models/llama/sizes.py")
    assert not named('x = "NVIDIA"', "weft/platform/cuda.py")
    assert named('x = "NVIDIA"', "weft/platform/cpu.py") == {"nvidia"}
