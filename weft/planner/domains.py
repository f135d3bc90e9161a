"""Sets of ranks that fast links join: from the word of a configuration to the plan; their rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.config.errors import ConfigError
from weft.config.plan_sections import Domains
from weft.cost.choice import alike
from weft.plan.model import UnitName
from weft.plan.plan import Plan


def with_domains(plan: Plan, asked: Domains, ranks_here: int | None) -> Plan:
    """The plan with its ranks in sets, in the order in which ranks first come.

    Args:
        ranks_here: Of each node, consecutive ones; None: all ranks are on this one.

    Raises:
        ConfigError: there is one set only, or nodes of unlike numbers of ranks.
    """
    node_of = nodes_of(plan, ranks_here, asked, "domains")
    ways: dict[Domains, tuple[Callable[[int], object], str]] = {
        "nodes": (node_of, "nodes"),
        "pipelines": (lambda rank: plan.rank_plan(rank).pipeline, "pipelines"),
        "families": (lambda rank: plan.devices[rank], "families of chips"),
    }
    kind, words = ways[asked]
    found: dict[object, list[int]] = {}
    for rank in range(plan.world_size):
        found.setdefault(kind(rank), []).append(rank)
    if len(found) == 1:
        expected = f"null where all ranks are in one set: the plan has no several {words}"
        raise ConfigError("plan.domains", asked, expected)
    return replace(plan, domains=tuple(map(tuple, found.values())))


def nodes_of(
    plan: Plan, ranks_here: int | None, asked: str | None, key: str
) -> Callable[[int], int]:
    """From a rank to its node: consecutive ones, as many on each as here, or all on this one.

    Raises:
        ConfigError: nodes are ``asked`` for, and have unlike numbers of ranks; ``key``: of the
            configuration, and of plans.
    """
    world = plan.world_size
    per_node = ranks_here or world
    if asked == "nodes" and world % per_node:
        expected = f"null where nodes have unlike numbers of the {world} ranks"
        hint = f'A plan.json may say it with "{key}" instead.'
        raise ConfigError(f"plan.{key}", asked, expected, hint)
    return lambda rank: rank // per_node


def check_domains(plan: Plan) -> None:
    """Every rank in one domain.

    Raises:
        ConfigError: a rank is in none or several, or all are in one.
    """
    if not plan.domains:
        return
    said = [list(domain) for domain in plan.domains]
    if len(said) == 1 or not all(said):
        expected = "two sets of ranks or more, or none where all are one set"
        raise ConfigError("domains", said, expected)
    counts = Counter(rank for domain in said for rank in domain)
    world = plan.world_size
    if sorted(counts.elements()) != list(range(world)):
        raise ConfigError("domains", said, f"the ranks 0 to {world - 1}, each once")


def refuse_idle_domains(plan: Plan, *, tied: bool) -> None:
    """Refuse domains that have no parameters in common: nothing is summed between them.

    ``tied``: the model's head multiplies by the embedding's weight.

    Raises:
        ConfigError: there are such domains, and nothing else.
    """
    if plan.domains and all(len(plan.by_domain(ranks)) == 1 for ranks in _holders(plan, tied)):
        hint = "Leave the domains out."
        said = [list(domain) for domain in plan.domains]
        raise ConfigError("domains", said, "domains that hold parameters in common", hint)


def idle_zero_notes(plan: Plan, *, tied: bool) -> Iterator[str]:
    """Of stages whose level of ZeRO divides nothing, as no domain has two ranks that hold the same.

    ``tied``: the model's head multiplies by the embedding's weight.
    """
    for p, s, stage in plan.stages() if plan.domains else ():
        units = sorted(plan.units(p, s), key=str)[:1]
        every = [other.mesh for _, _, other in plan.stages_with(set(units))]
        parts = plan.by_domain([rank for mesh in every for rank in alike(mesh)])
        is_end = tied and s in (0, len(plan.pipelines[p].stages) - 1)
        if stage.zero and units and not is_end and max(map(len, parts)) == 1:
            key = f"pipelines[{p}].stages[{s}].zero"
            yield f"{key} = {stage.zero} divides nothing: each domain holds these layers once"


def _holders(plan: Plan, tied: bool) -> Iterator[set[int]]:
    """Of each part of the model, the ranks that compute with it."""
    units: list[set[UnitName]] = [{place} for place in plan.places]
    units += [{"embed", "head"}] if tied else [{"embed"}, {"head"}]
    for unit in units:
        yield {rank for _, _, stage in plan.stages_with(unit) for rank in stage.mesh.ranks}
