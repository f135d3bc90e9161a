"""The arguments that commands share: ``RECIPE|FILE [section.key=value ...]``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import Loaded, load_config, recipe_names
from weft.cost.profile_file import FOLDER_KEY

DEFAULT_RECIPE = "demo"

Target = Annotated[
    str,
    typer.Argument(
        metavar="[RECIPE|FILE]",
        help=f"A recipe's name ({', '.join(recipe_names())}) or a YAML file.",
        show_default=True,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="What differs from the recipe, such as optim.lr=3e-4; --optim.lr 3e-4 works too.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that takes ``--section.key value``."""


def load(target: str, overrides: Sequence[str] | None) -> Loaded:
    """Load what the user named."""
    recipe, pairs = named(target, overrides)
    try:
        loaded = load_config(recipe, pairs)
    except ConfigErrors as errors:
        from weft.models.registry import FAMILIES

        is_size = any(recipe in family.sizes for family in FAMILIES.values())
        if is_size and any(error.value == recipe for error in errors.errors):
            hint = f"'{recipe}' is the size of a model. Write: {DEFAULT_RECIPE} model.size={recipe}"
            raise ConfigError("RECIPE", recipe, "", hint) from errors
        raise
    if loaded.config.init is None:
        return loaded
    from weft.resolve.init import layer_of

    return load_config(recipe, pairs, over=layer_of(loaded, Path(loaded.config.init)))


def named(target: str, overrides: Sequence[str] | None) -> tuple[str, list[str]]:
    """Recipe or file, and ``key=value`` each. Values without a recipe's name are of the demo."""
    words = list(overrides or [])
    if "=" in target or target.startswith("--"):
        words, target = [target, *words], DEFAULT_RECIPE
    return target, _pairs(words)


def _pairs(words: Sequence[str]) -> list[str]:
    """``--key value`` and ``--key=value`` as ``key=value``; the rest unchanged."""
    result: list[str] = []
    waiting = ""
    for word in words:
        if waiting:
            result.append(f"{waiting}={word}")
            waiting = ""
        elif word.startswith("--"):
            name = word.removeprefix("--")
            if "=" in name:
                result.append(name)
            elif "." in name or name in ("seed", "name", "init"):
                waiting = name
            else:
                hint = "See `--help`; values of the configuration are written section.key=value."
                raise ConfigError(word, "", "", f"unknown option {word}. {hint}")
        else:
            result.append(word)
    if waiting:
        raise ConfigError(waiting, None, "a value after it", f"Write {waiting}=VALUE.")
    return result


def file_to_write(option: str, path: Path) -> Path:
    """The file, if it can be one: asked before time is spent on what goes into it.

    Raises:
        ConfigError: it is a folder or a device, its folder is none, or nobody may write there.
    """
    if path.is_dir():
        raise ConfigError(option, str(path), "a file to write", "This is a folder.")
    folder = path.resolve().parent  # of what a link names
    if not folder.is_dir():
        raise ConfigError(option, str(path), "a file in a folder that exists")
    if path.exists() and not path.is_file():
        raise ConfigError(option, str(path), "a file to write", "What is there is none.")
    folder_to_write(option, folder, path, "a file in a folder that can be written")
    return path


def profiles_to_write(folder: Path) -> None:
    """Likewise of where profiles are.

    Raises:
        ConfigError: nobody may write there.
    """
    if os.environ.get(FOLDER_KEY):
        folder_to_write(FOLDER_KEY, folder)
        return
    key = "XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "HOME"
    folder_to_write(key, folder, None, f"a folder to write to ({FOLDER_KEY} names another)")


def folder_to_write(
    option: str, folder: Path, value: Path | None = None, expected: str = "a folder to write to"
) -> None:
    """Likewise of a folder, which is made where there is none; ``value``: what was asked for.

    Raises:
        ConfigError: nobody may write there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # others may look there at once
            pass
    except OSError as error:
        raise ConfigError(option, str(value or folder), expected, f"{error.strerror}.") from None
