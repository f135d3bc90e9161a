"""Rank 0 alone looks for a checkpoint and at its files; all ranks have what it found."""

from pathlib import Path
from typing import Any

import torch
from checkpoint.checkpoint_cases import save, values

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint, open_checkpoint
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.elastic.pool import WorkerPool
from weft.train.first_opens import found_by_first


def open_all(address: RankAddress, root: Path) -> dict[str, Any]:
    """What a rank has of several places, and what it looked at itself."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    looked: list[str] = []
    found: list[Any] = []

    def find(place: Place) -> Checkpoint | None:
        looked.append(place.name)
        return None if place.name == "new" else open_checkpoint(place)

    for name in ("run", "run/checkpoints", "run/checkpoints/step-00000002", "new", "damaged"):
        try:
            one = found_by_first(comm, root / name, find)
        except CheckpointError as error:
            found.append((str(error), error.problem, str(error.file)))
        else:
            tensor = one and one.read("embed.weight")
            found.append(one and (one.folder, one.notes, one.index, tensor))
    comm.close()
    return {"looked": looked, "found": found}


def test_the_first_rank_opens_for_all(pool: WorkerPool, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run/checkpoints"
    for step in (1, 2):
        save(checkpoints, step, seed=step)
    (checkpoints / "latest").unlink()
    save(tmp_path / "damaged", 3, seed=3)
    (tmp_path / "damaged/step-00000003/index.json").write_text("{")
    first, second = pool.run(open_all, tmp_path, world_size=2)
    assert first["looked"] == ["run", "checkpoints", "step-00000002", "new", "damaged"]
    assert second["looked"] == []
    for one, other in zip(first["found"], second["found"], strict=True):
        if not isinstance(one, tuple) or len(one) == 3:
            assert one == other
            continue
        assert one[:3] == other[:3]
        assert (one[0].name, one[2].step) == ("step-00000002", 2)
        assert torch.equal(one[3], values(2)["param", "embed.weight"])
        assert torch.equal(one[3], other[3])
    assert "which is complete" in second["found"][0][1][0]
    assert second["found"][3] is None
    assert "no complete checkpoint here" in second["found"][4][1]
