"""All that Weft is told of this family. Whoever imports this adds it to the process."""

from __future__ import annotations

from task_experts.layout import layout
from task_experts.model import Classes, Vision
from task_experts.sizes import SIZES, VisionSpec, check, params_of, shape
from weft.config.sections import ModelConfig
from weft.models.family import Family
from weft.models.registry import register_family

FAMILY = Family(
    name="task-experts",
    order=11,
    spec=VisionSpec,
    sizes=SIZES,
    param_specs=lambda spec: params_of(layout(spec)),
    layout=layout,
    check=check,
    shape=shape,
    config=ModelConfig,
    model=lambda: Vision,
    task=Classes,
)
register_family(FAMILY)
