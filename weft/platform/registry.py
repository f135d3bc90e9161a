"""Device families by name: ours, and those that other packages bring."""

from __future__ import annotations

from importlib.metadata import entry_points

from weft.config.errors import ConfigError
from weft.platform.base import Platform
from weft.platform.cpu import CpuPlatform
from weft.platform.cuda import CudaPlatform

PLATFORMS: dict[str, Platform] = {p.name: p for p in (CudaPlatform(), CpuPlatform())}

ENTRY_POINTS = "weft.platforms"
"""An installed package names its families here: ``chipx = "weft_chipx:ChipxPlatform"``."""


def register(platform: Platform) -> None:
    """Add a family from outside to this process."""
    assert platform.name not in PLATFORMS, f"{platform.name} is there already"
    PLATFORMS[platform.name] = platform


def platform_named(name: str) -> Platform:
    """The family of this name. A package that brings it is imported now, and no other.

    Raises:
        ConfigError: unknown, or no such device here.
    """
    if name not in PLATFORMS:
        outside = entry_points(group=ENTRY_POINTS)
        if name not in outside.names:
            known = " or ".join([*PLATFORMS, *sorted(outside.names - PLATFORMS.keys())])
            raise ConfigError("compute.device", name, known)
        platform = outside[name].load()()
        assert platform.name == name, f"{outside[name]} brings {platform.name}"
        register(platform)
    if not PLATFORMS[name].available():
        here = ", ".join(p.name for p in PLATFORMS.values() if p.available())
        raise ConfigError("compute.device", name, f"a device of this machine ({here})")
    return PLATFORMS[name]
