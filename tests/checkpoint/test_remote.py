"""Checkpoints far away are those of a folder, and what fails there costs no other checkpoint."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoint.servers import BUCKET, S3, s3_server, sftp_server
from checkpoint.test_agent import until
from checkpoint_cases import STATE, cut, rank_shards, save, values

from weft.checkpoint.diff import differences
from weft.checkpoint.draft import draft
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.listing import list_checkpoints
from weft.checkpoint.place import Place, place_of
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.remote import objects
from weft.checkpoint.remote import owner as owner_of
from weft.checkpoint.remote.files import Parts, open_files, split_address
from weft.checkpoint.remote.owner import OWNER, Owner, looked, take_turn
from weft.checkpoint.remote.path import RemotePath
from weft.checkpoint.shard import elements_of
from weft.checkpoint.store import candidates, prune
from weft.checkpoint.verify import verify
from weft.config.errors import ConfigError
from weft.plan.box import Box


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(monkeypatch) as server:
        yield server


def save_far(
    root: Place,
    step: int,
    seed: int,
    name: str = "",
    keep: int | None = None,
    owner: Owner | None = None,
) -> None:
    """As ``checkpoint_cases.save``, wherever ``root`` is."""
    one = draft(root, step, name or f"save{seed}", owner)
    one.begin()
    assert one.is_open()
    files = [one.write(rank, *elements_of(shards)) for rank, shards in enumerate(rank_shards(seed))]
    one.commit(files, {**STATE, "seed": seed})
    if keep is not None:
        prune(root, keep)


def check_root(root: RemotePath, tmp_path: Path) -> None:
    """A life of a folder of checkpoints."""
    for step in (1, 2, 3):
        save_far(root, step, seed=step, keep=2)
    assert [each.step for each in list_checkpoints(root) if each.complete] == [2, 3]
    save_far(root, 3, seed=33)  # the same step again
    assert open_checkpoint(root).state["seed"] == 33
    here = open_checkpoint(save(tmp_path / "here", 3, seed=33))
    assert list(differences(open_checkpoint(root), here)) == []
    found = verify(root)
    assert (found.ok, found.files, found.problems) == (True, 4, [])
    names = sorted(place.name for place in (root / "step-00000003").iterdir())
    assert names == ["index.json", *(f"rank-0000{r}-save33.safetensors" for r in (0, 1))]
    assert open_checkpoint(root / "step-00000002").state["seed"] == 2
    part = open_checkpoint(root).read("embed.weight", "param", Box((1, 2), (3, 5)))
    assert torch.equal(part, values(33)["param", "embed.weight"][1:4, 2:7])


def test_a_bucket(s3: S3, tmp_path: Path) -> None:
    check_root(s3.place(), tmp_path)
    assert s3.unfinished() == []
    assert not any("secret-of-tests" in path for _, path in s3.requests)


def test_an_sftp_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host key has to be known; a connection that is lost is made anew."""
    with sftp_server(tmp_path / "server", monkeypatch) as server:
        root = server.place()
        check_root(root, tmp_path)
        server.stop()
        server.start()
        assert open_checkpoint(root).state["seed"] == 33
        assert not list(server.folder.rglob("*.part"))
        (tmp_path / "server/home/.ssh/known_hosts").write_text("")
        stranger = place_of(f"sftp://other@127.0.0.1:{server.port}/runs/one")
        with pytest.raises(CheckpointError, match=r"/runs/one.*cannot be read: Host key is not tr"):
            open_checkpoint(stranger)


