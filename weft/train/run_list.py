"""The runs of a folder: what each came to, whether it is at work, and what may be deleted of it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import yaml

from weft.checkpoint.place import are_far
from weft.config.errors import ConfigError
from weft.plan.plan import Plan
from weft.platform.mounts import mounts_here
from weft.report.run_files import UNREADABLE, at, number
from weft.train.run_folder import (
    CONFIG_FILE,
    REWINDS_FILE,
    has_saved,
    saved_step,
    saved_summary,
    summary_of,
)

State = Literal["running", "finished", "stopped", "diverged", "failed", "empty"]
STATES: Mapping[State, str] = {
    "running": "a command works in it",
    "finished": "reached its last step",
    "stopped": "can go on from a checkpoint",
    "diverged": "its last step had no finite loss",
    "failed": "ended with an error, and has saved nothing",
    "empty": "has saved nothing",
}
SIGNS = (CONFIG_FILE, "plan.json", "metrics.jsonl", "checkpoints")
"""Any of these makes a folder a run's."""
QUIET_S = 600.0
"""Where the file system knows no locks: a run that nothing was written to for so long is over."""
TAIL = 1 << 16
"""Bytes at the end of metrics.jsonl in which the last step is looked for."""
PRUNED = ".pruned-"
"""Begins the name of a run while it is deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One line of the list of runs. What is not known is None, or 0."""

    name: str
    folder: Path
    state: State
    step: int
    """Optimizer steps done."""
    steps: int | None
    """Of the whole run."""
    loss: float | None
    """Of the last step, nats a token."""
    held_out: float | None
    """Loss on held-out text at the end, nats a token."""
    goodput: float | None
    """Part of the time of a finished run that went into steps that count."""
    plan: str
    """Ranks and how they divide the work."""
    changed_at: float
    """Seconds since 1970."""
    bytes: int
    """On the disk."""

    @property
    def changed(self) -> str:
        """``2026-11-21 06:39``, in local time."""
        return f"{datetime.fromtimestamp(self.changed_at):%Y-%m-%d %H:%M}"


def list_runs(root: Path) -> list[RunFacts]:
    """Every run in a folder of runs, the last changed first.

    Raises ConfigError: there is no such folder.
    """
    if not root.is_dir():
        raise ConfigError("--folder", str(root), "a folder of runs that exists")
    found = [run_facts(entry) for entry in root.iterdir() if is_run(entry)]
    return sorted(found, key=lambda run: (-run.changed_at, run.name))


def is_run(folder: Path) -> bool:
    """It is a folder with a run's files, or a link to one."""
    named = not folder.name.startswith(".")
    return named and folder.is_dir() and any((folder / sign).exists() for sign in SIGNS)


def run_facts(folder: Path) -> RunFacts:
    """What the files of a run say; one that cannot be read says nothing.

    Storage far away is not asked: a run that has done a step there counts as saved.
    """
    config = _read(folder / CONFIG_FILE)
    last = last_step(folder / "metrics.jsonl")
    step, summary = int(number(last, "step") or 0), summary_of(folder)
    ended = int(number(summary, "step") or 0)
    if not are_far(folder):
        step, summary = max(step, saved_step(folder)), saved_summary(folder) or {}
    elif ended < step:
        summary = {}
    step = max(step, ended if summary else 0)
    steps = number(config, "train", "steps")
    files = ("metrics.jsonl", "summary.json", CONFIG_FILE, "checkpoints")
    times = [(folder / name).stat().st_mtime for name in files if (folder / name).exists()]
    return RunFacts(
        name=folder.name,
        folder=folder,
        state=_state(
            folder, config, last, is_finished=bool(summary) and steps is not None and steps <= step
        ),
        step=step,
        steps=None if steps is None else int(steps),
        loss=number(last, "loss"),
        held_out=number(summary, "held_out", "loss"),
        goodput=number(summary, "goodput", "share"),
        plan=_plan(folder / "plan.json"),
        changed_at=max(times, default=folder.stat().st_mtime),
        bytes=sum(entry.st_blocks * 512 for entry in _entries(folder)),
    )


def _state(
    folder: Path, config: Mapping[str, Any], last: Mapping[str, Any], *, is_finished: bool
) -> State:
    if is_alive(folder):
        return "running"
    if last and _is_bad(last) and _has_diverged(folder, config):
        return "diverged"
    if is_finished:
        return "finished"
    if last if are_far(folder) else has_saved(folder):
        return "stopped"
    return "failed" if any((folder / "logs").glob("rank*.error")) else "empty"


