"""Every recipe as it resolves: a changed default or recipe shows up in the diff of a file."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from weft.config.axes import NAMES
from weft.config.batch import derive_batch
from weft.config.load import load_config, recipe_names, recipe_summaries, to_yaml

ALONE = {f"{axis}: 1" for axis in NAMES}
"""Not shown: a new axis changes no recipe."""


@pytest.mark.parametrize("name", recipe_names())
def test_golden(name: str, snapshot: SnapshotAssertion) -> None:
    config = load_config(name).config
    text = "".join(line for line in to_yaml(config).splitlines(True) if line.strip() not in ALONE)
    note = derive_batch(config.batch, config.plan.batch_shares or (1,)).note
    assert f"{text}# {note}\n" == snapshot


def test_the_recipes_that_the_manual_names() -> None:
    assert recipe_names() == ["debug", "demo", "demo-gpt2"]


def test_each_has_one_line_for_the_list() -> None:
    for line in recipe_summaries().values():
        assert 20 < len(line) <= 95
        assert not line.startswith("#")
