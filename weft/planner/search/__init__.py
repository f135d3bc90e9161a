"""From a model, a workload and a pile of unlike chips to the fastest plan that fits."""

from weft.planner.search.found import Candidate, Found, NoPlan, Pruned, Reason
from weft.planner.search.search import Progress, fits, search

__all__ = ["Candidate", "Found", "NoPlan", "Progress", "Pruned", "Reason", "fits", "search"]
