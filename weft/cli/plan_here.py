"""What to expect of a plan on this machine, as far as its chips are known."""

from __future__ import annotations

from weft.config.errors import ConfigError
from weft.planner.forecast import forecast
from weft.planner.limits import limits_of
from weft.planner.outlook import Outlook
from weft.planner.workload import Workload
from weft.simulate.known import local_profile
from weft.train.rank_chips import Machine, chips_of_machines
from weft.train.resolve import Resolved


def outlook_here(resolved: Resolved) -> tuple[Outlook | None, str]:
    """What to expect on this machine, or why nothing can be said."""
    plan, node = resolved.plan, resolved.cluster.nodes[0]
    device = {rank: stage.device for _, _, stage in plan.stages() for rank in stage.mesh.ranks}
    machine = Machine(
        node=node,
        ranks=plan.world_size,
        profile=local_profile(node),
        threads=resolved.threads,
    )
    _, _, stage = next(iter(plan.stages()))
    workload = Workload(
        spec=resolved.spec,
        seq_len=resolved.config.data.seq_len,
        samples=plan.global_batch,
        precision=stage.precision,
    )
    try:
        chips = chips_of_machines([machine], [device[rank] for rank in sorted(device)])
        if chips.is_guess:
            return None, "nobody has measured this machine's cores; `weft chips profile` does"
        cast = forecast(plan, workload, chips.view, chips.knowledge)
    except ConfigError as error:
        return None, str(error)
    return Outlook(name="here", cluster=chips.view, forecast=cast, limits=limits_of(cast)), ""
