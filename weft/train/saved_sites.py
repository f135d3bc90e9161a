"""What a checkpoint of a job with sites holds, and who can go on with it.

``param`` is what sites had when they last met: the model that anybody reads, exports or goes on
with. Beside it lie ``outer.momentum``, and of each site what it has trained since, ``siteN.param``,
with its optimizer's state: the first site's under its usual names, the others' as ``siteN.exp_avg``
and so on. So a job without sites, or with another number of them, goes on from where they last
met, with the first site's state. An outer gradient under way is what follows from ``siteN.sent``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.checkpoint.entry import JSON
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.shard import Shard
from weft.outer.meeting import Meeting
from weft.plan.plan import Plan
from weft.train.assemble import Built

MOMENTUM = "outer.momentum"
Kinds = Callable[[str], str]
"""From a kind of tensors to the one under which a site's lie in a checkpoint."""


def kinds_here(built: Built) -> Kinds:
    """Of this rank's site."""
    return _plainly if built.meeting is None else _of_site(built.meeting.number)


def kinds_in(checkpoint: Checkpoint, built: Built) -> Kinds:
    """Those that this rank's site goes on with."""
    same = built.meeting is not None and _saved(checkpoint, built.meeting) is not None
    return kinds_here(built) if same else _plainly


def _plainly(kind: str) -> str:
    return kind


def _of_site(number: int) -> Kinds:
    return lambda kind: kind if number == 0 and kind != "param" else f"site{number}.{kind}"


def met_shards(meeting: Meeting) -> list[Shard]:
    """What this rank keeps of meetings: the first site what all have in common."""
    found = []

    def add(kind: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            found.append(Shard(main.spec.name, kind, main.spec.shape, main.box, tensor))

    for met in meeting.kept():
        main = met.main
        add(f"site{meeting.number}.sent", met.sent)
        if meeting.number == 0:
            add("param", met.value)
            add(MOMENTUM, met.momentum)
    return found


def state_of_sites(meeting: Meeting, weights: Sequence[JSON]) -> dict[str, JSON]:
    """What a checkpoint says of sites besides tensors; ``weights``: of each rank."""
    return {
        "asked": _asked(meeting),
        "weights": [weights[site[0]] for site in meeting.sites],
    }


def notes_of_sites(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    """What is worth knowing where as many sites did not leave a checkpoint as go on with it."""
    said = checkpoint.state.get("sites")
    weights = said.get("weights") if isinstance(said, dict) else None
    before, now = len(weights) if isinstance(weights, list) else 1, max(1, len(plan.sites))
    if before in (1, now):
        return []
    words = f"{now} sites go on" if now > 1 else "training goes on"
    where = f"{words} from where {before} sites last met before step {checkpoint.step}"
    return [f"{where}, with the optimizer's state of the first"]


def _saved(checkpoint: Checkpoint, meeting: Meeting) -> list[JSON] | None:
    """The weights of each site, if there are as many as now."""
    said = checkpoint.state.get("sites")
    weights = said.get("weights") if isinstance(said, dict) else None
    same = isinstance(weights, list) and len(weights) == len(meeting.sites)
    return weights if same else None


@torch.no_grad()
def restore_meeting(meeting: Meeting, checkpoint: Checkpoint) -> None:
    """Go on from the last meeting that a checkpoint tells of, once parameters have their values.

    What was under way is sent again, unless sites meet otherwise now: then it comes with the next.
    """
    meeting.start(checkpoint.step)
    has_momentum = MOMENTUM in checkpoint.kinds
    for met in meeting.kept():
        name, box = met.main.spec.name, met.main.box
        checkpoint.read_into(met.value, name, "param", box)
        if met.momentum is not None and has_momentum:
            checkpoint.read_into(met.momentum, name, MOMENTUM, box)
    weights, said = _saved(checkpoint, meeting), checkpoint.state.get("sites")
    alike = isinstance(said, dict) and said.get("asked") == _asked(meeting)
    if weights is None or not alike:
        return
    meeting.weights.copy_(torch.tensor(weights[meeting.number], dtype=torch.float64))
    kind = f"site{meeting.number}.sent"
    left = frozenset(checkpoint.names(kind))
    for met in meeting.kept():
        if met.main.spec.name in left:
            met.sent = torch.empty_like(met.value)
            checkpoint.read_into(met.sent, met.main.spec.name, kind, met.main.box)
    meeting.set_out_again(left)


def _asked(meeting: Meeting) -> JSON:
    """How sites meet, whichever pipelines they are."""
    return meeting.asked.model_dump(mode="json", exclude={"pipelines"})
