"""Predicted against published: step time, memory, and the order of plans.

    python -m benchmarks.prediction --records DIR [--fit ROUNDS] [--no-cross-validation] [--json]
    python -m benchmarks.prediction --records DIR --leave-out family|chip|year [--json]
    python -m benchmarks.prediction --records DIR --keep-intervals

``DIR`` holds ``throughput.json``, ``memory.json`` and ``hetero.json``, any of them; chips and
architectures may be new. Every record is predicted from what it says of model, plan and chips with
constants of chip classes and software generations (``prediction_constants.json``; ``--fit`` starts
from them and fits again, so it is for the development records alone). Nothing of a record that was
measured enters its prediction.

- ``step_time:GROUP``, ``memory:GROUP``: median absolute relative error; spread is the 90th
  percentile.
- ``rank:GROUP``: Spearman's correlation of predicted and measured step time inside a group, where
  it has at least four different ones.
- ``planned:CLUSTER``: the time of the plan that the planner chooses for a cluster on which others
  tried plans, as a part of the best tried plan's, by the same model; ``rank:planned:...``: that
  model's order of the plans; ``fits:...``: trials that did or did not fit as predicted.
- ``cross_validated:...``: the same errors with constants fitted without the family;
  ``cross_validated_models:...``: without a fifth of the models of every family;
  ``cross_validated_plans:...``: of all runs.
- ``left_out_family:...`` (``chip``, ``year``), the headline: each family (kind of chip, year) with
  constants that were chosen and fitted without it; ``:families`` is the median over families of
  their medians, its spread their 90th percentile; ``:inside`` is the part of runs inside the
  interval that the others' errors give.
- ``unpredicted``: how many records lack something, with names and reasons.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.prediction_fit import (
    families,
    fit,
    models,
    plans,
    problem,
    without_each,
    worth_having,
)
from benchmarks.prediction_model import (
    Constants,
    Predict,
    kept_constants,
    memory_of,
    names_for,
    time_of,
    write_constants,
)
from benchmarks.prediction_nested import (
    APART,
    LEVELS,
    Apart,
    LeftOut,
    held_by_others,
    left_out,
    spreads,
)
from benchmarks.published import Run, read_memory, read_times
from benchmarks.published_chips import broken
from benchmarks.trials import Trial, by_cluster, chosen_seconds, fits, planned_seconds, read_trials
from weft.cost.interval import FILE as INTERVALS

FEWEST_TO_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One record and its prediction."""

    run: Run
    predicted: float

    @property
    def error(self) -> float:
        """Relative and absolute."""
        return abs(self.predicted / self.run.measured - 1)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks; equal values share theirs."""
    ranks = [_ranks(np.array(values)) for values in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.array([(values < value).sum() + (values == value).sum() / 2 for value in values])


def predict_all(runs: Iterable[Run], predict: Predict, constants: Constants) -> list[Scored]:
    """Every run's prediction."""
    return [Scored(run=run, predicted=predict(run, constants)) for run in runs]


