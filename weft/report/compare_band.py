"""How far apart rounding alone puts two ways of computing the same: the band of a comparison.

Two plans add the same terms in another order, so each operation of one differs from the other's by
a rounding error: relative to its result at most the unit roundoff ``u`` of the format that holds
it, and ``sqrt(n) u_acc`` for a sum of ``n`` terms in a format of roundoff ``u_acc`` (errors of
independent signs; Higham and Mary, SIAM J. Sci. Comput. 41 (2019), A2815). So an operation puts

    e = sqrt(u^2 + d_model u_acc^2)

between the two. Errors of different layers are independent and their squares add in the residual
stream, hence ``e sqrt(depth)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from weft.plan.plan import Precision
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Roles


def coarser(precisions: Iterable[Precision]) -> Precision:
    """The one that rounds most."""
    return max(precisions, key=lambda name: _roles(name).roundoff)


def operation_error(precision: Precision, d_model: int) -> float:
    """``e``: relative difference of two ways of doing one operation."""
    roles = _roles(precision)
    return sqrt(roles.roundoff**2 + d_model * roles.sum_roundoff**2)


def _roles(precision: Precision) -> Roles:
    """Raises ConfigError: a run had one of a package that is not installed here."""
    return PRECISIONS.named("compute.precision", precision)


TENSOR_SAFETY = 8.0
"""Roundings of a layer, and the largest of many tensors: plans that only split unlike were seen at
most at 0.55 of the band; see ``docs/compare.md``."""
UPDATE_GROWTH = 8.0
"""An update makes differences of weights out of the rounding of gradients, and Adam divides those
by their size: after the first update tensors differ several times as much as before it."""
WALK_STEPS = 100.0
"""Steps after which differences of weights no longer only add up, but also turn the gradients that
follow: fitted to one pair of bf16 runs of 300 steps (``docs/compare.md``), the one fitted number
of the band of losses."""
SCALAR_SAFETY = 8.0
"""Roundings of the loss itself: the sums of microbatches and of ranks, and the last division."""


def tensor_band(precision: Precision, d_model: int, *, depth: int, step: int) -> float:
    """Largest difference of a tensor after ``depth`` layers, relative to its norm.

    ``safety e sqrt(depth) (1 + growth (step - 1))``, for the few steps of a bisection.
    """
    grown = 1 + UPDATE_GROWTH * (step - 1)
    return TENSOR_SAFETY * operation_error(precision, d_model) * sqrt(depth) * grown


def loss_band(
    precision: Precision, *, d_model: int, num_layers: int, tokens: int, step: int, loss: float
) -> float:
    """Largest difference of the losses of step ``step``, counted from where both runs were equal.

    ``loss (e sqrt(num_layers + 1) sqrt(step + step^2 / walk_steps) / sqrt(tokens)
    + safety u_acc)``:
    errors of tokens are independent, so their mean has ``1 / sqrt(tokens)`` of one's; the rounding
    of each step's gradients moves the weights a little in a random direction, which makes a random
    walk, and later a steady growth. The second term is the rounding of the loss itself, all that
    fp32 and fp64 show for many steps.
    """
    walked = step + step**2 / WALK_STEPS
    walk = operation_error(precision, d_model) * sqrt((num_layers + 1) * walked / tokens)
    return loss * (walk + SCALAR_SAFETY * PRECISIONS[precision].sum_roundoff)
