"""A stage that cuts its part of a microbatch into smaller ones.

What one pass computes with and drops is smaller; what is kept for backward stays, unless it is
recomputed.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from weft.nn.context import Context
from weft.nn.stage import Objective, Output, Stage, Terms, Tree, added, rows_of
from weft.plan.tiling import split_evenly


class InPasses:
    """Computes a stage's samples in ``passes`` consecutive parts. The numbers are the same.

    Fewer samples than passes make as many passes as there are samples; or, where ranks with other
    samples have to meet in each pass, some without any.
    """

    def __init__(self, stage: Stage, passes: int, *, meets: bool = False) -> None:
        self._stage = stage
        self._passes = passes
        self._meets = meets
        self.module = stage.module
        self.units = stage.units
        self.spans_samples = stage.spans_samples

    def compute(self, inputs: Tree, context: Context) -> Output:
        """As the stage does."""
        outputs = [
            self._stage.compute(rows_of(inputs, rows), context.rows(rows))
            for rows in _parts(inputs, self._passes, empty=self._meets)
        ]
        trees = [output.tree for output in outputs]
        tree = {name: torch.cat([each[name] for each in trees]) for name in trees[0]}
        return Output(tree, added(output.terms for output in outputs))


def objective_in_passes(objective: Objective, passes: int) -> Objective:
    """The same sums, made part by part."""

    def call(output: Tree, batch: Tree) -> Terms:
        parts = _parts(output, passes)
        return added(objective(rows_of(output, rows), rows_of(batch, rows)) for rows in parts)

    return call


def _parts(tree: Tree, passes: int, *, empty: bool = False) -> list[slice]:
    """At least one, also where there are no samples; ``empty``: as many as there are passes."""
    samples = len(next(iter(tree.values())))
    sizes = [size for size in split_evenly(samples, passes) if size or empty] or [0]
    starts = accumulate(sizes, initial=0)
    return [slice(low, low + size) for low, size in zip(starts, sizes, strict=False)]