def rows_of(kind: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """Errors by group, then of all."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[one.run.group].append(one)
    rows = [_row(f"{kind}:{group}", _errors(each)) for group, each in sorted(groups.items())]
    return [*rows, _row(f"{kind}:all", _errors(scored))] if scored else rows


def _errors(of: Iterable[Scored | LeftOut]) -> list[float]:
    return [one.error for one in of]


def _row(name: str, errors: Sequence[float]) -> dict[str, Any]:
    row = _entry(name, float(np.median(errors)), "relative error", float(np.quantile(errors, 0.9)))
    return {**row, "records": len(errors)}


def _entry(name: str, ours: float, unit: str, spread: float | None) -> dict[str, Any]:
    return {"name": name, "ours": ours, "theirs": {}, "ratio": None, "unit": unit, "spread": spread}


def ranks_of(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """Spearman's correlation inside each group that has an order to find."""
    rows = []
    for group in sorted({one.run.group for one in scored}):
        members = [one for one in scored if one.run.group == group]
        rows += _rank(f"rank:{group}", members)
    return rows


def _rank(name: str, members: Sequence[Scored]) -> list[dict[str, Any]]:
    measured = [one.run.measured for one in members]
    if len(set(measured)) < FEWEST_TO_RANK:
        return []
    found = spearman([one.predicted for one in members], measured)
    return [{**_entry(name, found, "Spearman", None), "records": len(members)}]


def trial_rows(trials: Sequence[Trial], constants: Constants) -> list[dict[str, Any]]:
    """Of every cluster on which plans were tried: our plan beside theirs, and who fits."""
    rows = []
    for group, members in by_cluster(trials).items():
        ran = [trial for trial in members if not trial.failed]
        seconds = [planned_seconds(trial, constants) for trial in ran]
        scored = [
            Scored(run=trial.run, predicted=one) for trial, one in zip(ran, seconds, strict=True)
        ]
        rows += _rank(f"rank:planned:{group}", scored)
        chosen = chosen_seconds(ran[0], constants) if ran else None
        if chosen:
            row = _entry(f"planned:{group}", chosen / min(seconds), "of the best tried time", None)
            rows.append({**row, "records": len(ran)})
        right = [fits(trial, constants) != trial.failed for trial in members]
        row = _entry(f"fits:{group}", sum(right) / len(right), "of trials told right", None)
        rows.append({**row, "records": len(right)})
    return rows


@dataclass(frozen=True)
class Task:
    """One quantity: its records, and how it is predicted."""

    kind: str
    runs: Sequence[Run]
    predict: Predict
    memory: bool


def cross_validated(task: Task, constants: Constants) -> list[dict[str, Any]]:
    """Errors of records with constants fitted to the others: other families, other models."""
    names = [name for name in names_for(task.runs, memory=task.memory) if name in constants]
    around = problem(task.runs, task.predict, constants, names)
    rows = []
    apart = {"": families, "_models": models, "_plans": plans}
    for label, folds in ((name, of(task.runs)) for name, of in apart.items()):
        scored = []
        for inside, fitted in without_each(around, folds):
            members = [run for run, here in zip(task.runs, inside, strict=True) if here]
            scored += predict_all(members, task.predict, fitted)
        rows += rows_of(f"cross_validated{label}:{task.kind}", scored)
    return rows


def left_out_rows(task: Task, constants: Constants, by: Apart) -> list[dict[str, Any]]:
    """Errors of what no constant has seen: by what was left out together, over families, of all."""
    names = names_for(task.runs, memory=task.memory)
    around = problem(task.runs, task.predict, constants, names)
    found = list(left_out(task.runs, task.predict, around, by))
    label, folds, families = f"left_out_{by}:{task.kind}", defaultdict(list), defaultdict(list)
    for one in found:
        folds[one.fold].append(one)
        families[one.run.group].append(one)
    rows = [_row(f"{label}:{fold}", _errors(each)) for fold, each in folds.items()]
    medians = [float(np.median(_errors(each))) for each in families.values()]
    rows += [_row(f"{label}:families", medians), _row(f"{label}:all", _errors(found))]
    held = held_by_others(found)
    part = _entry(f"{label}:inside", float(np.mean(held)), "runs inside their intervals", None)
    return [*rows, {**part, "records": len(held)}]


def fitted_to(task: Task, rounds: int) -> Constants:
    """The constants worth having, fitted to a task's records."""
    names = names_for(task.runs, memory=task.memory)
    everything = fit(task.runs, task.predict, {}, names, rounds=rounds)
    around = problem(task.runs, task.predict, everything, names)
    names = worth_having(task.runs, around)
    return fit(task.runs, task.predict, everything, names, rounds=rounds)


@dataclass(frozen=True)
class Records:
    """A folder."""

    tasks: list[Task]
    trials: list[Trial]
    lacking: list[tuple[str, str]]
    """Names, and what each lacks."""


def read(folder: Path) -> Records:
    """What can be predicted, and what not and why."""
    found = [*read_times(folder), *read_trials(folder)]
    trials = [one for one in found if isinstance(one, Trial)]
    times = [one for one in found if isinstance(one, Run)]
    times += [trial.run for trial in trials if not trial.failed]
    memory = list(read_memory(folder))
    tasks = [
        Task("step_time", times, time_of, memory=False),
        Task("memory", [one for one in memory if isinstance(one, Run)], memory_of, memory=True),
    ]
    lacking = [one for one in [*found, *memory] if not isinstance(one, Run | Trial)]
    return Records(tasks, trials, [*broken(folder), *lacking])


def measure_left_out(folder: Path, by: Apart) -> list[dict[str, Any]]:
    """Rows of the nested test, and what could not be predicted."""
    records, constants = read(folder), kept_constants()
    tasks = [task for task in records.tasks if len({APART[by](run) for run in task.runs}) > 1]
    rows = [row for task in tasks for row in left_out_rows(task, constants, by)]
    return [*rows, _unpredicted(records)]


def keep_intervals(folder: Path) -> None:
    """Write how wide intervals are: as the widest of the three nested tests, by what is unknown."""
    records, constants = read(folder), kept_constants()
    kept = json.loads(INTERVALS.read_text("utf-8"))
    for task in records.tasks:
        around = problem(
            task.runs, task.predict, constants, names_for(task.runs, memory=task.memory)
        )
        every = [spreads(list(left_out(task.runs, task.predict, around, by))) for by in APART]
        widest = np.exp(np.max(every, axis=0))
        widths = dict(zip(LEVELS, (round(float(width), 3) for width in widest), strict=True))
        kept["memory" if task.memory else "time"] |= widths
    INTERVALS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def measure(folder: Path, *, rounds: int, validate: bool) -> list[dict[str, Any]]:
    """All rows."""
    records = read(folder)
    constants: Constants = {} if rounds else kept_constants()
    rows: list[dict[str, Any]] = []
    for task in records.tasks:
        if rounds and task.runs:
            constants = {**constants, **fitted_to(task, rounds)}
        scored = predict_all(task.runs, task.predict, constants)
        rows += rows_of(task.kind, scored)
        rows += ranks_of(scored) if task.kind == "step_time" else []
        if validate and len({run.group for run in task.runs}) > 1:
            rows += cross_validated(task, constants)
    if rounds:
        write_constants(constants)
    rows += trial_rows(records.trials, constants)
    return [*rows, _unpredicted(records)]


def _unpredicted(records: Records) -> dict[str, Any]:
    reasons = [{"record": name, "lacks": reason} for name, reason in records.lacking]
    return {**_entry("unpredicted", len(reasons), "records", None), "reasons": reasons}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """For people."""
    for row in rows:
        if row["name"] == "unpredicted":
            print(f"not predicted: {row['ours']} records")
            for lack in row["reasons"]:
                print(f"  {lack['record']}: {lack['lacks']}")
        elif row["unit"] == "Spearman":
            print(f"{row['name']:48} {row['ours']:7.3f}          {row['records']:4} records")
        elif row["spread"] is None:
            print(f"{row['name']:48} {row['ours']:7.1%}          {row['records']:4} {row['unit']}")
        else:
            ours, spread = row["ours"], row["spread"]
            print(f"{row['name']:48} {ours:7.1%} {spread:7.1%}  {row['records']:4} records")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--records", type=Path, required=True, help="folder of records")
    parser.add_argument(
        "--fit", type=int, default=0, help="rounds of fitting, then keep the result"
    )
    parser.add_argument("--leave-out", choices=get_args(Apart), help="the nested test alone")
    parser.add_argument("--keep-intervals", action="store_true", help="write them for forecasts")
    parser.add_argument("--no-cross-validation", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.records.is_dir():
        parser.error(f"--records {options.records}: expected a folder")
    if options.keep_intervals:
        keep_intervals(options.records)
        return
    if options.leave_out:
        rows = measure_left_out(options.records, options.leave_out)
    else:
        validate = not options.no_cross_validation
        rows = measure(options.records, rounds=options.fit, validate=validate)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)


if __name__ == "__main__":
    main()
