"""Plans of a job on several machines, without ranks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic.test_move_requests import BATCH, plan_of
from resolve.test_resolve import LAPTOP

from weft.cluster.cluster import Cluster
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.elastic.failure import ANEW
from weft.elastic.nodes.fleet import Fleet
from weft.elastic.nodes.places import first_places
from weft.elastic.nodes.plans import NodePlans
from weft.elastic.nodes.remote import Hello, Node
from weft.resolve.resolve import resolve
from weft.train.job import Job


def test_a_job_goes_on_under_the_plan_that_is_asked_for(tmp_path: Path) -> None:
    """On fewer machines, or on spare ones too; and goes back to it from then on."""
    cluster = Cluster(nodes=(LAPTOP,))
    machine = {"cluster": json.loads(cluster.to_json()), "profile": None}
    hellos = [
        Hello(index=i, seats=1, name=f"host{i}", machine={**machine, "host": f"{i}"}, alike={})
        for i in range(3)
    ]
    nodes = {hello.index: Node(hello) for hello in hellos}
    head: Any = SimpleNamespace(nodes=nodes, there=list(nodes.values()))
    none: Any = None
    fleet = Fleet(head, "", none, folder=tmp_path, start=none, pack=none)
    loaded = load_config("debug", [*BATCH, "plan.shares=[4,4]"])
    now = resolve(loaded, cluster)
    fleet.places = first_places(head.there, now.plan)
    job = Job(config=now.config, plan=now.plan, out=tmp_path, last_step=9, threads=1)
    plans = NodePlans(loaded, now, job, fleet)
    for asked, on, seats in (
        ((2, 2, 4), (0, 1, 2), (0, 1, ANEW)),
        ((8,), (0,), (0,)),
        ((5, 3), (0, 1), (0, ANEW)),
    ):
        plan = plan_of(f"plan.shares={[*asked]}")
        plans.check(plan)
        assert plans.job.plan != plan
        assert plans.under(plan).startswith(f"{len(asked)} rank")
        assert (plans.job.plan, plans.seats) == (plan, seats)
        assert tuple(place.node for place in fleet.places) == on
        assert plans.is_whole
    for words, said in (
        (("plan.shares=[2,2,2,2]",), "expected at most 3, for so many places"),
        (("plan.shares=[2,4]", "batch.samples=6"), "batch.samples = 6: expected 8"),
    ):
        with pytest.raises(ConfigErrors, match=said):
            plans.check(plan_of(*words))
