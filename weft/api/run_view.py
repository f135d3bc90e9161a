"""A run's folder as Python sees it: numbers to plot, what was asked for, what was saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config.errors import ConfigError
from weft.plan.plan import Plan
from weft.report.metrics import EvalMetrics, StepMetrics
from weft.report.run_files import RunFiles, number, read_run
from weft.report.units import gib, nats
from weft.train.run_list import RunFacts, is_run, run_facts

if TYPE_CHECKING:
    from weft.checkpoint.listing import Listed

WIDTH, HEIGHT = 480, 120
"""Of the curve in a notebook, pixels."""


class Run:
    """A run to look at, while it goes on or afterwards; made from the path of its folder.

    It is read when it is made; make it again to see what has happened since. In a notebook it shows
    itself as a table with the curve of its loss.

    Args:
        path: The folder that ``weft train --out`` was given, or ``runs/NAME-TIME``.

    Raises:
        ConfigError: there is no run in that folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        if not is_run(self.folder):
            raise ConfigError("path", str(path), "the folder of a run")
        self._files: RunFiles = read_run(self.folder)
        self.facts: RunFacts = run_facts(self.folder)

    @cached_property
    def metrics(self) -> dict[str, list[Any]]:
        """By name, a value for each optimizer step: ``step``, ``loss`` (nats a token),
        ``grad_norm``, ``lr``, ``step_time_s``, ``tokens_per_s``, ``memory_gib``, ``mfu`` and so on.

        ``pandas.DataFrame(run.metrics)`` is a table of them. What is not finite is NaN.
        """
        return _columns(StepMetrics, self._files.steps)

    @cached_property
    def evaluations(self) -> dict[str, list[Any]]:
        """By name, a value for each look at held-out text: ``step``, ``eval_loss`` and so on."""
        return _columns(EvalMetrics, self._files.evals)

    @property
    def loss(self) -> float | None:
        """On held-out text at the end, nats a token; before that, of the last step. None: neither
        is known."""
        return self.facts.loss if self.facts.held_out is None else self.facts.held_out

    @property
    def config(self) -> Mapping[str, object]:
        """Every value that was asked for, by dotted key: ``run.config["optim.lr"]``."""
        return self._files.config

    @property
    def plan(self) -> Plan | None:
        """Which rank does what; None where the folder says none."""
        return self._files.plan

    @property
    def summary(self) -> Mapping[str, Any]:
        """What the run came to: ``held_out``, ``baselines``, ``samples`` and so on. Empty before
        its end."""
        return self._files.summary

    @property
    def checkpoints(self) -> Sequence[Listed]:
        """What was saved, by step: each with ``folder``, ``step``, ``bytes``, ``problem``."""
        return self._files.checkpoints

    @property
    def problems(self) -> Sequence[str]:
        """Files of the run that are there and cannot be read, and why."""
        return self._files.problems

    def to_pandas(self) -> Any:
        """``metrics`` as a ``pandas.DataFrame`` with the step as its index.

        Raises:
            ConfigError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            hint = "`pip install pandas`, or use `metrics`, a dict of lists."
            raise ConfigError("pandas", None, "an installed package", hint)
        pandas = import_module("pandas")
        return pandas.DataFrame(self.metrics).set_index("step")

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {nats(self.loss)}"
        return f"<weft.Run {self.folder}: {self.facts.state}, {self._steps()}{loss}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        saved = number(self.summary, "held_out", "loss")
        rows = {
            "state": self.facts.state,
            "steps": self._steps().removeprefix("step "),
            "loss of the last step": _shown(self.facts.loss, "nats a token"),
            "held-out loss": _shown(saved, "nats a token"),
            "plan": self.facts.plan,
            "changed": self.facts.changed,
            "size": gib(self.facts.bytes),
            "checkpoints": ", ".join(str(each.step) for each in self.checkpoints) or "none",
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(key)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for key, value in rows.items()
        )
        title = f"<caption>{escape(str(self.folder))}</caption>"
        return f"<table>{title}{cells}</table>{_curve(self.metrics['step'], self.metrics['loss'])}"

    def _steps(self) -> str:
        of = "" if self.facts.steps is None else f"/{self.facts.steps}"
        return f"step {self.facts.step}{of}"


def _columns(
    kind: type[StepMetrics] | type[EvalMetrics], records: Sequence[StepMetrics | EvalMetrics]
) -> dict[str, list[Any]]:
    rows = [asdict(record) for record in records]
    return {field.name: [row[field.name] for row in rows] for field in fields(kind)}


def _shown(value: float | None, unit: str) -> str:
    return "not known" if value is None else f"{value:.4f} {unit}"


def _curve(steps: Sequence[int], losses: Sequence[float]) -> str:
    """The loss over the step as a small picture; empty with fewer than two finite numbers."""
    points = [(s, y) for s, y in zip(steps, losses, strict=True) if math.isfinite(y)]
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, up = max(last - first, 1), (high - low) or 1.0
    path = " ".join(
        f"{(s - first) / across * WIDTH:.1f},{(high - y) / up * HEIGHT:.1f}" for s, y in points
    )
    words = f"loss from {points[0][1]:.3f} at step {first} to {points[-1][1]:.3f} at step {last}"
    return (
        f"<svg viewBox='-4 -4 {WIDTH + 8} {HEIGHT + 8}' width='{WIDTH}' role='img'>"
        f"<title>{words}</title><polyline points='{path}' fill='none' stroke='currentColor'"
        f" stroke-width='1.5'/></svg><div>{words}, nats a token</div>"
    )
