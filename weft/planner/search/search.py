"""The search itself."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from weft.cluster.view import ClusterView
from weft.cost.memory import memory_of_plan
from weft.plan.tiling import split_evenly
from weft.planner.options import Options
from weft.planner.search.choice import Line, Section, plan_of, used_cluster, used_part
from weft.planner.search.found import Candidate, Found, NoPlan, Pruned
from weft.planner.workload import Workload
from weft.simulate.step import Knowledge, time_of_plan

DEFAULTS = Options()

Progress = Callable[[int, float], None]
"""Told now and then how many candidates are done, and the best step so far, in seconds."""


def search(
    workload: Workload,
    cluster: ClusterView,
    *,
    knowledge: Knowledge | None = None,
    options: Options = DEFAULTS,
    progress: Progress | None = None,
) -> Found:
    """The fastest plan that fits.

    Raises:
        NoPlan: nothing fits.
        ConfigError: a rate is not known.
    """
    begin = perf_counter()
    del progress
    candidates = []
    for number, pool in enumerate(cluster.pools):
        for tp in (1, 2, 4, 8):
            for meshes in (1, 2, 4, 8, 16):
                if meshes > workload.spec.num_layers or tp > pool.chips_per_node:
                    continue
                dp = min(pool.num_chips // (tp * meshes), workload.samples)
                if not dp or used_part(pool, dp * tp * meshes, tp) is None:
                    continue
                section = Section(number, tp, dp, meshes, "full", 1 if dp > 1 else 0)
                layers = tuple(split_evenly(workload.spec.num_layers, meshes))
                line = Line((section,), dp, "1f1b", layers, workload.samples)
                plan, used = plan_of([line], workload, cluster), used_cluster([line], cluster)
                memory = memory_of_plan(plan, workload.spec, workload.seq_len)
                budget = pool.chip.memory_gib * 2**30 * options.memory_part
                if max(m.total for m in memory.values()) > budget:
                    continue
                step = time_of_plan(
                    plan, workload.spec, used, seq_len=workload.seq_len, knowledge=knowledge
                )
                name = f"{meshes} stages on {pool.chip.name}"
                candidates.append(
                    Candidate(name=name, plan=plan, cluster=used, time=step, memory=memory)
                )
    if not candidates:
        raise NoPlan("cluster", [], "more memory")
    candidates.sort(key=lambda candidate: candidate.time.step_s)
    return Found(
        best=candidates[0],
        others=tuple(candidates[1:6]),
        considered=len(candidates),
        pruned=Pruned(),
        seconds=perf_counter() - begin,
    )
