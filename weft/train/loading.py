"""Begin a run with parameters of another one: those that fit, and of the rest what is named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.place import LOAD, Place, place_of, refuse_missing
from weft.checkpoint.reader import Checkpoint, open_checkpoint
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.sections import CheckpointConfig
from weft.plan.box import Box
from weft.plan.model import ParamSpec
from weft.train.assemble import Values


@dataclass(frozen=True)
class Loading:
    """Which parameters of a new run come from a checkpoint. The optimizer begins anew."""

    checkpoint: Checkpoint
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Not stored: they get their initial values."""
    resized: tuple[str, ...]
    """Stored smaller or larger: what both have is loaded, the rest gets its initial values."""
    unused: tuple[str, ...]
    """Stored, and the model has no such parameter."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model."""

    def values(self, start: Values) -> Values:
        """``start``: initial values."""

        def values(out: Tensor, spec: ParamSpec, box: Box) -> None:
            if spec.name in self.loaded:
                self.checkpoint.read_into(out, spec.name, "param", box)
                return
            start(out, spec, box)
            if spec.name in self.resized:
                common = Box.whole(self.checkpoint.shape(spec.name)).intersect(box)
                if common is not None:
                    part = out[common.within(box).slices()]
                    self.checkpoint.read_into(part, spec.name, "param", common)

        return values

    def report(self) -> list[str]:
        """What a person should know before the first step."""
        of = f"{self.checkpoint.folder}, step {self.checkpoint.step}"
        lines = [*self.checkpoint.notes, f"loaded {len(self.loaded)} parameters of {of}"]
        for name in self.resized:
            stored = self.checkpoint.shape(name)
            lines.append(f"resized {name}: stored {stored}, the model has {self.shapes[name]}")
        if self.missing:
            lines.append(f"not stored, with initial values: {', '.join(self.missing)}")
        if self.unused:
            lines.append(f"stored and not used: {', '.join(self.unused)}")
        return lines


def loading(
    config: CheckpointConfig,
    params: Iterable[ParamSpec],
    opened: Callable[[Place], Checkpoint] = open_checkpoint,
) -> Loading | None:
    """What ``checkpoint.load`` asks for; None where it asks for nothing.

    Args:
        opened: As ``open_checkpoint``.

    Raises:
        ConfigErrors: every parameter that is missing, left over or of another shape without leave,
            and every leave that nothing needs.
        ConfigError: there is no such folder.
        CheckpointError: there is no checkpoint in it, or it is damaged.
    """
    if config.load is None:
        return None
    checkpoint = _opened(place_of(config.load, LOAD), opened)
    params = list(params)
    shapes = {param.name: tuple(param.shape) for param in params}
    stored = {name: checkpoint.shape(name) for name in checkpoint.names()}
    both = [name for name in shapes if name in stored]
    unlike = [name for name in both if stored[name] != shapes[name]]
    missing, unused = _only(shapes, stored), _only(stored, shapes)
    folder = checkpoint.folder
    of_experts = {param.name for param in params if param.of_experts}
    if others := list(_other_experts(config, unlike, stored, shapes, of_experts)):
        raise ConfigErrors(others)
    errors = [
        *_unlike_dimensions(config.load, unlike, stored, shapes),
        *_refusals(
            "allow_missing",
            config.allow_missing,
            {name: f"{name} {shapes[name]} is not stored in {folder}." for name in missing},
        ),
        *_refusals(
            "allow_resized",
            config.allow_resized,
            {n: f"{n} {shapes[n]} is stored as {stored[n]} in {folder}." for n in unlike},
        ),
        *_refusals(
            "allow_unused",
            config.allow_unused,
            {name: f"The model has no {name} {stored[name]} of {folder}." for name in unused},
        ),
    ]
    if errors:
        raise ConfigErrors(errors)
    return Loading(
        checkpoint=checkpoint,
        loaded=tuple(sorted(set(both) - set(unlike), key=both.index)),
        missing=tuple(missing),
        resized=tuple(unlike),
        unused=tuple(unused),
        shapes=shapes,
    )


def _opened(place: Place, opened: Callable[[Place], Checkpoint]) -> Checkpoint:
    try:
        return opened(place)
    except CheckpointError:
        refuse_missing(place, LOAD)
        raise


def _only(these: Iterable[str], those: Collection[str]) -> list[str]:
    """Names of these alone."""
    return [name for name in these if name not in those]


def _other_experts(
    config: CheckpointConfig,
    names: Sequence[str],
    stored: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    of_experts: Collection[str],
) -> Iterator[ConfigError]:
    """Once, and not for each parameter: there are more or fewer, none, or some where none should
    be. Those that both have are loaded where that has leave."""
    load, found = str(config.load), dict[str, ConfigError]()
    for name in names:
        was, now = stored[name], shapes[name]
        if len(was) == 3 == len(now) + 1 and name not in of_experts:
            expected = "a model without experts"
            hint = f"model.experts={{count: {was[0]}, ..}}, as that run has it, makes such a model."
            found["fewer"] = ConfigError(LOAD, load, expected, hint)
        if len(now) == len(was) + 1 and name in of_experts:
            hint = f"`weft grow experts {load} OUT --count {now[0]} --top-k ..` makes it of this."
            found["more"] = ConfigError(LOAD, load, f"a model of {now[0]} experts", hint)
        allowed = any(fnmatchcase(name, pattern) for pattern in config.allow_resized)
        if len(was) == len(now) and was[0] != now[0] and name in of_experts and not allowed:
            hint = "`weft grow experts` makes them of a model without; "
            hint += "checkpoint.allow_resized=['layers.*.ff.*'] loads those that both have."
            expected = f"{was[0]}, as many as {load} has"
            found["others"] = ConfigError("model.experts.count", now[0], expected, hint)
    yield from found.values()


def _unlike_dimensions(
    load: str,
    names: Sequence[str],
    stored: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[ConfigError]:
    """Rows may be more or fewer; a vector is no matrix."""
    for name in names:
        if len(stored[name]) != len(shapes[name]):
            expected = f"{name} with {len(shapes[name])} dimensions (it has {stored[name]})"
            yield ConfigError(LOAD, load, expected)


def _refusals(key: str, patterns: Sequence[str], why: Mapping[str, str]) -> Iterator[ConfigError]:
    """What needs leave and has none, and leave that nothing needs. ``why``: by name."""
    for name, reason in why.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            yield ConfigError(f"checkpoint.{key}", patterns, f"a pattern for {name}", reason)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in why):
            expected = f"patterns that something needs ({pattern!r} would have no effect)"
            yield ConfigError(f"checkpoint.{key}", patterns, expected)
