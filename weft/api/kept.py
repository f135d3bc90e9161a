"""Buffers that a forward writes, such as the vectors of a spectral norm or averages of samples.

What they hold then may depend on how often a step calls forward, and with which samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from torch import nn

from weft.api.refusals import digest_of
from weft.comm.comm import Comm
from weft.config.errors import ConfigError


class Kept:
    """The buffers of some modules, by name, as they are when it is made."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._versions = {
            f"layers.{number}.{name}": (buffer, buffer._version)
            for number, module in layers.items()
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() or buffer.is_complex()
        }

    def refuse_odd(self, comm: Comm, microbatches: int) -> None:
        """Of a step since then, whose part here were so many microbatches. Collective.

        Raises:
            ConfigError: forward wrote to a buffer, in one of several microbatches or not the same
                on all processes that have it.
        """
        held = {
            name: digest_of([buffer]) if buffer._version != version else ""
            for name, (buffer, version) in self._versions.items()
        }
        every = comm.gather_json([held, microbatches], name="compare buffers")
        most = max(many for _, many in every)
        for name in dict.fromkeys(chain(*(other for other, _ in every))):
            found = {other[name] for other, _ in every if name in other}
            if found == {""} or (len(found) == most == 1):
                continue
            hint = "What it holds would depend on the split. Keep it outside of the model, or let "
            hint += "no step change it (module.eval())."
            expected = "one that it does not write, or writes alike: once a step on all processes"
            whole = name.removeprefix("layers.0.")  # as a model that is not divided has it
            raise ConfigError("model", f"forward writes its buffer {whole}", expected, hint)
