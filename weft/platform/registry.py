"""Device families by name."""

from __future__ import annotations

from weft.config.errors import ConfigError
from weft.platform.base import Platform
from weft.platform.cpu import CpuPlatform
from weft.platform.cuda import CudaPlatform

PLATFORMS: dict[str, Platform] = {p.name: p for p in (CudaPlatform(), CpuPlatform())}


def platform_named(name: str) -> Platform:
    """The family of this name.

    Raises:
        ConfigError: unknown, or no such device here.
    """
    known = " or ".join(PLATFORMS)
    if name not in PLATFORMS:
        raise ConfigError("compute.device", name, known)
    if not PLATFORMS[name].available():
        here = ", ".join(p.name for p in PLATFORMS.values() if p.available())
        raise ConfigError("compute.device", name, f"a device of this machine ({here})")
    return PLATFORMS[name]
