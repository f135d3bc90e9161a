"""The sections under ``optim``: how parameters are updated, and where what that needs is kept."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from weft.config.errors import ConfigError
from weft.config.values import Count, Flag, Fraction, Number, Part, Positive, Section, Text


class WsdSchedule(Section):
    """Warm up, stay at `lr`, then go down in a straight line to the end of training."""

    kind: Literal["wsd"] = "wsd"
    """Which schedule this is."""
    warmup: Part = 0.05
    """Part of the run in which the learning rate rises from 0 to `lr`."""
    decay: Part = 0.2
    """Last part of the run, from `lr` down to final_ratio x lr."""
    final_ratio: Part = 0.0
    """Learning rate after the last step, as a part of `lr`."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.warmup + self.decay > 1:
            expected = f"at most {1 - self.warmup:g}, what warmup leaves"
            raise ConfigError("optim.schedule.decay", self.decay, expected)
        return self


class CosineSchedule(Section):
    """Warm up, then go down along half a cosine to the end of training."""

    kind: Literal["cosine"] = "cosine"
    """Which schedule this is."""
    warmup: Part = 0.05
    """Part of the run in which the learning rate rises from 0 to `lr`."""
    final_ratio: Part = 0.1
    """Learning rate after the last step, as a part of `lr`."""


class ParamGroupConfig(Section):
    """Parameters that are treated otherwise than the rest: updated so, or not at all, or multiplied
    with."""

    params: Text
    """Pattern of parameter names; `*` is any text, dots too: "layers.*.attn.*", "embed.weight"."""
    narrower_than: Count | None = None
    """Only matrices whose shorter side, in the unsplit model, is less; null is all of the name."""
    lr_scale: Positive = 1.0
    """Their learning rate, as a multiple of `optim.lr`."""
    weight_decay: Number | None = None
    """Their weight decay, norms and biases included; null is as for the rest."""
    trainable: Flag = True
    """false leaves them as they are: without gradient, optimizer state or master weights."""
    fp8: Flag = True
    """false: where `precision` is one of fp8, products with them have 16 bits all the same."""

    @model_validator(mode="after")
    def _frozen_ones_need_no_numbers(self) -> Self:
        if not self.trainable and (self.lr_scale != 1.0 or self.weight_decay is not None):
            expected = "no lr_scale or weight_decay beside it"
            raise ConfigError("optim.groups", f"trainable: false for {self.params!r}", expected)
        return self


class OptimConfig(Section):
    """What every optimizer has: its learning rate over time, clipping, groups of parameters."""

    kind: str
    lr: Positive = 1e-3
    """Highest learning rate."""
    weight_decay: Number = 0.1
    """Pull of the weight matrices towards 0; norms, biases and embeddings are left alone."""
    max_grad_norm: Positive | None = 1.0
    """Gradients of a larger norm over the whole model are scaled down to it; null never scales."""
    schedule: Annotated[WsdSchedule | CosineSchedule, Field(discriminator="kind")] = WsdSchedule()
    """Learning rate over time, chosen by `kind`."""
    groups: tuple[ParamGroupConfig, ...] = ()
    """Parameters by name with numbers of their own, or frozen; the first entry that matches a
    parameter counts."""
    state_tier: Literal["auto", "device", "host", "disk"] = "auto"
    """Where processes keep what only updates need, the optimizer's state and fp32 master weights:
    "host" is the machine's memory, "disk" files in `state_folder`; updates then bring it to the
    device piece by piece, with the same numbers. "auto" is "device", the memory of the chip that
    computes, and with `plan.auto` another where nothing else fits."""
    param_tier: Literal["auto", "device", "host", "disk"] = "auto"
    """Where processes keep the parameters that they compute with, where those have fp32 master
    weights: "host" is the machine's memory, "disk" files in `state_folder`, from which each block's
    come before it computes, in forward and backward, with the same numbers. Ranks that hold the
    same need `zero: 3`. Where what only updates need is elsewhere too, gradients are added up
    there: in the host's memory if either is there, else on disk. "auto" is as of `state_tier`."""
    expert_tier: Literal["auto", "device", "host", "disk"] = "auto"
    """Where processes keep experts, with their gradients and all that updates need: "host" is the
    memory of an accelerator's machine, "disk" files in `state_folder`. A layer's experts come
    before it computes, and one layer ahead, with the same numbers. "auto" is "device", and with
    `plan.auto` another where that is faster, or nothing else fits."""
    expert_layers: Count = 2
    """Layers whose experts may be on the device at a time, where they are kept elsewhere: the one
    that computes, the one that comes next, and above 2 those that computed last."""
    state_folder: Text | None = None
    """Folder of every machine for what is kept on disk, which takes the room at once and leaves no
    file behind; "disk" needs it."""

    def rehearsed(self, _eps: float, /) -> Self:
        """The same for a rehearsal at small size: rounding noise in a gradient that is exactly zero
        must not be enlarged into an update. Gradients of a size of ``eps`` and less count so."""
        return self

    @property
    def least_divisor(self) -> float | None:
        """Where each number's update is its gradient by its size, ``lr`` long at most: what is
        added to that size. None: updates are as large as gradients are."""
        return None

    def lacks(self, before: OptimConfig) -> tuple[str, ...]:
        """Keys by which it needs state that this other optimizer has not kept."""
        return () if self.kind == before.kind else ("kind",)


REHEARSAL_EPS = 1e-5
"""So large that rounding noise is not normalised into an update, far below real gradients."""


class AdamWConfig(OptimConfig):
    """AdamW, its learning rate over time, and gradient clipping."""

    kind: Literal["adamw"] = "adamw"
    """Which optimizer this is."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the running mean of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the mean square before dividing by it."""

    def rehearsed(self, eps: float, /) -> Self:
        return self.model_copy(update={"eps": eps})

    @property
    def least_divisor(self) -> float:
        return self.eps


class SgdConfig(OptimConfig):
    """Gradient descent with momentum, its learning rate over time, and gradient clipping."""

    kind: Literal["sgd"] = "sgd"
    """Which optimizer this is."""
    momentum: Fraction = 0.9
    """Part of the last update's direction that is kept; 0 keeps nothing."""

    def lacks(self, before: OptimConfig) -> tuple[str, ...]:
        if isinstance(before, SgdConfig) and self.momentum and not before.momentum:
            return ("momentum",)
        return super().lacks(before)
