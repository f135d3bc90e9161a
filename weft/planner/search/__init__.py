"""From a model, a workload and a pile of unlike chips to the fastest plan that fits."""

from weft.planner.search.found import Candidate, Found, NoPlan, Pruned, Reason
from weft.planner.search.search import search

__all__ = ["Candidate", "Found", "NoPlan", "Pruned", "Reason", "search"]