def test_a_large_file_goes_in_parts(s3: S3, tmp_path: Path) -> None:
    """And comes in ranges: those that a box needs."""
    tensor = torch.randn(1200, 4096)  # 18.75 MiB: three parts, five chunks
    shards = [[cut("param", "wide", tensor, Box.whole((1200, 4096)))]]
    one = draft(s3.place(), 1, "large")
    one.begin()
    one.commit([one.write(0, *elements_of(shards[0]))], STATE)
    uploads = [path for method, path in s3.requests if method == "PUT" and "partNumber" in path]
    assert len({path.split("partNumber=")[1].split("&")[0] for path in uploads}) == 3
    checkpoint = open_checkpoint(s3.place())
    s3.requests.clear()
    rows = checkpoint.read("wide", "param", Box((300, 0), (2, 4096)))
    columns = checkpoint.read("wide", "param", Box((0, 7), (300, 3)))
    assert torch.equal(rows, tensor[300:302])
    assert torch.equal(columns, tensor[:300, 7:10])
    reads = sum(method == "GET" for method, _ in s3.requests)
    assert reads == 2 + 1 + 2, "the header in two, one chunk, and two"


def refused(root: RemotePath, step: int, name: str = "fails") -> str:
    """What a save says that goes wrong; the one before it stays whole."""
    before = open_checkpoint(root).step
    one = draft(root, step, name)
    with pytest.raises(CheckpointError) as error:
        save_far(root, step, seed=step, name=name)
    one.abandon()
    assert open_checkpoint(root).step == before
    assert verify(root).ok
    return str(error.value)


def test_a_save_that_is_given_up_is_told_until_one_is_whole(s3: S3) -> None:
    root = s3.place()
    first = draft(root, 1, "first")
    first.begin()
    assert not first.is_abandoned()
    first.abandon(tells=True)
    assert first.is_abandoned() and not draft(root, 1, "second").is_abandoned()
    save_far(root, 2, seed=2)
    assert not first.is_abandoned()
    assert sorted(each.name for each in root.iterdir()) == ["latest", "step-00000002"]


def test_storage_that_refuses(s3: S3) -> None:
    """Any one request of a save: the checkpoint before is the latest, and nothing is left."""
    root = s3.place()
    save_far(root, 1, seed=1)
    keys = s3.names()
    refusals = {
        "rank-00001-fails": "rank-00001-fails.safetensors: cannot be written: ",
        "step-00000002/index.json": "step-00000002/index.json: cannot be written: ",
    }
    for part, problem in refusals.items():
        s3.refuses = lambda method, path, part=part: method in ("PUT", "POST") and part in path
        text = refused(root, 2)
        assert (
            f"s3://{BUCKET}/runs/one/{problem}".replace("one/rank", "one/step-00000002/rank")
            in text
        )
        assert "Access Denied" in text
        assert "secret-of-tests" not in text
        s3.refuses = lambda method, path: False
        assert (s3.names(), s3.unfinished()) == (keys, [])


def test_storage_that_refuses_to_be_looked_at(s3: S3) -> None:
    """Is told as what it is by whoever looks for checkpoints."""
    root = s3.place()
    save_far(root, 1, seed=1)
    s3.refuses = lambda method, path: method == "HEAD"
    with pytest.raises(CheckpointError, match=f"{root}.*: cannot be read: "):
        candidates(root)
    with pytest.raises(CheckpointError, match=f"{root}.*: cannot be "):
        prune(root, 1)


