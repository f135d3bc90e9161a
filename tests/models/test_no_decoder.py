"""A family whose stages are no decoders: it is trained to the end, and continues no text."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from cli import commands

PACKAGE = '''
"""Stages of the first family, of which nothing says that they are decoders."""

from dataclasses import replace

from weft.models.registry import FAMILIES


class Wrapped:
    """One of them; it has what the protocol asks for."""

    def __init__(self, *given, **asked):
        self.inner = FAMILIES["llama"].model()(*given, **asked)
        self.module, self.units = self.inner.module, self.inner.units
        self.spans_samples = self.inner.spans_samples
        self.compute = self.inner.compute


class Task:
    """Its task, which asks for decoders."""

    def __init__(self):
        self.inner = FAMILIES["llama"].task()

    def objective(self, last):
        return self.inner.objective(last.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


LLAMA = FAMILIES["llama"]
SIZES = {name: replace(size, family="wrapped") for name, size in LLAMA.sizes.items()}
FAMILY = replace(
    LLAMA, name="wrapped", order=9, sizes=SIZES, model=lambda: Wrapped, task=Task, reference=None
)
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tiny.yaml and text.txt, and a package that brings ``wrapped``."""
    commands.write_inputs(tmp_path)
    package = tmp_path / "installed/wrapped_for_weft-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: wrapped-for-weft\nVersion: 1.0\n"
    )
    (package / "entry_points.txt").write_text("[weft.families]\nwrapped = wrapped_family:FAMILY\n")
    (package.parent / "wrapped_family.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_stages_that_are_no_decoders_train_to_the_end(here: Path) -> None:
    """As those that are, in a run without samples; what would continue its text says why not."""
    environment = {"PYTHONPATH": os.pathsep.join([str(here / "installed")])}
    losses = []
    for family in ("llama", "wrapped"):
        arguments = (f"model.family={family}", "plan.shares=[1,1]", "--steps", "3")
        with commands.started(
            here, family, *arguments, program=commands.COLD, environment=environment
        ) as command:
            code, _, errors = command.finish()
        assert code == 0, errors
        losses.append([record["loss"] for record in commands.steps(here / family)])
        summary = json.loads((here / family / "summary.json").read_text())
        assert bool(summary["samples"]) == (family == "llama")
    assert losses[0] == losses[1]
    words = (*commands.COLD, "generate", "wrapped", "--prompt", "a")
    asked = subprocess.run(
        words,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert asked.returncode == 2
    assert "model.family = 'wrapped': expected a family of decoders" in asked.stderr
