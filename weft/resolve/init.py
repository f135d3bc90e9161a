"""A configuration whose model is the one of a Hugging Face folder (``init``). No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from weft.config.errors import ConfigError, show
from weft.config.load import Loaded
from weft.config.tree import Entry, Origin, find, plain
from weft.models.config_folder import CONFIG_JSON, read_spec, section_of
from weft.models.registry import param_specs
from weft.plan.model import ModelSpec

TOKENIZER = "tokenizer.json"
_FREE = "dropout"
"""What the same weights may be trained with."""


def layer_of(loaded: Loaded, folder: Path) -> Entry:
    """What the folder says of a configuration, to be put on top of what recipes say.

    Raises:
        ConfigErrors: the folder is not one that Weft can read; or a person said something else of
            the model than it does, by key, with both values.
    """
    try:
        spec, _ = read_spec(folder)
        section = section_of(spec)
    except ConfigError as error:
        hint = f"{error} " if error.key != "folder" else ""
        hint += "init=null goes on without it, where a run has begun."
        expected = f"a Hugging Face folder that Weft can read: {CONFIG_JSON} and safetensors"
        raise loaded.place(ConfigError("init", str(folder), expected, hint)) from error
    values = {f"model.{name}": value for name, value in section.items() if name != _FREE}
    values |= _length(spec, loaded)
    wrong = sorted(_contradictions(loaded, values, folder), key=lambda error: error.key)
    values |= {} if _by_person(loaded, f"model.{_FREE}") else {f"model.{_FREE}": spec.dropout}
    try:
        values |= _tokenizer(loaded, folder)
    except ConfigError as error:
        wrong.append(error)
    if wrong:
        raise loaded.place(*wrong)
    origin = Origin("file", f"{folder / CONFIG_JSON}")
    tree: dict[str, dict[str, Entry]] = {}
    for key, value in values.items():
        name, _, leaf = key.partition(".")
        tree.setdefault(name, {})[leaf] = _entry(value, origin)
    return Entry({name: Entry(inner, origin) for name, inner in tree.items()}, origin)


def _entry(value: object, origin: Origin) -> Entry:
    if isinstance(value, Mapping):
        return Entry({name: _entry(inner, origin) for name, inner in value.items()}, origin)
    assert value is None or isinstance(value, str | int | float | bool), value
    return Entry(value, origin)


def _contradictions(
    loaded: Loaded, values: Mapping[str, object], folder: Path
) -> Iterator[ConfigError]:
    """What a person wrote otherwise; a recipe's own values just give way."""
    for key, value in values.items():
        said = _by_person(loaded, key)
        if said is not None and plain(said) != value:
            hint = f"Leave {key} out: it comes from there."
            expected = f"{show(value)}, as {folder / CONFIG_JSON} says"
            yield ConfigError(key, plain(said), expected, hint)


def _by_person(loaded: Loaded, key: str) -> Entry | None:
    """What was written in a file or on the command line."""
    entry = find(loaded.tree, key)
    return entry if entry is not None and entry.origin.kind in ("file", "command line") else None


def _length(spec: ModelSpec, loaded: Loaded) -> dict[str, object]:
    """The length of samples, where parameters depend on it (a table of positions)."""
    other = replace(spec, seq_len=loaded.config.data.seq_len)
    alike = [each.shape for each in param_specs(spec)] == [
        each.shape for each in param_specs(other)
    ]
    return {} if alike else {"data.seq_len": spec.seq_len}


def _tokenizer(loaded: Loaded, folder: Path) -> dict[str, object]:
    """The folder's, unless a person named one."""
    if _by_person(loaded, "data.tokenizer"):
        return {}
    if (folder / TOKENIZER).is_file():
        return {"data.tokenizer": str(folder / TOKENIZER)}
    hint = f"{folder} has no {TOKENIZER}; name the one that the model was trained with."
    expected = "the tokenizer of the model"
    raise ConfigError("data.tokenizer", loaded.config.data.tokenizer, expected, hint)
