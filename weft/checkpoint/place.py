"""Where checkpoints lie: a folder of this machine's file systems, or an address far away."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import yaml

from weft.checkpoint.entry import CheckpointError, told
from weft.checkpoint.remote.files import is_address
from weft.checkpoint.remote.path import RemotePath, remote_path
from weft.config.errors import ConfigError

Place: TypeAlias = "Path | RemotePath"

FOLDER = "checkpoints"
"""In a run's folder: where checkpoints lie unless it says otherwise."""
CONFIG_FILE = "config.yaml"
KEY = "checkpoint.to"
LOAD = "checkpoint.load"
RUN = "{run}"
"""In that: the name of the run's folder."""
_READ = 8 << 20


def place_of(text: str | Path, key: str = "FOLDER") -> Place:
    """What a person named, or a place as text.

    Raises ConfigError, which names ``key``, for an address that cannot be opened.
    """
    if isinstance(text, str) and is_address(text):
        return remote_path(text, key)
    return Path(text)


def refuse_missing(place: Place, key: str) -> None:
    """Raises ConfigError, which names ``key``, where there is no such folder on this machine."""
    if isinstance(place, Path) and not place.exists():
        expected = "a checkpoint, or a run's folder with one"
        raise ConfigError(key, str(place), expected, "There is no such folder.")


def checkpoints_of(run: Path) -> Place:
    """Where the checkpoints of a run lie: in its folder, or where its configuration says."""
    return checkpoints_at(_to(run), run)


def are_far(run: Path) -> bool:
    """The checkpoints of a run lie far away. Asks nobody there."""
    return is_address(_to(run) or "")


def _to(run: Path) -> str | None:
    """What the configuration of a run says of where its checkpoints lie."""
    try:
        config = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
        to = config["checkpoint"]["to"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None
    return to if isinstance(to, str) else None


def checkpoints_at(to: str | None, run: Path) -> Place:
    """Where those of a run in a folder lie. ``to``: what its configuration says of that."""
    if to is None:
        return run / FOLDER
    place = place_of(to.replace(RUN, run.name), KEY)
    if isinstance(place, Path) and not place.is_absolute():
        expected = "an absolute path, s3://BUCKET/PREFIX or sftp://[USER@]HOST[:PORT]/PATH"
        raise ConfigError(KEY, to, expected)
    return place


GONE = ", with its folder. A run under way removes older checkpoints: give the command again"


def size_of(place: Place) -> int:
    """Of a file. Raises CheckpointError where there is none."""
    with told("read", place):
        try:
            if isinstance(place, RemotePath):
                return place.size()
            info = place.stat()
        except FileNotFoundError as error:
            gone = isinstance(place, Path) and not place.parent.is_dir()
            problem = f"is missing{GONE if gone else ''}"
            raise CheckpointError(problem, file=place) from error
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError("is not a file", file=place)
    return info.st_size


def chunks_of(place: Place) -> Iterator[bytes]:
    """All that is in a file. Raises OSError where it cannot be read."""
    if isinstance(place, RemotePath):
        yield from place.chunks()
        return
    with place.open("rb") as file:
        while data := file.read(_READ):
            yield data