def test_storage_that_stops_answering(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an upload: the save is given up, and what the storage does with it later
    counts for nothing."""
    monkeypatch.setattr(objects, "REQUEST_S", 0.5)
    monkeypatch.setattr(objects, "RETRIES", 1)
    open_files.cache_clear()
    root = s3.place()
    save_far(root, 1, seed=1)
    s3.holds = lambda method, path: method == "PUT" and "rank-00001-fails" in path
    assert "rank-00001-fails.safetensors: cannot be written: " in refused(root, 2)
    assert len(s3.held) == 2, "it is asked again"
    s3.holds = lambda method, path: False
    s3.released.set()
    until(lambda: len(s3.answered) == 2)
    assert (open_checkpoint(root).step, verify(root).ok) == (1, True)
    save_far(root, 3, seed=3)
    assert [each.step for each in list_checkpoints(root)] == [1, 3]
    assert not any("rank-00001-fails" in name for name in s3.names())
    assert s3.unfinished() == []


def test_bytes_that_change_on_the_way(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived is read back before it counts."""
    root = s3.place()
    save_far(root, 1, seed=1)
    plain = RemotePath.write

    def flipped(self: RemotePath, parts: Parts) -> None:
        plain(self, parts)
        if self.name.startswith("rank-00001"):
            s3.damage(self.key, lambda data: data.__setitem__(-1, data[-1] ^ 1))

    monkeypatch.setattr(RemotePath, "write", flipped)
    assert "the storage gives back other bytes than were sent" in refused(root, 2)


def test_what_is_damaged_there(s3: S3) -> None:
    """Is found by whoever reads it, and named with its bucket and key."""
    root = s3.place()
    for step in (1, 2):
        save_far(root, step, seed=step)
    key = "runs/one/step-00000002/rank-00000-save2.safetensors"
    s3.damage(key, lambda data: data.__setitem__(-1, data[-1] ^ 1))
    problem = "the bytes are not those that were written (sha256)"
    assert verify(root).problems == [f"s3://{BUCKET}/{key}: {problem}"]
    with pytest.raises(CheckpointError, match="checksum differs"):
        [open_checkpoint(root).read(name, kind) for kind, name in values(2)]
    s3.damage(key, lambda data: data.pop())
    assert "bytes, " in verify(root).problems[0]
    opened = open_checkpoint(root)
    assert (opened.step, "step-00000001, which is complete" in opened.notes[0]) == (1, True)


def test_what_a_killed_save_left(s3: S3) -> None:
    """Counts for nothing, and the next save clears it."""
    root = s3.place()
    save_far(root, 1, seed=1)
    for step in (2, 1):
        one = draft(root, step, "killed")
        one.begin()
        one.write(0, *elements_of(rank_shards(step)[0]))
        assert [each.step for each in list_checkpoints(root)] == [1]
    (problem,) = verify(root).problems
    assert problem.endswith("/step-00000001/rank-00000-killed.safetensors: is not in the index")
    save_far(root, 3, seed=3)
    assert verify(root).ok
    assert [each.step for each in list_checkpoints(root)] == [1, 3]


def test_two_runs_with_one_address(s3: S3) -> None:
    """The one that began to save last writes there. The other changes nothing any more, whatever it
    was about to do, and neither harms what the other has saved."""
    root = s3.place()
    first, second = Owner(), Owner()
    save_far(root, 1, seed=1, owner=first)
    under_way = draft(root, 2, "first", first)
    under_way.begin()
    files = [under_way.write(r, *elements_of(own)) for r, own in enumerate(rank_shards(2))]
    theirs = draft(root, 2, "second", second)
    theirs.begin()
    assert json.loads((root / OWNER).read_bytes())["turn"] == 2
    written = [theirs.write(r, *elements_of(own)) for r, own in enumerate(rank_shards(22))]
    names = s3.names()
    refusal = rf"{root}: a run that began on \S+ at [-\d]+ [:\d]+ UTC writes there now"
    late = draft(root, 3, "late", first)
    for change in (lambda: under_way.commit(files, STATE), late.begin):
        with pytest.raises(CheckpointError, match=refusal):
            change()
        late.abandon()
        assert s3.names() == names
    theirs.commit(written, {**STATE, "seed": 22})
    assert (open_checkpoint(root).state["seed"], verify(root).ok) == (22, True)
    assert [each.step for each in list_checkpoints(root)] == [1, 2]


def test_a_start_that_was_overtaken_takes_no_turn(s3: S3) -> None:
    """It looked, and was thought to be dead: who began to save meanwhile goes on undisturbed."""
    root = s3.place()
    save_far(root, 1, seed=1, owner=Owner())
    slow = looked(root, Owner())
    assert slow.found == 1
    working = looked(root, Owner())
    theirs = draft(root, 2, "working", working)
    theirs.begin()
    written = [theirs.write(r, *elements_of(own)) for r, own in enumerate(rank_shards(2))]
    names = s3.names()
    assert looked(root, slow) == slow, "in its next epoch, too"
    with pytest.raises(CheckpointError, match="writes there now"):
        draft(root, 3, "slow", Owner(**asdict(slow))).begin()
    assert s3.names() == names
    theirs.commit(written, {**STATE, "seed": 2})
    later = looked(root, Owner())
    save_far(root, 3, seed=3, owner=later)
    assert open_checkpoint(root).state["seed"] == 3
    s3.refuses = lambda method, path: method == "GET"
    unknown = Owner()
    assert looked(root, unknown) == unknown


def test_a_turn_lasts_as_long_as_a_command(s3: S3) -> None:
    """Processes begin again and other plans save meanwhile: what one of them still sends counts."""
    root, one = s3.place(), Owner()
    under_way = draft(root, 1, "before", one)
    under_way.begin()
    files = [under_way.write(r, *elements_of(own)) for r, own in enumerate(rank_shards(1))]
    again = Owner(**asdict(one))  # as another process has it
    take_turn(root, again)
    under_way.commit(files, {**STATE, "seed": 1})
    assert open_checkpoint(root).state["seed"] == 1
    save_far(root, 2, seed=2, owner=again)
    assert json.loads((root / OWNER).read_bytes())["turn"] == 1


def test_two_runs_that_take_a_turn_at_the_same_moment(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found none there: the one that was overwritten finds that before it commits."""
    root, one, other = s3.place(), Owner(), Owner()
    under_way = draft(root, 1, "one", one)
    under_way.begin()
    files = [under_way.write(r, *elements_of(own)) for r, own in enumerate(rank_shards(1))]
    with monkeypatch.context() as patch:
        patch.setattr(owner_of, "_read", lambda _: None)
        take_turn(root, other)
    with pytest.raises(CheckpointError, match="writes there now"):
        under_way.commit(files, STATE)
    s3.refuses = lambda method, path: method == "GET"
    with pytest.raises(CheckpointError, match=r"owner\.json: cannot be read: "):
        take_turn(root, one)


ADDRESSES = [
    ("s3://key:secret@bucket/runs", "expected an address without credentials"),
    ("sftp://me:secret@host/runs", "expected an address without credentials"),
    ("s3://KEY:sec/secret@bucket/runs", "s3://...@bucket/runs'"),
    ("sftp://me:sec/secret@host/runs", "sftp://...@host/runs'"),
    ("s3://[bucket/runs", "expected a folder, s3://BUCKET/PREFIX or sftp://"),
    ("sftp://host:port/runs", "expected a folder, s3://BUCKET/PREFIX or sftp://"),
    ("s3://bucket", "expected a folder, s3://BUCKET/PREFIX or sftp://"),
    ("ftp://host/runs", "expected a folder, s3://BUCKET/PREFIX or sftp://"),
    ("s3://KEY:sec/secret#x@bucket/runs", "s3://...@bucket/runs'"),
    ("s3://bucket/../other", "It has no '?', '#' or '..'"),
]


@pytest.mark.parametrize(("address", "problem"), ADDRESSES)
def test_addresses_that_cannot_be(address: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        place_of(address, "checkpoint.to")
    assert problem in str(error.value)
    assert "secret" not in str(error.value)


def test_a_sign_that_ends_no_secret() -> None:
    for address in ("s3://bucket/runs@2", "sftp://host:22/runs@2", "sftp://me@host/runs@2"):
        assert split_address(address, "checkpoint.to").geturl() == address


@pytest.mark.parametrize("endpoint", ["garbage", "host:9000", "http://", "ftp://host"])
def test_an_endpoint_that_is_none(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    said = f"AWS_ENDPOINT_URL = '{endpoint}': expected https://HOST"
    with pytest.raises(ConfigError, match=said):
        place_of(f"s3://none-{endpoint[:4].strip(':/')}/one", "checkpoint.to")


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    open_files.cache_clear()
    monkeypatch.setitem(sys.modules, "weft.checkpoint.remote.objects", None)
    with pytest.raises(ConfigError, match=r"pip install 'weft\[s3\]'"):
        place_of("s3://bucket/runs", "checkpoint.to")
