"""One optimizer step: the only gradient path, used by ``weft train`` and ``weft.weave`` alike.

loss = sum over all tokens of the global batch of (weight x token loss) / sum of weights. Both sums
run over the whole job before the one division, so no share, mask or microbatch size enters it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.spans import span
from weft.parallel.gradients import Gradients
from weft.train.loss_scale import LossScale
from weft.train.still_read import StillRead

M = TypeVar("M")

Passes = Callable[[M], Tensor]
"""Forward and backward of this rank's part of a global batch. It calls ``Gradients.begin`` and
leaves gradients of the loss sum / ``expected_weight``. Result: ``[loss sum, weight sum]``, fp64,
each counted on one rank of the job only."""


class Updates(Protocol):
    """What changes the main parameters."""

    def update(self, factor: Tensor, /) -> None:
        """Use gradients times ``factor``, a scalar of the device; nothing changes where it is 0."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, the same on every rank. Scalars on the device: reading them waits."""

    loss: Tensor
    """Mean over the whole job's weighted tokens; 0 where every weight is 0."""
    weight: Tensor
    """Sum of weights over the whole job."""
    grad_norm: Tensor
    """L2 norm of the gradient of ``loss``, before clipping."""
    asked: Tensor
    """Sum of the numbers by which ranks asked for something after this step."""
    data: Tensor
    """Fingerprint of the global batch, an integer; see ``Batch.fingerprint``."""
    added: Tensor
    """What ``passes`` gave beside its two sums, summed over the job."""
    skipped: Tensor | None = None
    """Bool: gradients overflowed and nothing changed; a smaller loss scale may help."""
    loss_scale: Tensor | None = None
    """Of the next step; None: the loss is not scaled."""


@dataclass(eq=False)
class Engine(Generic[M]):
    """Forward, backward, reduce, clip, update."""

    passes: Passes[M]
    gradients: Gradients
    optimizer: Updates
    comm: Comm
    _: KW_ONLY
    expected_weight: float = 1.0
    """About what the weights of a global batch add up to, the same on every rank: what keeps
    gradients near their mean's scale until the true sum is known."""
    max_grad_norm: float | None = None
    """Clip to this norm; None: do not clip."""
    skips_non_finite: bool = False
    """A step without a finite loss and gradient norm changes nothing."""
    loss_scale: LossScale | None = None
    """By which ``passes`` scales gradients more."""
    settle: Callable[[Tensor, Tensor], None] | None = None
    """Takes what ``passes`` gives beside its two sums, summed over the job, and the factor of the
    step's gradients."""
    meet: Callable[[Tensor], None] | None = None
    """Called after each update with the sum of weights: parameters may meet those of other sites,
    and nothing else here knows of them."""
    still_read: StillRead = field(default_factory=StillRead)
    """Copies of the state that the next update must not overtake."""

    def step(self, batch: M, *, asked: Callable[[], int] = int, data: int = 0) -> StepResult:
        """Train on this rank's part of one global batch (possibly empty).

        Args:
            asked: What this rank asks for by the time that its part is computed, 0 for nothing.
            data: Fingerprint of that part, 0 where another rank computes the same one.
        """
        result, factor = self.backward(batch, asked=asked, data=data)
        self.update(factor, result.weight)
        return result

    def backward(
        self, batch: M, *, asked: Callable[[], int] = int, data: int = 0
    ) -> tuple[StepResult, Tensor]:
        """Gradients of the whole job, and the factor that makes them the clipped mean's."""
        sums = self.passes(batch)
        self.gradients.finish()
        said = [torch.full_like(sums[0], float(number)) for number in (asked(), data)]
        totals = torch.cat([sums, torch.stack([self.gradients.squared_norm(), *said])])
        self.comm.all_reduce(totals, name="step totals")
        loss, weight = totals[:2]
        squared_norm, all_asked, read = totals[-3:]
        some = weight > 0
        to_mean = torch.where(some, self.expected_weight / weight, 0.0)
        if self.loss_scale is not None:
            to_mean = to_mean / self.loss_scale.value
        norm = squared_norm.sqrt() * to_mean
        factor = to_mean
        if self.max_grad_norm is not None:
            factor = to_mean * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        mean = torch.where(some, loss / weight, 0.0)
        if self.skips_non_finite:  # of all ranks' totals, so all ranks alike
            factor = torch.where(norm.isfinite() & mean.isfinite(), factor, 0.0)
        result = StepResult(mean, weight, norm, all_asked, read, totals[2:-3])
        if self.loss_scale is not None:
            finite = norm.isfinite()
            skipped = self.loss_scale.settle(finite)
            result = replace(result, skipped=skipped, loss_scale=self.loss_scale.value.clone())
            factor = torch.where(finite, factor, 0.0)
        if self.settle is not None:
            self.settle(result.added, factor)
        return result, factor

    def update(self, factor: Tensor, weight: Tensor) -> None:
        """One optimizer update. A batch whose weights are all zero changes nothing.

        ``weight``: sum of the batch's weights.
        """
        with span("update"):
            self.still_read.wait(self.comm.device)
            self.optimizer.update(factor)
            self.gradients.publish()
            if self.meet is not None:
                self.meet(weight)
