"""What a checkpoint of a job with sites holds, and who can go on with it.

``param`` is what sites had when they last met: the model that anybody reads, exports or goes on
with. Beside it lie ``outer.momentum``, and of each site what it has trained since, ``siteN.param``,
with its optimizer's state: the first site's under its usual names, the others' as ``siteN.exp_avg``
and so on. So a job without sites, or with another number of them, goes on from where they last
met, with the first site's state. An outer gradient under way is what follows from ``siteN.sent``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    return _plainly if _own(checkpoint, built.meeting) is None else kinds_here(built)


def said_in(checkpoint: Checkpoint, built: Built) -> dict[str, JSON]:
    """What a checkpoint says besides tensors, to this rank's site where sites differ."""
    return {**checkpoint.state, **(_own(checkpoint, built.meeting) or {})}


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


def own_state(built: Built) -> dict[str, JSON]:
    """What may differ from site to site besides tensors, as this rank knows it."""
    scale = built.engine.loss_scale
    own: dict[str, JSON] = {"updates": built.optimizer.num_updates}
    if built.meeting is not None:
        own["weights"] = built.meeting.weights.tolist()
    if scale is not None:
        own["loss_scale"] = dict(scale.state())
    return own


def state_of_sites(meeting: Meeting | None, own: Sequence[dict[str, Any]]) -> dict[str, JSON]:
    """What a checkpoint says of ``own_state`` of all ranks: of the first site for all who go on
    from where sites last met, and of each site. Ranks that keep no parameter do no update."""
    sites = [range(len(own))] if meeting is None else meeting.sites
    each = [own[site[0]] | {"updates": max(own[r]["updates"] for r in site)} for site in sites]
    if meeting is None:
        return each[0]
    first = {key: value for key, value in each[0].items() if key != "weights"}
    return first | {"sites": {"asked": _asked(meeting), "each": each}}


def notes_of_sites(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    """What is worth knowing where as many sites did not leave a checkpoint as go on with it."""
    said = checkpoint.state.get("sites")
    each = said.get("each") if isinstance(said, dict) else None
    before, now = len(each) if isinstance(each, list) else 1, max(1, len(plan.sites))
    if before in (1, now):
        return []
    words = f"{now} sites go on" if now > 1 else "training goes on"
    where = f"{words} from where {before} sites last met before step {checkpoint.step}"
    return [f"{where}, with the optimizer's state of the first"]


def _own(checkpoint: Checkpoint, meeting: Meeting | None) -> dict[str, Any] | None:
    """What a checkpoint says of this rank's site alone, if there were as many as now."""
    said = checkpoint.state.get("sites")
    each = said.get("each") if isinstance(said, dict) else None
    if meeting is None or not isinstance(each, list) or len(each) != len(meeting.sites):
        return None
    own = each[meeting.number]
    assert isinstance(own, dict), f"sites.each = {each!r} in {checkpoint.folder}"
    return own


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
    own, said = _own(checkpoint, meeting), checkpoint.state.get("sites")
    alike = isinstance(said, dict) and said.get("asked") == _asked(meeting)
    if own is None or not alike:
        return
    meeting.weights.copy_(torch.tensor(own["weights"], dtype=torch.float64))
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
