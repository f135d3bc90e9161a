"""How activations change along the tensor-parallel axis, each change with its backward."""

from __future__ import annotations

from weft.parallel.division import Division
from weft.parallel.runtime import Changes
from weft.plan.layout import Partial, Replicate, Shard

CHANGES: Changes = {
    (Shard, Replicate): lambda group, before, _: Division(group, before).gather,
    (Partial, Shard): lambda group, _, after: Division(group, after).scatter_sum,
    (Replicate, Shard): lambda group, _, after: Division(group, after).own_part,
}
