"""Feed what a run really took back into the profile of its chip: ``weft chips calibrate``.

Three numbers may be corrected, so that a profile stays what was measured: a factor for computing,
or, where a step is mostly something else, its fixed seconds; and the memory of a rank besides its
plan's. One run cannot tell more apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from pathlib import Path

from weft.cluster.cluster import Node
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import load_config
from weft.cost.memory import memory_of_plan
from weft.cost.profile import Profile
from weft.cost.work import Training
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.report.run_files import RunFiles, read_run
from weft.resolve.prediction import WARM_UP_STEPS, measured
from weft.resolve.resolve import resolve
from weft.simulate.known import knowledge_of_local, local_view
from weft.simulate.step import StepTime, time_of_plan
from weft.train.run_folder import CONFIG_FILE

LEAST_STEPS = 5
"""Steps besides the first few that a run needs to say something."""
FARTHEST = 3.0
"""Computing that differs by more from the profile is not of this machine, or of a busy one."""
ROUNDS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Predicted beside measured: part of what was measured."""

    time_before: float
    time_after: float
    memory_before: float
    memory_after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A profile before and after a run."""

    before: Profile
    after: Profile
    errors: Errors

    def in_words(self) -> list[str]:
        """What changed, a line each."""
        errors, made = self.errors, self.after.corrections
        return [
            f"step time: predicted {errors.time_before:+.1%} off, now {errors.time_after:+.1%}"
            f" (computing x {made.compute:.3f}, {made.step_s * 1000:+.1f} ms a step)",
            f"memory: predicted {errors.memory_before:+.1%} off, now {errors.memory_after:+.1%}"
            f" ({made.runtime_bytes / 2**20:+.0f} MiB a rank)",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Took:
    """A run as predictions see it."""

    plan: Plan
    spec: ModelSpec
    seq_len: int
    training: Training
    step_s: float
    memory_bytes: tuple[float, ...]

    def step(self, profile: Profile, node: Node) -> StepTime:
        ranks = self.plan.world_size
        view = local_view(node, profile, ranks)
        known = knowledge_of_local(profile, ranks)
        return time_of_plan(
            self.plan,
            self.spec,
            view,
            seq_len=self.seq_len,
            knowledge=known,
            training=self.training,
        )

    def time_error(self, profile: Profile, node: Node) -> float:
        return self.step(profile, node).step_s / self.step_s - 1

    def excess(self, profile: Profile) -> float:
        """Bytes a rank was predicted too much, on average; negative where too little."""
        known = {profile.machine.device: profile.overheads}
        memory = memory_of_plan(self.plan, self.spec, self.seq_len, known, self.training)
        pairs = zip(sorted(memory), self.memory_bytes, strict=True)
        return sum(memory[rank].total - took for rank, took in pairs) / len(memory)


def calibrated(folder: Path, node: Node, profiles: Sequence[Profile]) -> Calibration:
    """The profile that fits a run, corrected by it.

    Args:
        profiles: To choose from, newest first.

    Raises:
        ConfigError: the run is not of this machine, too short, or unlike any profile.
    """
    run = read_run(folder)
    took = _took(run)
    devices = sorted(set(took.plan.devices))
    if len(devices) > 1:
        expected = "a run on one kind of chip"
        raise ConfigError("RUN", devices, expected, "A mixed one cannot tell whose error it is.")
    host = run.cluster.nodes[0] if run.cluster else None
    if host is None or (host.cpu, host.cores) != (node.cpu, node.cores):
        where = "another machine" if host is None else f"{host.cpu}, {host.cores} cores"
        expected = f"a run on this machine ({node.cpu}, {node.cores} cores)"
        raise ConfigError("RUN", where, expected)
    wanted = (devices[0], node.cpu)
    fitting = (each for each in profiles if (each.machine.device, each.machine.cpu) == wanted)
    before = next(fitting, None)
    if before is None:
        hint = "Measure it with `weft chips profile`."
        raise ConfigError("profile", None, f"one of this machine's {devices[0]}", hint)
    after = _corrected(before, node, took)
    memory = sum(took.memory_bytes) / len(took.memory_bytes)
    errors = Errors(
        time_before=took.time_error(before, node),
        time_after=took.time_error(after, node),
        memory_before=took.excess(before) / memory,
        memory_after=took.excess(after) / memory,
    )
    return Calibration(before=before, after=after, errors=errors)


def _took(run: RunFiles) -> _Took:
    if run.plan is None or run.cluster is None:
        problem = f"{run.problems[0]}." if run.problems else "plan.json or cluster.json is missing."
        raise ConfigError("RUN", str(run.folder), "the folder of a run", problem)
    steps = [step for step in run.steps if 0 < step.step_time_s < inf]
    if len(steps) - WARM_UP_STEPS < LEAST_STEPS:
        expected = f"a run of at least {LEAST_STEPS + WARM_UP_STEPS} steps whose time is known"
        raise ConfigError("RUN", f"{len(steps)} steps", expected)
    try:
        resolved = resolve(load_config(str(run.folder / CONFIG_FILE)), run.cluster, plan=run.plan)
    except ConfigErrors as errors:
        raise ConfigError("RUN", str(run.folder), "the folder of a run", str(errors)) from errors
    memory = _memory_gib(run, [steps[-1].memory_gib] * run.plan.world_size)
    found = measured(steps, memory_gib=memory, sent_mb=0.0)
    assert found.step_time_s is not None, f"{len(steps)} steps and no time"
    return _Took(
        plan=run.plan,
        spec=resolved.spec,
        seq_len=resolved.config.data.seq_len,
        training=resolved.training,
        step_s=found.step_time_s,
        memory_bytes=tuple(gib * 2**30 for gib in found.memory_gib),
    )


def _memory_gib(run: RunFiles, most: list[float]) -> list[float]:
    """Of each rank; ``most``: what to take where only the most of a rank is known."""
    by_rank = run.summary.get("prediction", {}).get("measured", {}).get("memory_gib") or most
    if not all(isinstance(gib, float) and 0 < gib < inf for gib in by_rank):
        raise ConfigError("RUN", str(run.folder), "a run that says how much memory its ranks had")
    return list(by_rank)


def _corrected(profile: Profile, node: Node, took: _Took) -> Profile:
    """The least correction that makes the run's prediction right."""
    step, own = took.step(profile, node), profile.corrections

    def error(compute: float) -> float:
        """Where computing is corrected by this factor."""
        changed = replace(profile, corrections=replace(own, compute=compute))
        return took.time_error(changed, node)

    # What grows with it, also what waits for others, but for the fixed seconds.
    once = replace(profile, step_s=0.0)
    twice = replace(once, corrections=replace(own, compute=2 * own.compute))
    computing = took.step(twice, node).step_s - took.step(once, node).step_s
    if computing >= step.step_s / 2:
        made = replace(own, compute=_factor(error, own.compute))
    else:
        fixed_s = own.step_s + (took.step_s - step.step_s) / step.stretch
        made = replace(own, step_s=max(fixed_s, -profile.step_s))
    least = -profile.runtime_bytes / 2
    made = replace(made, runtime_bytes=max(own.runtime_bytes - took.excess(profile), least))
    return replace(profile, corrections=made)


def _factor(error: Callable[[float], float], now: float) -> float:
    """Where the error vanishes; it rises with the factor."""
    low, high = now / FARTHEST, now * FARTHEST
    if error(low) > 0 or error(high) < 0:
        ratio = 1 / (1 + error(now))
        times = f"{FARTHEST:g} times as fast or as slow as the profile says"
        expected = f"what computing that is up to {times} explains"
        hint = "Something else ran beside it, or when the profile was made; or what is off is no "
        hint += "computing."
        raise ConfigError("RUN: step time", f"{ratio:.2g} times as predicted", expected, hint)
    for _ in range(ROUNDS):
        middle = sqrt(low * high)
        low, high = (middle, high) if error(middle) < 0 else (low, middle)
    return sqrt(low * high)
