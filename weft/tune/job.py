"""The job that is tuned: a configuration whose plan is left open, on a lab's chips or this
machine's, and what has to be the same for a tuning to go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.cluster.cluster import HOST, Cluster
from weft.cluster.cluster_file import ChipEntry, ClusterFile, HostEntry
from weft.config.batch import derive_batch
from weft.config.check import flat
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.plan_sections import AutoConfig, PlanConfig
from weft.config.sections import BatchConfig, Config
from weft.config.tune_section import TuneConfig
from weft.lab.here import Here
from weft.mix.chips import Chips, Shown
from weft.mix.job import ENDLESS, resolved_alone, work_of
from weft.plan.plan import Plan
from weft.planner.problem import Problem
from weft.planner.sureness import Sureness
from weft.recompute.asked import check_for_any
from weft.resolve.orders import ordered
from weft.resolve.overruled import DECIDED_BY_PLAN
from weft.resolve.planned import (
    by_person,
    options_asked,
    problem_of,
    resources_here,
    says_a_plan,
    with_compiled,
)
from weft.resolve.prediction import chips_of_run
from weft.resolve.resolve import Resolved, read_plan, resolve
from weft.tune.ask import Space
from weft.tune.candidate import Candidate
from weft.tune.trials import Setting
from weft.version import __version__

_FREE = ("name.", "train.", "checkpoint.", "recovery.", "metrics.", "sample.", "data.workers.")
"""Sections that change nothing of which plan is fastest."""
GUESSED = 2.0
"""In so many times more or less most forecasts are right that are made for an average core. What
ranks swap inside layers was found to take four times as long on one machine."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is tuned, and where."""

    config: Config
    """Its plan is left open."""
    target: tuple[str, ...]
    """Recipe and overrides of ``weft train``, without a plan."""
    space: Space
    given: Plan | None
    """The user's own plan, which is tried first."""
    lab: ClusterFile | None
    machine: Cluster

    @property
    def times(self) -> float:
        """In so many times more or less 80 % of such forecasts are right."""
        if self.space.is_guess:
            return GUESSED
        problem = self.space.problem
        return Sureness.of(problem.cluster, problem.knowledge).step(1.0).high

    @property
    def asked(self) -> Mapping[str, Any]:
        """By dotted key: what decides which plan is fastest, as JSON has it."""
        said = self.config.model_copy(update={"tune": self.config.tune or TuneConfig()})
        values = {k: v for k, v in flat(said) if not f"{k}.".startswith(_FREE)}
        lab = None if self.lab is None else self.lab.model_dump(mode="json")
        (node,) = self.machine.nodes
        machine = {"cpu": node.cpu, "cores": node.cores, "chips": [c.name for c in node.chips]}
        given = None if self.given is None else json.loads(self.given.to_json())
        more = {"--cluster": lab, "machine": machine, "plan": given, "version": __version__}
        known: dict[str, Any] = json.loads(json.dumps({**values, **more}, default=str))
        return known

    def candidate_of(self, plan: Plan) -> Candidate:
        """The user's own."""
        return self.space.candidate_of(plan)

    def setting(self, out: Path) -> Setting:
        """How trials run whose folders go to ``out``."""
        problem = self.space.problem
        hosts = {pool.chip.device for pool in problem.cluster.pools} == {HOST}
        return Setting(
            work=problem.workload,
            target=(*self.target, f"train.steps={ENDLESS}"),
            out=out,
            cluster_of=self._cluster_of,
            place_of=None if self.lab is not None else lambda each: Here(each.world_size),
            together=self.lab is not None or hosts,
        )

    def _cluster_of(self, candidate: Candidate) -> ClusterFile:
        """The lab's; or as many chips here as a plan has ranks."""
        if self.lab is not None:
            return self.lab
        kinds = [holding.kind for holding in candidate.memory for _ in holding.ranks]
        chips = tuple(ChipEntry(kind=kind) for kind in kinds[: candidate.plan.world_size])
        return ClusterFile(hosts=(HostEntry(name="here", chips=chips),))


def job_of(
    loaded: Loaded, recipe: str, pairs: Sequence[str], lab: ClusterFile | None, machine: Cluster
) -> Job:
    """What the user asks for.

    Raises:
        ConfigErrors: a value that cannot work, with the place where it was given.
    """
    try:
        _refuse_twice(loaded)
        device = loaded.config.compute.device
        if lab is not None and device not in ("auto", HOST):
            hint = "A chip of a lab is a part of a core."
            raise ConfigError("compute.device", device, f"auto or {HOST} in a lab", hint)
        for mode in {*((loaded.config.tune or TuneConfig()).recompute or ())} - {"auto"}:
            check_for_any("tune.recompute", mode)
        resolved = _given(loaded, lab, machine) if says_a_plan(loaded) else None
        config = _left_open(loaded, None if resolved is None else resolved.plan)
        opened = replace(loaded, config=config)
        space = _space_here(config, machine) if lab is None else _space_of(lab, opened, machine)
        _refuse_many(resolved, space)
    except ConfigError as error:
        raise loaded.place(error) from error
    return Job(
        config=config,
        target=(recipe, *(pair for pair in pairs if not _is_open(pair))),
        space=space,
        given=None if resolved is None else resolved.plan,
        lab=lab,
        machine=machine,
    )


