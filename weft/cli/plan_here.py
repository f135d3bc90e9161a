"""What to expect of a plan on this machine, as far as its chips are known."""

from __future__ import annotations

from weft.config.errors import ConfigError
from weft.planner.forecast import forecast
from weft.planner.limits import limits_of
from weft.planner.naming import name_of
from weft.planner.outlook import Outlook
from weft.planner.workload import Workload
from weft.resolve.predict import UNMEASURED, chips_here
from weft.resolve.resolve import Resolved


def outlook_here(resolved: Resolved) -> tuple[Outlook | None, str]:
    """What to expect on this machine, or why nothing can be said."""
    plan = resolved.plan
    _, _, stage = next(iter(plan.stages()))
    workload = Workload(
        spec=resolved.spec,
        seq_len=resolved.config.data.seq_len,
        samples=plan.global_batch,
        precision=stage.precision,
    )
    try:
        chips = chips_here(resolved)
        if chips.is_guess:
            return None, UNMEASURED
        cast = forecast(plan, workload, chips.view, chips.knowledge)
    except ConfigError as error:
        return None, str(error)
    name = name_of(plan, chips.view)
    return Outlook(name=name, cluster=chips.view, forecast=cast, limits=limits_of(cast)), ""
