"""What labs that were killed have left on this machine, and how it goes away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from weft.config.errors import RunError
from weft.lab.cgroups import groups_of_labs, remove_groups
from weft.lab.disk import mounted, put_back
from weft.lab.identity import Identity
from weft.lab.network import namespaces, remove_namespaces


@dataclass
class Leftovers:
    """Of one lab."""

    identity: Identity
    groups: list[Path] = field(default_factory=list)
    disks: list[Path] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)

    def in_words(self) -> str:
        """What there is, counted."""
        parts = [f"{n} {what}{'s' * (n > 1)}" for what, n in self._counts().items() if n]
        return f"of process {self.identity.pid}: {', '.join(parts)}"

    def to_json(self) -> dict[str, int]:
        """Likewise."""
        counts = {f"{what.replace(' ', '_')}s": n for what, n in self._counts().items()}
        return {"pid": self.identity.pid, **counts}

    def _counts(self) -> dict[str, int]:
        return {
            "control group": len(self.groups),
            "disk": len(self.disks),
            "network namespace": len(self.namespaces),
        }


def find_labs() -> list[Leftovers]:
    """Everything that carries a lab's name, lab by lab."""
    found: dict[Identity, Leftovers] = {}

    def lab(name: str) -> Leftovers:
        identity = Identity.of_name(name)
        assert identity is not None, f"{name} is no lab's"
        return found.setdefault(identity, Leftovers(identity))

    for group in groups_of_labs():
        lab(group.name).groups.append(group)
    for name, folder in mounted(Path("/proc/self/mounts").read_text("latin-1")):
        lab(name).disks.append(folder)
    for name in filter(Identity.of_name, namespaces()):
        lab(name).namespaces.append(name)
    return [found[identity] for identity in sorted(found)]


def dead(labs: Sequence[Leftovers]) -> list[Leftovers]:
    """Those that run no more."""
    return [lab for lab in labs if not lab.identity.is_alive()]


def remarks(labs: Sequence[Leftovers]) -> list[str]:
    """What to say of other labs before one begins."""
    gone = dead(labs)
    said = [
        f"an earlier lab was killed and left things {lab.in_words()}; run `weft lab clean`"
        for lab in gone
    ]
    if len(gone) < len(labs):
        said.append("another lab runs: its chips share the cores, so that speeds may not hold")
    return said


def clean(lab: Leftovers) -> None:
    """End the lab's processes and remove what it made. What its disk holds stays in the folder.

    Raises:
        RunError: something does not go away; the rest has been removed.
    """
    assert not lab.identity.is_alive(), f"{lab.identity.name} still runs"
    problems = []
    removals: list[tuple[str, Callable[[], None]]] = [
        ("", partial(remove_groups, lab.groups)),
        *((f"{disk}: ", partial(put_back, disk, lab.identity.name)) for disk in lab.disks),
        ("", partial(remove_namespaces, lab.namespaces)),
    ]
    for what, remove in removals:
        try:
            remove()
        except (OSError, RunError) as error:
            problems.append(f"{what}{error}")
    if problems:
        raise RunError("; ".join(problems))
