"""From a model, a workload and a pile of unlike chips to the fastest plan that fits."""

from weft.planner.search.collected import seldom_collected
from weft.planner.search.found import Candidate, Found, NoPlan, Pruned, Reason
from weft.planner.search.search import fits, search
from weft.planner.search.watch import Watch

__all__ = [
    "Candidate",
    "Found",
    "NoPlan",
    "Pruned",
    "Reason",
    "Watch",
    "fits",
    "search",
    "seldom_collected",
]