def _refuse_twice(loaded: Loaded) -> None:
    """One value is asked for, or several are tried; in exact training."""
    tune, config = loaded.config.tune or TuneConfig(), loaded.config
    if config.sites is not None:
        hint = "Trials compare plans whose steps are the whole job's; tune the chips of one site."
        raise ConfigError("sites.every", config.sites.every, "no section sites to tune", hint)
    if says_a_plan(loaded):
        return
    pairs = (
        ("tune.micros", tune.micros, "batch.micro"),
        ("tune.recompute", tune.recompute, "compute.recompute"),
        ("tune.schedules", tune.schedules, "plan.schedule"),
        ("tune.borders", None if tune.borders == (None,) else tune.borders, "plan.border"),
    )
    for key, several, one in pairs:
        if several is not None and by_person(loaded, one):
            value = dict(flat(config))[one]
            raise ConfigError(key, list(several), f"null beside {one} = {value}")


def _refuse_many(given: Resolved | None, space: Space) -> None:
    """A plan of more ranks than there are chips, or cores, to try them on."""
    most = (space.there or space.problem.cluster).world_size
    if given is not None and given.plan.world_size > most:
        expected = f"at most {most} of them, a chip or core of its own for each"
        raise ConfigError("plan", f"{given.plan.world_size} ranks", expected)


def _given(loaded: Loaded, lab: ClusterFile | None, machine: Cluster) -> Resolved:
    """The user's own plan."""
    config = loaded.config
    if lab is not None and config.compute.device == "auto":
        compute = config.compute.model_copy(update={"device": HOST})
        loaded = replace(loaded, config=config.model_copy(update={"compute": compute}))
    return resolve(
        loaded,
        machine,
        world_size=None if lab is None else lab.world_size,
        plan=read_plan(loaded),
        makes=lambda asked: ordered(asked, chips_of_run(asked, None)),
    )


def _left_open(loaded: Loaded, given: Plan | None) -> Config:
    """With the plan for the planner to choose, for the same samples."""
    config = loaded.config
    auto, keeps = config.plan.auto or AutoConfig(), given is None
    plan = PlanConfig(
        auto=auto,
        schedule=config.plan.schedule if keeps and by_person(loaded, "plan.schedule") else None,
        border=config.plan.border if keeps else None,
        border_between=config.plan.border_between if keeps else None,
    )
    micro = config.batch.micro if keeps and by_person(loaded, "batch.micro") else None
    batch = BatchConfig(samples=_samples(loaded, given), micro=micro)
    return config.model_copy(update={"plan": plan, "batch": batch})


def _samples(loaded: Loaded, given: Plan | None) -> int:
    """Of a step."""
    config = loaded.config
    if given is not None:
        return given.global_batch
    if config.batch.samples is not None:
        return config.batch.samples
    return derive_batch(config.batch, config.plan.batch_shares or (1,), loaded.origins).samples


def _space_here(config: Config, machine: Cluster) -> Space:
    resources = resources_here(config, machine)
    return Space(
        problem=problem_of(config, resources),
        tune=config.tune or TuneConfig(),
        there=None if resources.may_idle else resources.chips.view,
        finish=lambda plan: with_compiled(plan, config, []),
        is_guess=resources.chips.is_guess,
    )


def _space_of(lab: ClusterFile, loaded: Loaded, machine: Cluster) -> Space:
    """On parts of this machine's cores."""
    (node,) = machine.nodes
    chips = Chips.of(lab, node, Shown())
    work = work_of(loaded, resolved_alone(loaded, machine), lab.world_size)
    options = replace(options_asked(loaded.config), leave_idle=False)
    return Space(
        problem=Problem(work, chips.pools, chips.knowledge, options),
        tune=loaded.config.tune or TuneConfig(),
        there=chips.by_rank,
        finish=partial(_same),
        is_guess=chips.is_guess,
    )


def _same(plan: Plan) -> Plan:
    return plan


def _is_open(pair: str) -> bool:
    """The plan of a trial says it, or it says nothing of a trial."""
    key = pair.partition("=")[0].strip()
    section = key.split(".")[0].split("[")[0]
    return section in ("plan", "tune") or key in DECIDED_BY_PLAN
