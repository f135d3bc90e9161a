"""What a tuning has found so far, line by line in a file that survives any end of its process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter
from pydantic_core import from_json

from weft.config.errors import ConfigError, ConfigErrors, show
from weft.report.run_files import flat
from weft.tune.candidate import Candidate
from weft.tune.tuner import Outcome

FILE = "trials.jsonl"
"""In the folder: a line for what is tuned, one for each plan, and one for each trial."""
VERSION = 2
LINES = "lines of JSON, as `weft tune` writes them"
_OUTCOMES = TypeAdapter(Outcome)


@dataclass
class _Numbers:
    """Of a plan, what tuning counts with."""

    predicted_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    work: dict[str, FiniteFloat]
    leans: dict[str, FiniteFloat]


_PLANS = TypeAdapter(list[_Numbers])
_LINE = TypeAdapter(dict[str, Any])
_TIMES = TypeAdapter(Annotated[float, Field(ge=1, allow_inf_nan=False)])
MOST_SAID = 8
"""Of what differs from the job that a tuning began with."""


@dataclass
class Record:
    """What the file holds."""

    file: Path
    asked: Mapping[str, Any]
    """By dotted key: what decides how plans do."""
    candidates: list[Candidate] = field(default_factory=list)
    times: float = 1.0
    """In so many times more or less 80 % of their forecasts are right."""
    outcomes: list[Outcome] = field(default_factory=list)
    final: list[Outcome] = field(default_factory=list)
    """Of the last comparison."""
    used_s: float = 0.0
    """Of all starts of the command, as far as trials were finished."""

    @staticmethod
    def opened(folder: Path, asked: Mapping[str, Any]) -> Record:
        """Go on with what is there, or begin.

        Raises:
            ConfigErrors: the folder is another job's.
            ConfigError: its file is none of this command.
        """
        file = folder / FILE
        record = Record(file, asked)
        lines = _whole_lines(file)
        if not lines:
            if not file.exists() and folder.exists() and any(folder.iterdir()):
                expected = "a folder that is new, or one of an earlier `weft tune`"
                raise ConfigError("--out", str(folder), expected)
            return record
        first = lines[0]
        if first.get("kind") != "job" or first.get("version") != VERSION:
            expected = "a folder whose trials.jsonl this version can read"
            raise ConfigError("--out", str(folder), expected, "Use another --out.")
        before = first.get("asked") or {}
        if not isinstance(before, dict):
            raise ConfigError("--out", f"{file}:1", LINES, "Use another --out.")
        _refuse_other_job(folder, before, asked)
        for number, line in enumerate(lines[1:], start=2):
            try:
                record._take(line)
            except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
                where = f"{file}:{number}"
                raise ConfigError("--out", where, LINES, "Use another --out.") from error
        return record

    def _take(self, line: Mapping[str, Any]) -> None:
        match line["kind"]:
            case "plans":
                _PLANS.validate_python(line["plans"])
                self.candidates = [Candidate.from_json(each) for each in line["plans"]]
                self.times = _TIMES.validate_python(line["times"])
            case "trial":
                self.outcomes.append(self._outcome(line["outcome"]))
                self.final = []  # of those before
            case "final":
                self.final = [self._outcome(each) for each in line["outcomes"]]
                ran = {each.candidate for each in self.outcomes if each.step_s is not None}
                if odd := {each.candidate for each in self.final} - ran:
                    raise ValueError(f"a comparison of plan {min(odd)}, which never ran")
        self.used_s = max(self.used_s, line.get("used_s", 0.0))

    def _outcome(self, data: object) -> Outcome:
        found = _OUTCOMES.validate_python(data)
        if not 0 <= found.candidate < len(self.candidates):
            raise ValueError(f"of plan {found.candidate}, which is not there")
        if found.step_s is not None and not 0 < found.step_s < inf:
            raise ValueError(f"a step of {found.step_s} s")
        if not found.within >= 0:
            raise ValueError(f"a ratio known to {found.within}")
        return found

    def begin(self) -> None:
        """Before anything is written: what was half written is cut off."""
        whole = self.file.read_bytes().rfind(b"\n") + 1 if self.file.exists() else 0
        if whole:
            os.truncate(self.file, whole)
            return
        self.file.unlink(missing_ok=True)
        self._write({"kind": "job", "version": VERSION, "asked": dict(self.asked)})

    def add_plans(self, candidates: Sequence[Candidate], times: float, used_s: float) -> None:
        """What trials are chosen from."""
        self.candidates, self.times = list(candidates), times
        plans = [each.as_json() for each in candidates]
        self._write({"kind": "plans", "used_s": used_s, "times": times, "plans": plans})

    def add(self, outcome: Outcome, used_s: float) -> None:
        """A trial is done."""
        self.outcomes.append(outcome)
        self.final = []
        self._write({"kind": "trial", "used_s": used_s, "outcome": asdict(outcome)})

    def add_final(self, outcomes: Sequence[Outcome], used_s: float) -> None:
        """The best, beside what it is compared with."""
        self.final = list(outcomes)
        every = [asdict(each) for each in outcomes]
        self._write({"kind": "final", "used_s": used_s, "outcomes": every})

    def _write(self, line: Mapping[str, Any]) -> None:
        self.used_s = max(self.used_s, line.get("used_s", 0.0))
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """Without one that a kill cut off."""
    if not file.exists():
        return []
    found = []
    *lines, _ = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            told = from_json(line, allow_inf_nan=False)
            found.append(_LINE.validate_python(told))
        except ValueError as error:
            where = f"{file}:{number}"
            raise ConfigError("--out", where, LINES, "Use another --out.") from error
    return found


def _refuse_other_job(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    first, second = (dict(flat(said, in_lists=True)) for said in (before, now))
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    if keys:
        hint = f"The tuning in {folder} began so. Use another --out for another job."
        raise ConfigErrors(
            ConfigError(key, second.get(key), show(first.get(key)), hint)
            for key in keys[:MOST_SAID]
        )
