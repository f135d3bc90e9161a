"""What the planner is asked for trials: its best plans of each kind, as far as they are unlike.

Which layers, samples and chips stages have is never tried blindly: the planner answers that, for
each combination of what ``tune`` leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from weft.cluster.cluster import HOST
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.config.tune_section import Layout, TuneConfig
from weft.models.registry import dims_of_model
from weft.plan.plan import Plan, ScheduleName, StagePlan
from weft.planner.problem import Options, Problem
from weft.planner.renumber import renumbered
from weft.planner.search import Candidate as Answer
from weft.planner.search import search
from weft.planner.validate import check_pieces, refuse_idle_pieces
from weft.recompute.asked import offloads
from weft.tune.candidate import Candidate, candidate_of, likeness

USUAL_MICROS = (1, 2, 4, 8)
Tell = Callable[[int, int], None]
"""Told how many questions of how many are answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What trials are chosen from."""

    problem: Problem
    """With what was asked for beside ``tune``."""
    tune: TuneConfig
    there: ClusterView | None
    """The chips of processes that are there whatever the plan; None: a plan may leave chips out,
    and has the first ranks."""
    finish: Callable[[Plan], Plan]
    """Gives a plan of the search what is no matter of the search."""
    is_guess: bool
    """Rates are those of an average core, for the machine has no profile."""

    def __post_init__(self) -> None:
        samples, micros = self.problem.workload.samples, self.tune.micros
        if micros and min(micros) > samples:
            expected = f"some that are no more than the {samples} samples of a step"
            raise ConfigError("tune.micros", list(micros), expected)
        modes = self.tune.recompute or ()
        hosts = {pool.chip.device for pool in self.problem.cluster.pools} == {HOST}
        if hosts and modes and all(m != "auto" and offloads(m, None, "host") for m in modes):
            hint = "A processor's memory is the host's: nothing would be gained."
            raise ConfigError("tune.recompute", list(modes), "others on processors", hint)

    def candidates(
        self, tell: Tell = lambda *_: None, enough: Callable[[], bool] = lambda: False
    ) -> list[Candidate]:
        """Unlike plans, the fastest by prediction first.

        Args:
            enough: Once there is one, whether what is not asked yet is left out.

        Raises:
            ConfigError: nothing fits, whatever is asked (``NoPlan``), or a rate is not known.
        """
        found: dict[object, Candidate] = {}
        refused: list[ConfigError] = []
        questions = list(self._questions())
        for number, options in enumerate(questions, start=1):
            try:
                for each in self._answers(options):
                    _keep_faster(found, each)
            except ConfigError as error:
                refused.append(error)
            tell(number, len(questions))
            if found and enough():
                break
        if not found:
            raise refused[0]
        return sorted(found.values(), key=lambda each: each.predicted_s)[: self.tune.plans]

    def candidate_of(self, plan: Plan) -> Candidate:
        """The user's own plan, on the ranks of ``there``."""
        there = self.there or self.problem.cluster
        return candidate_of(plan, self.problem.on(there), is_given=True)

    def _questions(self) -> Iterator[Options]:
        samples = self.problem.workload.samples
        micros = self.tune.micros or self.problem.options.micros or USUAL_MICROS
        for options in self._ways():
            for micro in micros:
                if micro <= samples:
                    yield replace(options, micros=(micro,))

    def _ways(self) -> Iterator[Options]:
        """In which chips may be laid out, recompute and so on, whatever the micro-batch."""
        usual, tune = self.problem.options, self.tune
        schedules: list[tuple[ScheduleName, ...]] = [(name,) for name in tune.schedules or ()]
        both = product(tune.borders, schedules or [usual.schedules])
        for border, names in both:
            asked = replace(usual, schedules=names, border=border or usual.border)
            if tune.recompute is not None:
                modes = [_recomputing(asked, mode) for mode in tune.recompute]
                yield from (_laid_out(m, layout) for layout, m in product(tune.layouts, modes))
                continue
            yield from (_laid_out(asked, layout) for layout in tune.layouts)
            if usual.mixed_recompute:  # a way out of little memory, asked about once
                yield _laid_out(_recomputing(asked, "full"), tune.layouts[0])

    def _answers(self, options: Options) -> Iterable[Candidate]:
        found = search(replace(self.problem, options=options))
        for answer in (found.best, *found.others):
            for plan in self._variants(answer.plan):
                yield self._placed(plan, answer)

    def _variants(self, plan: Plan) -> Iterator[Plan]:
        """With each number of pieces that has an effect; as it is where none can have one."""
        for pieces in self.tune.pieces:
            cut = plan.each(partial(_in_pieces, pieces))
            try:
                refuse_idle_pieces(cut, dims_of_model(self.problem.workload.spec))
            except ConfigError:
                continue
            yield cut

    def _placed(self, plan: Plan, answer: Answer) -> Candidate:
        time = answer.time if plan == answer.plan else None
        used = self.problem.on(answer.cluster)
        if self.there is None:
            return candidate_of(self.finish(plan), used, time=time)
        placed = renumbered(plan, answer.cluster, self.there)
        return candidate_of(self.finish(placed), self.problem.on(self.there))


def _keep_faster(found: dict[object, Candidate], new: Candidate) -> None:
    """Of plans that are alike, the faster by prediction."""
    known = found.setdefault(likeness(new), new)
    if new.predicted_s < known.predicted_s:
        found[likeness(new)] = new


def _in_pieces(pieces: int, stage: StagePlan) -> StagePlan:
    """Where it gathers something inside layers."""
    cut = replace(stage, pieces=pieces)
    try:
        check_pieces("pieces", cut)
    except ConfigError:
        return stage
    return cut


def _recomputing(usual: Options, mode: str) -> Options:
    if mode == "auto":
        return replace(usual, recompute=Options().recompute, mixed_recompute=True)
    return replace(usual, recompute=(mode,), mixed_recompute=False)


def _laid_out(asked: Options, layout: Layout) -> Options:
    if layout == "one-stage":
        return replace(asked, max_stages=1)
    return replace(asked, max_pipelines=1) if layout == "one-pipeline" else asked
