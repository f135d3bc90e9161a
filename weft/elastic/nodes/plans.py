"""A job on several machines goes on under another plan: on what is left, or with who came back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakSet

from weft.cluster.cluster import Cluster
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import Loaded
from weft.elastic.failure import ANEW, Epoch
from weft.elastic.nodes.fleet import Fleet
from weft.elastic.nodes.places import Place, ranks_of
from weft.elastic.nodes.remote import Node
from weft.elastic.replan import refuse_unlike
from weft.plan.plan import Plan
from weft.report.events import EventLog
from weft.resolve.left import asking_of, plan_for_machines, sites_left
from weft.resolve.memory_here import refuse_too_large
from weft.resolve.peaks import peaks_here
from weft.resolve.planned import Chosen
from weft.resolve.prediction import PREDICTION_FILE, predict_run
from weft.resolve.queues import queues_for
from weft.resolve.resolve import Resolved, resolve
from weft.train.job import Job
from weft.train.run_list import change_in_words, last_step

HEAD = 0
"""Index of its machine."""


class NodePlans:
    """A job whose plan may change while its machines stay.

    Args:
        resolved: With the plan that it begins with, which it goes back to as soon as it can.
    """

    def __init__(self, loaded: Loaded, resolved: Resolved, job: Job, fleet: Fleet) -> None:
        self.job = job
        """Under the plan that it has now."""
        self.seats: tuple[int, ...] = ()
        """For each rank the one that its process was under the plan before, or ``ANEW``."""
        self._loaded = replace(loaded, config=resolved.config)
        self._cluster = resolved.cluster
        self._fleet = fleet
        self._first, self._first_places = job, fleet.places
        self._queues = tuple(queues_for(job.plan, rank) for rank in range(job.plan.world_size))
        """Of the device of each rank, which its process has for good."""

    @property
    def is_whole(self) -> bool:
        """The plan is the one that the job began with."""
        return self.job.plan == self._first.plan

    def without(self, lost: Sequence[int]) -> str:
        """Go on with the ranks that are left and with spare machines; from which plan to which.

        Raises:
            ConfigErrors: there is no plan for those.
        """
        self._fleet.give_up(lost)
        return self._taken([rank for rank in range(self.job.plan.world_size) if rank not in lost])

    def with_all(self) -> str:
        """Go on with all ranks, and with the machines that have come; from which plan to which.

        Raises:
            ConfigErrors: there is no plan for those.
        """
        return self._taken(range(self.job.plan.world_size))

    def check(self, plan: Plan) -> None:
        """Raises ConfigErrors: the job cannot go on under it."""
        self._asked(plan)

    def under(self, plan: Plan) -> str:
        """Go on with all ranks as far as the plan has work for them, and with spare machines where
        it has more; from which plan to which. It is what the job goes back to from then on.

        Raises:
            ConfigErrors: the plan does not fit the model, the batch or the machines.
        """
        places, seats = self._asked(plan)
        before = self.job.plan
        self._take(plan, places, seats, ["asked for"])
        self._first, self._first_places = self.job, places
        return change_in_words(before, plan)

    def _asked(self, plan: Plan) -> tuple[tuple[Place, ...], Sequence[int]]:
        """Places for the ranks of a plan, and the processes that they keep."""
        seats = self._seats(range(self.job.plan.world_size), plan.world_size)
        families = [(family, None) for family in plan.devices]
        number = {"ranks": plan.world_size}
        try:
            refuse_unlike(plan, self.job.plan)
            if len(seats) < plan.world_size:
                expected = f"at most {len(seats)}, for so many places have the machines of the job"
                raise ConfigError("plan", number, expected)
            places = self._fleet.arranged(seats, families)
            if places is None:
                expected = "ranks for which the machines of the job have devices"
                raise ConfigError("plan", number, expected)
        except ConfigError as error:
            raise self._loaded.place(error) from error
        for index, ranks in ranks_of(places).items():
            machine = self._fleet.head.nodes[index].hello.machine["cluster"]
            cluster = Cluster.from_json(json.dumps(machine))
            resolved = self._resolved(plan, cluster, len(ranks), ["asked for"])
            refuse_too_large(self._loaded, resolved, ranks)
        return places, [seat for _, seat in seats]

    def _seats(self, kept: Sequence[int], wanted: int) -> list[tuple[int, int]]:
        """So many at most: the machine of each, and the rank that is there, or ``ANEW``. On each
        machine those that stay come first."""
        mine = [(self._fleet.places[rank].node, rank) for rank in kept]
        spare = [(node, ANEW) for node in self._fleet.free()]
        return sorted((mine + spare)[:wanted], key=lambda seat: (seat[0], seat[1] == ANEW, seat[1]))

    def _taken(self, kept: Sequence[int]) -> str:
        """Those ranks keep their places, and as many are added as a plan has work for."""
        wanted = self._first.plan.world_size
        seats = self._seats(kept, wanted)
        if seats[0][0] != HEAD:
            hint = "Its command guides the others, and rank 0 writes what is written beside it."
            expected = "replace, where no rank is left on node 0"
            raise ConfigErrors([ConfigError("recovery.when_lost", "replan", expected, hint)])
        plan, why, places = self._first.plan, "as the job began", None
        notes: Sequence[str] = ()
        if len(seats) == wanted:
            kinds = [(place.kind.family, place.kind.chip) for place in self._first_places]
            places = self._fleet.arranged(seats, kinds)
        if places is None:
            if plan.sites:
                plan, why, seats = self._of_sites(kept)
            else:
                chosen = self._chosen([node for node, _ in seats])
                plan, notes, why = chosen.plan, chosen.notes, chosen.notes[0]
                seats = seats[: plan.world_size]
            places = self._fleet.arranged(seats, [(family, None) for family in plan.devices])
        if places is None:
            expected = "replace, where a machine has fewer accelerators than ranks are left on it"
            raise ConfigErrors([ConfigError("recovery.when_lost", "replan", expected)])
        before = self.job.plan
        self._take(plan, places, [seat for _, seat in seats], notes)
        return f"{change_in_words(before, plan)}; {why}"

    def _of_sites(self, kept: Sequence[int]) -> tuple[Plan, str, list[tuple[int, int]]]:
        """Whole pipelines of those ranks go on in their seats: who is away is left out until all of
        its machines are back."""
        now = self.job.plan
        try:
            plan, why, before = sites_left(now, kept)
            if plan == now:
                expected = "machines for all ranks that the job began with"
                raise ConfigError("machines", {"ranks": len(before)}, expected)
        except ConfigError as error:
            raise self._loaded.place(error) from error
        return plan, why, [(self._fleet.places[rank].node, rank) for rank in before]

    def _chosen(self, nodes: Sequence[int]) -> Chosen:
        machines = [self._fleet.head.nodes[index].hello.machine for index in nodes]
        return plan_for_machines(self._loaded, self._first.plan, machines)

    def _resolved(
        self,
        plan: Plan,
        cluster: Cluster,
        ranks_here: int,
        why: Sequence[str],
        *,
        sites_stay: bool = True,
    ) -> Resolved:
        return resolve(
            self._loaded if sites_stay else asking_of(self._loaded, plan),
            cluster,
            world_size=plan.world_size,
            ranks_here=ranks_here,
            plan=plan,
            why=why,
        )

    def _take(
        self, plan: Plan, places: tuple[Place, ...], seats: Sequence[int], why: Sequence[str]
    ) -> None:
        """The plan becomes the job's."""
        here = ranks_of(places)[HEAD]
        resolved = self._resolved(plan, self._cluster, len(here), why, sites_stay=False)
        prediction = self._first.prediction
        if plan != self._first.plan or prediction is None:
            prediction = predict_run(resolved, ranks_here=len(here))
        needed = [queues_for(plan, rank) for rank in range(plan.world_size)]
        has = [0 if seat == ANEW else self._queues[seat] for seat in seats]
        pairs = list(zip(seats, needed, has, strict=True))
        self.seats = tuple(ANEW if wants > got else seat for seat, wants, got in pairs)
        self._queues = tuple(max(wants, got) for _, wants, got in pairs)
        files = {"plan.json": plan.to_json(), PREDICTION_FILE: prediction.to_json()}
        self._fleet.places = places
        self.job = replace(
            self.job,
            plan=plan,
            threads=resolved.threads,
            prediction=prediction,
            peaks=peaks_here(resolved, here),
            files={**self.job.files, **files},
        )


