"""Why this plan and not another, and what other chips would change: sentences with figures.

Other plans are those that the search found next, and one that a person asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from weft.cluster.view import ClusterView
from weft.plan.plan import PipelinePlan, Plan
from weft.planner.fit import shortages, smallest_change, without_recompute
from weft.planner.forecast import Forecast, forecast, with_links, with_memory
from weft.planner.naming import name_of
from weft.planner.options import Options
from weft.planner.search import Candidate, Found, search
from weft.planner.search.found import MEANING, Reason
from weft.planner.search.verdict import verdict
from weft.planner.workload import Workload
from weft.simulate.step import Knowledge

SEARCH_AGAIN_S = 2.0
"""A search that took longer is not repeated for every question; plans are forecast anew instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A plan that lost."""

    candidate: Candidate
    slower: float
    """Part of the best step by which its own is longer."""
    words: str

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "name": self.candidate.name,
            "settings": settings(self.candidate.plan),
            "step_time_s": self.candidate.time.step_s,
            "slower": self.slower,
            "why": self.words,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Help:
    """What a change of the chips would bring."""

    change: str
    """``memory x 2``."""
    step_s: float
    gain: float
    """Part by which more tokens a second pass."""

    @property
    def words(self) -> str:
        """``memory x 2: 3.1 % more tokens a second``."""
        gain = f"{self.gain:.1%} more tokens a second" if self.gain >= 5e-4 else "no gain"
        return f"{self.change}: {gain}"

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {"change": self.change, "step_time_s": self.step_s, "gain": self.gain}


def alternatives(
    found: Found, best: Forecast, workload: Workload, knowledge: Knowledge, options: Options
) -> list[Alternative]:
    """The next best plans, and why each lost."""
    result = []
    for other in found.others[:5]:
        theirs = forecast(other.plan, workload, other.cluster, knowledge, time=other.time)
        slower = theirs.step_s / best.step_s - 1
        words = _why(best, theirs) + _forced(other, workload, knowledge, options)
        result.append(Alternative(candidate=other, slower=slower, words=words))
    return result


def settings(plan: Plan) -> str:
    """How the pipelines of a plan are set up, besides what its name says."""
    return " | ".join(dict.fromkeys(_settings(pipeline) for pipeline in plan.pipelines[:4]))


def _settings(pipeline: PipelinePlan) -> str:
    words: list[str] = [pipeline.schedule] if len(pipeline.stages) > 1 else []
    words += ["recompute"] * any(stage.recompute == "full" for stage in pipeline.stages)
    words += [f"ZeRO {max(stage.zero for stage in pipeline.stages)}"]
    words += [f"{pipeline.num_microbatches} microbatches of {pipeline.microbatch}"]
    return ", ".join(words)


def _why(best: Forecast, other: Forecast) -> str:
    """Where the slowest positions' time differs, the largest difference first."""
    ours, theirs = best.slowest, other.slowest
    differences = {
        "computes": theirs.computing_s - ours.computing_s,
        "communicates inside layers": theirs.communicating_s - ours.communicating_s,
        "waits for other stages": theirs.waiting_s - ours.waiting_s,
        "exchanges and updates at the end": theirs.once_s - ours.once_s,
    }
    longer = sorted(differences.items(), key=lambda item: -item[1])
    least = 0.05 * max(other.step_s - best.step_s, 1e-12)
    parts = [f"{what} {seconds:.3g} s longer" for what, seconds in longer if seconds > least]
    gains = [f"{what} {-seconds:.3g} s less" for what, seconds in longer if seconds < -least]
    if not parts:
        return "takes as long; another of the same speed was taken"
    return " and ".join(parts) + (f", though it {' and '.join(gains[:1])}" if gains else "")


def _forced(
    candidate: Candidate, workload: Workload, knowledge: Knowledge, options: Options
) -> str:
    """Says so where a plan recomputes only because its chips' memory demands it."""
    if all(stage.recompute == "off" for _, _, stage in candidate.plan.stages()):
        return ""
    kept = without_recompute(candidate.plan)
    short = shortages(kept, workload, candidate.cluster, knowledge, options.memory_part)
    if not short:
        return ""
    need, room = short[0].need_gib, short[0].room_gib
    chip = short[0].chip.name
    return f"; it recomputes, for without it a {chip} would need {need:.1f} GiB of {room:.1f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Other chips or links, in times of those there are."""

    name: str
    memory: float = 1.0
    inside: float = 1.0
    across: float = 1.0

    def apply(self, cluster: ClusterView, knowledge: Knowledge) -> tuple[ClusterView, Knowledge]:
        """The cluster after it."""
        if self.memory != 1.0:
            return with_memory(cluster, self.memory), knowledge
        return with_links(cluster, knowledge, self.inside, self.across)


CHANGES = (
    Change(name="memory x 1.25", memory=1.25),
    Change(name="memory x 2", memory=2.0),
    Change(name="links inside nodes x 2", inside=2.0),
    Change(name="network between nodes x 2", across=2.0),
)


