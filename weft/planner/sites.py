"""Sets of pipelines that train for themselves: from a configuration to the plan; their rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

from weft.config.errors import ConfigError
from weft.config.sections import SitesConfig
from weft.plan.plan import Plan, StagePlan
from weft.plan.tiling import split_by_weight
from weft.precision.registry import PRECISIONS

Sets = tuple[tuple[int, ...], ...]
LEFT_OUT = "Leave sites out: then every step is the whole job's."


def with_sites(plan: Plan, asked: SitesConfig | None) -> Plan:
    """The plan with its pipelines in sites.

    Raises:
        ConfigError: it has sites and nothing says how they meet; or the numbers that are asked for
            are not its pipelines', each once, or are other sites than its own.
    """
    if asked is None:
        if plan.sites:
            hint = "It says how they meet: sites.every and so on, or sites={} for what is usual."
            raise ConfigError("sites", None, "a section, for the plan has sites", hint)
        return plan
    if plan.sites and asked.pipelines is None:
        return plan
    sites = _asked_for(plan, asked)
    if plan.sites and {*map(frozenset, plan.sites)} != {*map(frozenset, sites)}:
        expected = f"null, or the plan's own sites, {_lists(plan.sites)}"
        raise ConfigError("sites.pipelines", _lists(asked.pipelines or ()), expected)
    return replace(plan, sites=plan.sites or sites)


def _asked_for(plan: Plan, asked: SitesConfig) -> Sets:
    """The ranks of each site that a configuration asks for."""
    number = len(plan.pipelines)
    groups = asked.pipelines or tuple((p,) for p in range(number))
    if sorted(chain.from_iterable(groups)) != list(range(number)) or not all(groups):
        expected = f"the pipelines 0 to {number - 1}, each in one site"
        raise ConfigError("sites.pipelines", _lists(groups), expected)
    if len(groups) == 1:
        expected = "two sites or more, each of whole pipelines (plan.pipelines, plan.shares)"
        raise ConfigError("sites.pipelines", _lists(groups), expected, LEFT_OUT)
    return tuple(_ranks(plan, group) for group in groups)


def check_sites(plan: Plan) -> None:
    """Every pipeline whole in one site, and nothing that sites cannot do.

    Raises:
        ConfigError: the first rule that is broken.
    """
    if not plan.sites:
        return
    _check_sets(plan)
    if plan.domains:
        hint = "Ranks of a site are summed as one. Leave the domains out."
        raise ConfigError("domains", _lists(plan.domains), "none with sites", hint)
    for p, s, stage in plan.stages():
        if PRECISIONS[stage.precision].scales_loss:
            key = f"pipelines[{p}].stages[{s}].precision"
            hint = "Sites would scale their losses apart."
            raise ConfigError(key, stage.precision, "bf16 or fp32 with sites", hint)


def _check_sets(plan: Plan) -> None:
    said = _lists(plan.sites)
    if len(said) == 1 or not all(said):
        raise ConfigError("sites", said, "two sets of ranks or more, or none", LEFT_OUT)
    if sorted(chain.from_iterable(said)) != list(plan.ranks):
        raise ConfigError("sites", said, f"the ranks 0 to {plan.world_size - 1}, each in one site")
    for p in range(len(plan.pipelines)):
        ranks = _ranks(plan, (p,))
        if not any({*site} >= {*ranks} for site in said):
            expected = f"whole pipelines: ranks {list(ranks)} are one"
            raise ConfigError("sites", said, expected)


def without_lost(plan: Plan, left: Collection[int]) -> tuple[Plan, tuple[int, ...]]:
    """A plan with sites for the ranks that are left: its whole pipelines take all samples, in as
    many sites as still have one. For each of its ranks the one that it was before.

    Raises:
        ConfigError: no pipeline is whole.
    """
    kept = [p for p in range(len(plan.pipelines)) if {*_ranks(plan, (p,))} <= {*left}]
    if not kept:
        expected = "a whole pipeline in some site"
        raise ConfigError("sites", _lists(plan.sites), expected, "All have lost ranks.")
    before = _ranks(plan, kept)
    shares = split_by_weight(plan.global_batch, [plan.pipelines[p].samples for p in kept])
    pipelines = tuple(
        replace(plan.pipelines[p], samples=share, lists=())
        for p, share in zip(kept, shares, strict=True)
    )
    apart = [tuple(rank for rank in site if rank in before) for site in plan.sites]
    sites = tuple(filter(None, apart))
    fewer = replace(plan, pipelines=pipelines, sites=sites if len(sites) > 1 else ())
    fewer = fewer.each(lambda stage: _with_mates(stage, fewer))
    new = [before.index(rank) if rank in before else 0 for rank in plan.ranks]
    return fewer.on_ranks(new), before


def _with_mates(stage: StagePlan, plan: Plan) -> StagePlan:
    """Nothing is divided where no other rank holds the same any more."""
    alone = len(plan.site(stage.mesh.ranks[0]).pipelines) == len(stage.mesh.ranks) == 1
    return replace(stage, zero=0, state_shares=()) if alone else stage


def sites_still(asked: SitesConfig | None, plan: Plan) -> SitesConfig | None:
    """What is asked of the sites that a plan has, which may be fewer than a job began with."""
    if asked is None or not plan.sites:
        return None
    return asked.model_copy(update={"pipelines": None})


def refuse_idle_fragments(asked: SitesConfig | None, num_units: int) -> None:
    """Every fragment has a unit of the model.

    Raises:
        ConfigError: there are not so many.
    """
    if asked is not None and asked.fragments > num_units:
        expected = f"at most {num_units}, the model's layers and ends"
        raise ConfigError("sites.fragments", asked.fragments, expected)


def refuse_settled(plan: Plan, names: Sequence[str]) -> None:
    """``names``: of parameters that what forwards count settles, which sites do not hand on.

    Raises:
        ConfigError: there are sites, and such parameters.
    """
    if plan.sites and names:
        hint = "model.experts.bias_step: null trains without."
        expected = f"null, as each would settle {names[0]} by what it alone counts"
        raise ConfigError("sites", len(plan.sites), expected, hint)


def _lists(sets: Sets) -> list[list[int]]:
    return [list(each) for each in sets]


def _ranks(plan: Plan, pipelines: Sequence[int]) -> tuple[int, ...]:
    stages = (stage for p in pipelines for stage in plan.pipelines[p].stages)
    return tuple(sorted({rank for stage in stages for rank in stage.mesh.ranks}))
