"""Device families by name: ours, and those that other packages bring."""

from __future__ import annotations

from weft.cluster.cluster import HOST
from weft.config.errors import ConfigError
from weft.config.names import Registry
from weft.platform.base import Platform

PLATFORMS: Registry[Platform] = Registry(
    Platform, "weft.platform", entry="PLATFORM", group="weft.platforms"
)
"""Every file beside this one that has a ``PLATFORM``, and those of installed packages, which name
theirs so: ``chipx = "weft_chipx:ChipxPlatform"``."""


def platform_named(name: str) -> Platform:
    """The family of this name. A package that brings it is imported now, and no other.

    Raises:
        ConfigError: unknown, or no such device here.
    """
    if name not in PLATFORMS:
        ours = sorted((p.name for p in PLATFORMS.imported()), key=lambda each: each == HOST)
        raise ConfigError("compute.device", name, " or ".join(dict.fromkeys([*ours, *PLATFORMS])))
    if not PLATFORMS[name].available():
        here = ", ".join(p.name for p in PLATFORMS.imported() if p.available())
        why = PLATFORMS[name].why_not_available()
        raise ConfigError("compute.device", name, f"a device of this machine ({here})", why)
    return PLATFORMS[name]