def what_would_help(
    cluster: ClusterView,
    workload: Workload,
    knowledge: Knowledge,
    options: Options,
    *,
    best: Candidate,
    again: bool,
) -> Iterator[Help]:
    """More memory or faster links, one after another: the step then.

    Args:
        cluster: All chips there are.
        best: The plan for them as they are.
        again: Search anew for each; otherwise the same plan is asked about, and with more memory
            the same plan without recomputation.
    """
    for change in CHANGES:
        if again:
            others, known = change.apply(cluster, knowledge)
            step_s = search(workload, others, knowledge=known, options=options).best.time.step_s
        else:
            used, known = change.apply(best.cluster, knowledge)
            step_s = min(
                workload.time(plan, used, known).step_s
                for plan in (best.plan, without_recompute(best.plan))
                if plan == best.plan
                or not shortages(plan, workload, used, known, options.memory_part)
            )
        yield Help(change=change.name, step_s=step_s, gain=best.time.step_s / step_s - 1)


def pruned_in_words(found: Found) -> Iterator[str]:
    """How many candidates there were, and why most were not simulated."""
    yield (
        f"{found.considered:,} plans considered in {found.seconds:.2g} s, "
        f"{found.pruned.total:,} of them pruned, each for a reason"
    )
    for kind, reason in found.pruned.most_first():
        told = reason.bounds
        bounds = "" if told is None else " (frames of {:.3g} to {:.3g} s)".format(*told)
        yield f"  {kind}: {reason.count:,}{bounds}, such as {reason.examples[0]}"


def reasons_as_json(found: Found) -> list[dict[str, object]]:
    """What ``--json`` prints of those that were pruned, the most frequent reason first."""
    return [
        {
            "kind": kind,
            "means": MEANING[kind],
            "count": reason.count,
            "bounds_s": reason.bounds and list(reason.bounds),
            "examples": reason.examples,
        }
        for kind, reason in found.pruned.most_first()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPart:
    """Of a step, or of memory, in both plans."""

    name: str
    unit: str
    best: float
    rival: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A plan that a person asked about."""

    name: str
    settings: str
    step_s: float
    slower: float
    """Part of the best step by which its own is longer; below zero it is faster."""
    fits: bool
    reason: Reason
    parts: tuple[ComparedPart, ...]

    @property
    def words(self) -> str:
        """What became of it."""
        ahead = self.slower < 0 and self.fits
        return f"{'faster than what was found; ' * ahead}{self.reason.words}"

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "name": self.name,
            "settings": self.settings,
            "step_time_s": self.step_s,
            "slower": self.slower,
            "fits": self.fits,
            "reason": self.reason.kind,
            "words": self.words,
            "parts": [asdict(part) for part in self.parts],
        }


def compare(
    plan: Plan,
    best: Forecast,
    workload: Workload,
    cluster: ClusterView,
    knowledge: Knowledge,
    options: Options,
) -> Comparison:
    """Forecast a plan by the same model, whether it fits or not, beside the best.

    Args:
        cluster: All chips; the ranks of ``plan`` are numbered over them.
    """
    cast = forecast(plan, workload, cluster, knowledge)
    short = shortages(plan, workload, cluster, knowledge, options.memory_part)
    if short:
        worst = short[0]
        needs = f"{worst.key} on {worst.chip.name} needs {worst.need_gib:.1f} GiB"
        change = smallest_change(plan, workload, cluster, knowledge)
        words = f"it does not fit: {needs} of {worst.room_gib:.1f} that may be planned. {change}"
        reason = Reason("memory", words)
    else:
        reason = verdict(plan, workload, cluster, knowledge, options, best_s=best.step_s)
    return Comparison(
        name=name_of(plan, cluster),
        settings=settings(plan),
        step_s=cast.step_s,
        slower=cast.step_s / best.step_s - 1,
        fits=not short,
        reason=reason,
        parts=_compared_parts(best, cast),
    )


def _compared_parts(best: Forecast, other: Forecast) -> tuple[ComparedPart, ...]:
    """Of the position that works longest, and of the one with least room."""
    ours, theirs = best.slowest, other.slowest
    seconds = {
        "computing": (ours.computing_s, theirs.computing_s),
        "messages inside layers": (ours.communicating_s, theirs.communicating_s),
        "waiting for others": (ours.waiting_s, theirs.waiting_s),
        "exchange and update": (ours.once_s, theirs.once_s),
        "whole step": (best.step_s, other.step_s),
    }
    parts = [ComparedPart(name=name, unit="s", best=a, rival=b) for name, (a, b) in seconds.items()]
    a, b = best.fullest, other.fullest
    gib = ComparedPart(
        name="fullest rank", unit="GiB", best=a.memory.total / 2**30, rival=b.memory.total / 2**30
    )
    return (*parts, gib)
