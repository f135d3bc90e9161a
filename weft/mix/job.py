"""The job that a bench measures: a configuration without its plan, for a bench makes its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.cluster.cluster import Cluster
from weft.config.batch import derive_batch
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import Loaded, load_config
from weft.config.plan_sections import PlanConfig
from weft.config.sections import BatchConfig
from weft.config.tree import COMMAND_LINE
from weft.config.values import Section
from weft.planner.problem import Workload
from weft.resolve.overruled import DECIDED_BY_PLAN
from weft.resolve.resolve import Resolved, resolve

ENDLESS = 1_000_000
"""Steps: more than a bench takes."""
QUICK_RECIPE, QUICK_VALUES = "debug", ("batch.samples=256",)
"""A small model; where nothing else is asked for, in a batch in which compute is what counts."""
_PLANS = "A bench makes its own plans."
_DECIDED_HERE = {
    "batch.accumulation": _PLANS,
    "compute.device": "A chip of the lab is a part of a core.",
    "compute.recompute": _PLANS,
    "compute.compile": _PLANS,
    "compute.threads": "Every chip has one.",
    "train.steps": "A bench takes as many as it has time for.",
}
"""What a bench itself chooses or leaves out, and why it cannot be asked for."""


def load_job(recipe: str, pairs: Sequence[str]) -> Loaded:
    """What was asked for, under whatever plan: the samples of a step need not suit the recipe's.

    Raises:
        ConfigErrors: a value that cannot work, or one on the command line without effect.
    """
    keys = [pair.partition("=")[0].strip() for pair in pairs]
    _refuse([key for key in keys if key.split(".")[0].split("[")[0] == "plan"])
    loaded = load_config(recipe, [*pairs, "plan.file=of-each-trial"])
    given = [key for key, origin in loaded.origins.items() if origin == COMMAND_LINE]
    _refuse([key for key in given if key in _DECIDED_HERE])
    if loaded.config.batch.samples is not None:
        return loaded
    own = load_config(recipe, pairs).config  # they follow from the recipe's own shares
    whole = derive_batch(own.batch, own.plan.batch_shares or (1,), loaded.origins)
    return _with(loaded, batch=BatchConfig(samples=whole.samples, micro=own.batch.micro))


def _refuse(keys: Sequence[str]) -> None:
    if keys:
        raise ConfigErrors(
            ConfigError(
                key,
                "",
                "",
                f"{key} has no effect on a bench. {_DECIDED_HERE.get(key, _PLANS)}",
                where=str(COMMAND_LINE),
            )
            for key in keys
        )


def _with(loaded: Loaded, **sections: Section) -> Loaded:
    return replace(loaded, config=loaded.config.model_copy(update=sections))


def resolved_alone(loaded: Loaded, machine: Cluster) -> Resolved:
    """The job on one chip.

    Raises:
        ConfigErrors: a value that cannot work.
    """
    config = loaded.config
    alone = _with(
        loaded,
        plan=PlanConfig(shares=(1,)),
        batch=BatchConfig(samples=config.batch.samples, micro=1),
        compute=config.compute.model_copy(update={"device": "cpu", "threads": 1}),
    )
    return resolve(alone, machine)


def work_of(loaded: Loaded, alone: Resolved, num_chips: int) -> Workload:
    """What every trial does.

    Raises:
        ConfigErrors: there is less than a sample for each chip.
    """
    samples = alone.plan.global_batch
    if samples < num_chips:
        expected = f"at least {num_chips}, a sample for each chip of the cluster"
        raise loaded.place(ConfigError("batch.samples", samples, expected))
    return alone.open_workload


def micros_to_try(loaded: Loaded) -> tuple[int, ...]:
    """Samples of a microbatch that a rank may have."""
    micro = loaded.config.batch.micro
    return (micro,) if micro and loaded.origins["batch.micro"] == COMMAND_LINE else (2, 4)


def target_of_trials(name: str, pairs: Sequence[str]) -> list[str]:
    """Recipe and overrides of ``weft train`` for a trial that is ended, without its plan."""
    rest = [pair for pair in pairs if pair.partition("=")[0] not in DECIDED_BY_PLAN]
    return [name, *rest, f"train.steps={ENDLESS}"]
