"""The syntax trees of all files of ``weft``, which several guards look through."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def trees() -> Mapping[str, ast.Module]:
    """By name of the file. Not to be changed."""
    paths = sorted((ROOT / "weft").rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
