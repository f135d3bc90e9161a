"""Context parallelism at work."""

from __future__ import annotations

from weft.parallel.cp.modules import SPLIT_FORMS
from weft.parallel.division import Division
from weft.parallel.runtime import Runtime
from weft.plan.layout import Replicate, Shard

RUNTIME = Runtime(
    {(Replicate, Shard): lambda group, _, after: Division(group, after).own_part}, SPLIT_FORMS
)