def _is_bad(row: Mapping[str, Any]) -> bool:
    """A step without finite loss, or gradient norm that no smaller loss scale would make one."""
    no_norm = row.get("grad_norm", 0.0) is None and row.get("loss_scale") is None
    return number(row, "loss") is None or no_norm


def _has_diverged(folder: Path, config: Mapping[str, Any]) -> bool:
    """A run whose last step was bad. Where such steps change nothing, a few are none the
    worse: as many in a row as end training are. Where it goes back, it has not once it may again,
    nor while it is on its way."""
    if at(config, "recovery", "when_not_finite") == "rewind":
        may = number(config, "recovery", "rewinds")
        return may is None or _settled_rewinds(folder) >= may
    if at(config, "recovery", "when_not_finite") != "skip":
        return True
    most = number(config, "train", "stop_after_non_finite")
    rows = steps_from_the_end(folder / "metrics.jsonl", math.inf)
    bad = sum(1 for _ in takewhile(_is_bad, rows))
    return most is None or 0 < most <= bad


def _settled_rewinds(folder: Path) -> int:
    """How often a run went back and has gone on."""
    try:
        noted = json.loads((folder / REWINDS_FILE).read_text("utf-8"))
        return sum(isinstance(each, list) for each in noted)
    except (*UNREADABLE, TypeError):
        return 0


def last_step(metrics: Path) -> dict[str, Any]:
    """The last record of a step in ``metrics.jsonl``; empty where there is none."""
    return next(steps_from_the_end(metrics, TAIL), {})


def steps_from_the_end(metrics: Path, tail: float) -> Iterator[dict[str, Any]]:
    """Records of steps, the last one first, in so many bytes at the end."""
    try:
        with metrics.open("rb") as file:
            file.seek(int(max(metrics.stat().st_size - tail, 0)))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn
        if isinstance(record, dict) and "loss" in record and "eval_loss" not in record:
            yield record


def is_alive(folder: Path) -> bool:
    """A command works in the run's folder, here or where its file system is shared."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a network file system without locks
        newest = max((entry.st_mtime for entry in _entries(folder)), default=0.0)
        return time.time() - newest < QUIET_S
    finally:
        os.close(handle)
    return False


def chosen(
    root: Path,
    names: Sequence[str],
    *,
    older_than_days: float | None = None,
    states: Sequence[str] = (),
    keep: int = 0,
) -> list[RunFacts]:
    """Runs that a ``prune`` is meant for: those that every given rule takes.

    Args:
        names: Only these; none, all of the folder.
        older_than_days: Only those that nothing was written to for so long.
        states: Only those in one of these states.
        keep: Not the so many that were changed last.

    Raises ConfigError: a name is not that of a run in the folder.
    """
    runs = list_runs(root)
    named = {_named(root, name, [run.name for run in runs]) for name in names}
    before = math.inf if older_than_days is None else time.time() - older_than_days * 86400
    return [
        run
        for run in runs[keep:]
        if (not named or run.name in named)
        and (older_than_days is None or run.changed_at < before)
        and (not states or run.state in states)
    ]


def why_not(run: RunFacts) -> str:
    """Why nothing of a run may be deleted; empty where it may."""
    if run.folder.is_symlink():
        return "it is a link to another folder"
    if run.state == "running" or is_alive(run.folder):
        return "a command works in it"
    here = run.folder.stat().st_dev
    if any(entry.st_dev != here for entry in _entries(run.folder)) or _is_mounted(run.folder):
        return "another file system is mounted in it"
    return ""


def _is_mounted(folder: Path) -> bool:
    """Something is mounted in a folder, also of the same file system; as far as the kernel says."""
    return any(folder.resolve() in point.parents for _, point in mounts_here())


def superfluous_checkpoints(run: RunFacts) -> tuple[list[Path], int]:
    """(folders, bytes) of checkpoints beside the one it goes on from and the last finite one."""
    from weft.checkpoint.place import checkpoints_of
    from weft.checkpoint.store import superfluous

    if are_far(run.folder):
        return [], 0
    root = checkpoints_of(run.folder)
    if not isinstance(root, Path) or root.is_symlink() or not root.is_dir():
        return [], 0
    found = [
        folder
        for folder in superfluous(root, keep=1)
        if isinstance(folder, Path) and not folder.is_symlink()
    ]
    return found, sum(entry.st_blocks * 512 for f in found for entry in _entries(f))


def delete_run(run: RunFacts) -> None:
    """Delete a run of which ``why_not`` says nothing. What its links point to stays.

    Raises ConfigError: a command has begun to work in it.
    """
    root = os.open(run.folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _held(run.folder):
            doomed = f"{PRUNED}{run.name}"
            if os.path.lexists(run.folder.parent / doomed):
                shutil.rmtree(doomed, dir_fd=root)
            os.rename(run.name, doomed, src_dir_fd=root, dst_dir_fd=root)
            shutil.rmtree(doomed, dir_fd=root)
    finally:
        os.close(root)


def delete_checkpoints(run: RunFacts) -> None:
    """Delete what ``superfluous_checkpoints`` names.

    Raises ConfigError: a command has begun to work in the run.
    """
    with _held(run.folder):
        for folder in superfluous_checkpoints(run)[0]:
            shutil.rmtree(folder)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """No command can begin to work in a run meanwhile."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            expected = "a run in which no command works"
            raise ConfigError("RUN", str(folder), expected) from None
        except OSError:
            pass  # a network file system without locks
        yield
    finally:
        os.close(handle)


