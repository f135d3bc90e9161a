"""``weft plan --why``: a plan of the user's beside the one that was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.cli.target import load
from weft.config.axes import NAMES, SAMPLE_AXES
from weft.config.errors import ConfigError
from weft.config.load import Loaded

SHORT = ("pp", *NAMES, "zero", "recompute", "schedule", "micro")
"""What may be given without the name of a section: equal meshes in one pipeline."""
_REPLACED = ("plan.", "plan=", "batch.micro=")


def load_compared(target: str, overrides: Sequence[str], why: str) -> Loaded:
    """The configuration with the user's plan instead of its own.

    Raises:
        ConfigError: ``why`` is neither a file nor values of a plan.
    """
    kept = [word for word in overrides if not word.removeprefix("--").startswith(_REPLACED)]
    return load(target, [*kept, *_values(why)])


def _values(why: str) -> list[str]:
    if Path(why).suffix == ".json":
        return [f"plan.file={why}", "plan.schedule=null"]
    words = why.split() if "." not in why else _at_keys(why)
    pairs = dict(word.partition("=")[::2] for word in words)
    if all("." in key for key in pairs) and pairs:
        return list(words)
    unknown = [key for key in pairs if key not in SHORT]
    if unknown or not pairs or not all(pairs.values()):
        expected = f"a plan.json, values of plan and batch, or some of {', '.join(SHORT)}"
        raise ConfigError("--why", why, expected, 'Such as --why "pp=2 dp=4 tp=2 micro=8".')
    return list(_equal_stages(pairs))


def _at_keys(why: str) -> list[str]:
    """``plan.stages=[{dp: 2}, {dp: 2}] batch.micro=4``: cut before each ``section.key=``."""
    words: list[str] = []
    for word in why.split():
        key = word.partition("=")[0]
        if "=" in word and ("." in key or key in SHORT) and key.replace(".", "").isidentifier():
            words.append(word)
        elif words:
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def _equal_stages(pairs: dict[str, str]) -> Iterator[str]:
    """One pipeline of equal meshes; one sample a rank where nothing is given."""
    stage = {key: pairs[key] for key in (*NAMES, "zero", "recompute") if key in pairs}
    inside = ", ".join(f"{key}: {value}" for key, value in stage.items())
    try:
        num_stages = int(pairs.get("pp", "1"))
    except ValueError:
        raise ConfigError("--why", pairs["pp"], "a number of meshes for pp") from None
    schedule = pairs.get("schedule", "1f1b") if num_stages > 1 else "null"
    yield f"plan.stages=[{', '.join([f'{{{inside}}}'] * num_stages)}]"
    yield f"plan.schedule={schedule}"
    each = [pairs[axis] for axis in SAMPLE_AXES if axis in pairs]
    yield f"batch.micro={pairs.get('micro', each[0] if each else '1')}"
