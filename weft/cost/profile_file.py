"""Profiles on disk: one JSON file for each chip of each machine, checked when it is read."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from weft.config.errors import ConfigError, PassedOver
from weft.cost.profile import Profile

VERSION = 1
"""Of the schema. Files of another version are refused, for their numbers mean something else."""
MAY_BE_ZERO = (
    "other_cores",
    "step_s",
    "layer_s",
    "host_layer_s",
    "host_fp8_layer_s",
    "cast_layer_s",
    "sending_bytes_s",
    "runtime_bytes",
    "fragments",
)
FOLDER_KEY = "WEFT_PROFILES"
"""Environment variable that names another folder for profiles."""


def profiles_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$WEFT_PROFILES``, else ``weft/profiles`` among the user's cached files."""
    if environment.get(FOLDER_KEY):
        return Path(environment[FOLDER_KEY])
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "weft" / "profiles"


def file_name(profile: Profile) -> str:
    """``HOST-CHIP.json``."""
    return f"{_plain(profile.machine.host)}-{_plain(profile.name)}.json"


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile at once: whoever reads the file sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(to_json(profile), "utf-8")
    draft.replace(path)


def load_profile(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        ConfigError: it cannot be read, or is not a profile; with the first wrong value.
    """
    hint = "Measure again with `weft chips profile`."
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError("profile", str(path), "a readable file", f"{error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError("profile", str(path), "JSON", hint) from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError("profile", str(path), "JSON", f"{error}. {hint}") from error
    try:
        return from_data(data)
    except ConfigError as error:
        raise ConfigError(
            f"profile {path}: {error.key}", error.value, error.expected, hint
        ) from error


def saved_profiles(folder: Path | None = None) -> list[tuple[Path, Profile]]:
    """Every profile of a folder, newest measurement first; warns of other files (``PassedOver``),
    which may be of another version or of somebody else."""
    found = []
    for path in sorted((folder or profiles_folder()).glob("*.json")):
        try:
            found.append((path, load_profile(path)))
        except ConfigError as error:
            warnings.warn(f"passed over: {error}", PassedOver, stacklevel=1)
    return sorted(found, key=lambda each: each[1].machine.date, reverse=True)


def to_json(profile: Profile) -> str:
    """Text that ``from_data`` reads back equal: lists of measurements, a line for each."""
    data = {"version": VERSION, **asdict(profile)}
    lines = []
    for name, value in data.items():
        if isinstance(value, tuple) and value:
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            lines.append(f'  "{name}": [\n{rows}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_data(data: object) -> Profile:
    """A profile from parsed JSON.

    Raises:
        ConfigError: a value is missing, unknown or of the wrong kind; ``key`` says where.
    """
    if not isinstance(data, dict) or "products" not in data:
        raise ConfigError("(file)", type(data).__name__, "a profile of a chip")
    if data.get("version") != VERSION:
        raise ConfigError("version", data.get("version"), str(VERSION))
    body = {key: value for key, value in data.items() if key != "version"}
    unknown = sorted(set(body) - {field.name for field in fields(Profile)})
    if unknown:
        raise ConfigError(unknown[0], body[unknown[0]], "no such key")
    try:
        profile = TypeAdapter(Profile).validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        expected = first["msg"].removeprefix("Input should be ")
        raise ConfigError(key, first["input"], expected[:1].lower() + expected[1:]) from error
    _check_numbers(profile)
    return profile


def _check_numbers(profile: Profile) -> None:
    """Seconds, rates and sizes are positive and finite, and there are some."""
    for name in ("products", "attention"):
        if not asdict(profile)[name]:
            raise ConfigError(name, [], "at least one measurement")
    for name, value in asdict(profile).items():
        if isinstance(value, tuple):
            for number, row in enumerate(value):
                _check_positive(f"{name}.{number}", [x for x in row if not isinstance(x, str)])
        elif isinstance(value, float):
            _check_positive(name, [value], or_zero=name in MAY_BE_ZERO)
    machine, made = profile.machine, profile.corrections
    for name in ("cores", "memory_gib", "threads"):
        _check_positive(f"machine.{name}", [getattr(machine, name)])
    _check_positive("corrections.compute", [made.compute])
    for name in ("step_s", "runtime_bytes"):  # either way
        value = getattr(made, name)
        if not (isfinite(value) and value + getattr(profile, name) >= 0):
            expected = f"a finite number that takes away no more than all of {name}"
            raise ConfigError(f"corrections.{name}", value, expected)


def _check_positive(key: str, values: list[float], *, or_zero: bool = False) -> None:
    for value in values:
        if not (isfinite(value) and (value > 0 or (or_zero and value == 0))):
            raise ConfigError(key, value, f"a positive number{' or 0' if or_zero else ''}")


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
