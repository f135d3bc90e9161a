"""Objects of an S3 bucket, by obstore.

Large ones are sent in parts, several at a time; an upload that fails is aborted, so that no parts
of it stay. Requests that fail are made again, with pauses that grow.
"""

from __future__ import annotations

import configparser
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from weft.checkpoint.remote.files import Parts
from weft.config.errors import ConfigError

PART_BYTES = 8 << 20
PARTS_AT_ONCE = 4
"""Of one object; so much of it is in memory at a time."""
RETRIES = 5
RETRY_S = 60.0
REQUEST_S = 30.0
"""A request that takes longer is made again."""

_PROFILE_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
"""Of the files that the AWS tools share: our store's names."""


class ObjectFiles:
    """One bucket."""

    def __init__(self, bucket: str) -> None:
        given: dict[str, Any] = _from_profile()
        endpoint = _endpoint() or given.get("endpoint", "")
        if endpoint:
            given["endpoint"] = _checked(endpoint)
        self._store = S3Store(
            bucket,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_S),
            },
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
            **given,
        )

    def entries(self, folder: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        with _told():
            listed = obstore.list_with_delimiter(self._store, folder)
        for prefix in listed["common_prefixes"]:
            found[prefix.rstrip("/").rpartition("/")[2]] = None
        for each in listed["objects"]:
            found[each["path"].rpartition("/")[2]] = each["size"]
        return found

    def size(self, name: str) -> int:
        with _told():
            return obstore.head(self._store, name)["size"]

    def read(self, name: str, start: int, end: int) -> bytes:
        if start == end:
            return b""
        with _told():
            return bytes(obstore.get_range(self._store, name, start=start, end=end))

    def write(self, name: str, parts: Parts) -> None:
        with _told():
            obstore.put(
                self._store,
                name,
                iter(parts()),
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

    def remove(self, name: str) -> None:
        with _told():
            obstore.delete(self._store, name)

    def remove_folder(self, name: str) -> None:
        """There are none."""


@contextmanager
def _told() -> Iterator[None]:
    """What the library says at length, in a line."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _line(error)) from error
    except (obstore.exceptions.BaseError, OSError) as error:
        raise OSError(errno.EIO, _line(error)) from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text)
    if answer:
        return f"{answer[1]}: {answer[2]}"
    return re.sub(r" https?://\S+", "", text)[:400]


def _endpoint() -> str:
    """Of storage that is not Amazon's own; variables of the AWS tools."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def _checked(endpoint: str) -> str:
    """Raises ConfigError for what is no address: the library ends there."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        expected = "https://HOST or http://HOST, with a port or without"
        hint = "AWS_ENDPOINT_URL_S3 and the profile's endpoint_url say it too."
        raise ConfigError("AWS_ENDPOINT_URL", endpoint, expected, hint)
    return endpoint


def _from_profile() -> dict[str, str]:
    """What the shared files say of the chosen profile; nothing where the environment has a key.

    Anything beyond keys (roles, single sign-on) is for the environment to bring: ``aws configure
    export-credentials --format env`` prints it.
    """
    name = os.environ.get("AWS_PROFILE", "default")
    config = _section("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}")
    keys = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", name)
    found = {ours: (config | keys)[theirs] for theirs, ours in _PROFILE_KEYS.items()
             if theirs in config | keys}  # fmt: skip
    if "AWS_ACCESS_KEY_ID" in os.environ:
        found = {key: value for key, value in found.items() if key in ("region", "endpoint")}
    if any(name in os.environ for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
        found.pop("region", None)
    return found


def _section(variable: str, file: str, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    parser.read(os.environ.get(variable) or Path.home() / ".aws" / file)
    return dict(parser[name]) if parser.has_section(name) else {}