class Arrivals:
    """Machines that come while the ranks are at work are spare, or what the job lacks.

    Args:
        plans: Takes them in at the next step, where the job has another plan than its own.
        tell: Says a line to the person who started the job.
    """

    def __init__(
        self, fleet: Fleet, job: Job, plans: NodePlans, tell: Callable[[str], None]
    ) -> None:
        self._fleet, self._job, self._plans, self._tell = fleet, job, plans, tell
        self._events = EventLog(job.out, began=job.began)
        self._known = WeakSet[Node]()
        """Machines that no other plan has work for."""

    def plan(self) -> str:
        """The job's plan of the moment, as machines that come are told it."""
        return self._plans.job.plan.to_json()

    def wanted(self) -> bool:
        """Ranks are to come to the door for a machine that has come. Asked again and again."""
        late = self._fleet.head.look(self.plan())
        if self._plans.is_whole:
            return False
        free = set(self._fleet.free())
        return any(node.index in free and node not in self._known for node in late)

    def epoch(self) -> Epoch:
        """They have come: what they do next."""
        late = [node for node in self._fleet.head.there if node.is_late and node.is_ready]
        step = int(last_step(self._job.out / "metrics.jsonl").get("step", 0))
        names = " and ".join(node.words for node in late if node not in self._known)
        self._known.update(late)
        try:
            words = f"the plan is now {self._plans.with_all()}, for {names} has come"
            seats: tuple[int, ...] | None = self._plans.seats
        except ConfigErrors as errors:
            words = f"{names} stays spare, for there is no other plan: {errors.errors[0]}"
            seats = None
        self._events.write("replan", words, step=step)
        self._tell(f"after step {step}: {words}")
        return Epoch((self._plans.job,), self._plans.job.plan.world_size, seats)
