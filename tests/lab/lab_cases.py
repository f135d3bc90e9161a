"""Small clusters for the tests of the lab, and the programs that run on them."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.cluster.cluster_file import ClusterFile
from weft.lab.faults import parse_fault
from weft.lab.leftovers import Leftovers, find_labs
from weft.lab.rehearsal import Outcome, Rehearsal, rehearse
from weft.lab.tools import why_not_here

PROGRAMS = Path(__file__).with_name("rank_programs.py")
needs_root = pytest.mark.skipif(bool(why_not_here()), reason=f"no lab here: {why_not_here()}")


def hosts(*chips: dict[str, Any], node: str | None = None) -> list[dict[str, Any]]:
    """One host a chip: h1, h2 and so on."""
    return [
        {"name": f"h{number}", "node": node, "chips": [{"kind": "any", **chip}]}
        for number, chip in enumerate(chips, start=1)
    ]


TWO = ClusterFile.model_validate({"hosts": hosts({"speed": 0.5}, {"speed": 0.4})})


def program(name: str, folder: Path) -> tuple[str, ...]:
    return (sys.executable, "-S", str(PROGRAMS), name, str(folder))


def play(
    name: str,
    folder: Path,
    cluster: ClusterFile = TWO,
    *,
    faults: Sequence[str] = (),
    grace_s: float = 0.1,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run a program on a cluster in this process; nothing of the lab is left."""
    asked = Rehearsal(
        cluster=cluster,
        command=program(name, folder),
        out=folder,
        faults=tuple(parse_fault(text, cluster) for text in faults),
        grace_s=grace_s,
    )
    outcome = rehearse(asked, say)
    assert own_labs() == []
    assert not any(alive(rank.process.pid) for rank in outcome.ranks)
    return outcome


def own_labs(pid: int | None = None) -> list[Leftovers]:
    """What there is of the labs of one process: other tests may have theirs."""
    return [lab for lab in find_labs() if lab.identity.pid == (pid or os.getpid())]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def written(folder: Path, rank: int) -> Any:
    """What a rank's program wrote."""
    return json.loads((folder / f"rank{rank}.json").read_text())