def _named(root: Path, name: str, known: Sequence[str]) -> str:
    """The name of a run in the folder, from that name or from its path."""
    path = Path(name)
    inside = path.name == name or path.absolute().parent.resolve() == root.resolve()
    if not inside or path.name not in known:
        hint = "`weft runs` lists them." if known else "It holds none."
        raise ConfigError("RUN", name, f"a run in {root}", hint)
    return path.name


def _entries(folder: Path) -> Iterator[os.stat_result]:
    """What is known of everything below a folder; links are not followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # of a run that is at work
                yield Path(parent, name).lstat()


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(_text(path))
    except UNREADABLE:
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    """Of a file: of a pipe, which may never end, nothing is read."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.read_text("utf-8")


def _plan(path: Path) -> str:
    """In words; a question mark where the file says no plan."""
    try:
        return plan_in_words(Plan.from_json(_text(path)))
    except UNREADABLE:
        return "?"


def plan_in_words(plan: Plan) -> str:
    """``2 ranks: pp 2``."""
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    shapes = []
    for pipeline in plan.pipelines:
        meshes = [pipeline.stages[stages[0]].mesh for stages in pipeline.positions()]
        sizes = dict.fromkeys(words for mesh in meshes for words in mesh.words)
        depth = [f"pp {len(meshes)}"] if len(meshes) > 1 else []
        shapes.append(" x ".join([*depth, *sizes]))
    words = " + ".join(shape or "1" for shape in shapes)
    return ranks if words == "1" else f"{ranks}: {words}"


def change_in_words(before: Plan, after: Plan) -> str:
    """``3 ranks: dp 3, instead of 2 ranks: dp 2``; of plans that are the same in few words, what
    differs in more."""
    was, now = plan_in_words(before), plan_in_words(after)
    if before == after:
        return f"{now}, as before"
    return f"{now}, instead of {was}" if was != now else f"{now}, {_differing(before, after)}"


def _differing(before: Plan, after: Plan) -> str:
    """Of plans that are the same in few words."""
    both = [*zip(_parts(before).items(), _parts(after).values(), strict=True)]
    differ = ((words, was, now) for (words, was), now in both if now != was)
    found = (f"with {words.format(now)} instead of {was}" for words, was, now in differ)
    return next(found, "in another order")


def _parts(plan: Plan) -> dict[str, str]:
    """What of a step is whose, and how it is done, by the words for it."""
    stages = [stage for _, _, stage in plan.stages()]
    each = {
        "{} samples": [f"{pipeline.samples}" for pipeline in plan.pipelines],
        "{} layers": [f"{stage.layers[1] - stage.layers[0]:g}" for stage in stages],
        "{} shares": [":".join(map(str, stage.sample_shares)) or "even" for stage in stages],
        "schedule {}": [pipeline.schedule for pipeline in plan.pipelines],
        "zero {}": [f"{stage.zero}" for stage in stages],
        "recompute {}": [stage.recompute for stage in stages],
    }
    return {words: " + ".join(values) for words, values in each.items()}
