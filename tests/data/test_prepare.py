"""Preparing: the same with any number of threads, once, whole or not at all, never a hang."""

import errno
import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
from data_cases import config, documents, folder_of_texts, jsonl, prepared, prepares, silent, stream

from weft.config.errors import ConfigError
from weft.data.cache import PrepareError, locked
from weft.data.prepare import Prepared, prepare
from weft.data.tokenizer import FileTokenizer, train_bpe
from weft.data.tokens import read_index
from weft.elastic.processes import warm_context


def big_jsonl(path: Path, megabytes: int = 4) -> Path:
    """Rows of random words: enough for several jobs."""
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(500)]
    rows = [" ".join(draw.choices(words, k=400)) for _ in range(megabytes * 450)]
    return jsonl(path, rows)


def files_of(data: Prepared) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in data.folder.iterdir() if p.name != "prepared.json"}


def test_the_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    path = big_jsonl(tmp_path / "x.jsonl", megabytes=3)
    folder, found = str(Path(__file__).parent), []
    for threads in (1, 3):
        cache = tmp_path / f"by-{threads}"
        code = SCRIPT.format(folder=folder, path=str(path), cache=str(cache))
        environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        found.append(prepared(path, cache, tokenizer="bpe", vocab_size=300))
        assert not found[-1].notes
    one, three = found
    assert len(one.train.stores[0].shards) >= 3
    assert one.fingerprint == three.fingerprint
    assert files_of(one) == files_of(three)


def test_tokens_are_the_text(tmp_path: Path) -> None:
    texts = folder_of_texts(tmp_path / "text", 30)
    data = prepared(tmp_path / "text", tmp_path / "cache", tokenizer="bpe", vocab_size=300)
    tokenizer = data.tokenizer()
    train = documents(data, "train")
    assert sorted(train + documents(data, "held_out")) == sorted(texts.values())
    expected = []
    for tokens in tokenizer.encode_batch(train):
        expected += [*tokens.tolist(), data.end_id]
    assert stream(data, "train").tolist() == expected
    assert data.num_documents == 30
    assert data.num_bytes == sum(len(text.encode()) for text in texts.values())
    assert data.train_tokens == len(expected)


def test_every_shard_is_a_megatron_pair(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    data = prepared(tmp_path / "text", tmp_path / "cache")
    (store,) = data.train.stores
    ((name, num_tokens),) = store.shards
    assert read_index(data.folder / name).num_tokens == num_tokens


def test_the_tokenizer_never_sees_held_out_text(tmp_path: Path) -> None:
    """Each file repeats a word of its own: a tokenizer that has met it spells it in one token."""
    words = {f"zq{chr(97 + i // 26)}{chr(97 + i % 26)}vx" for i in range(40)}
    (tmp_path / "text").mkdir()
    for word in words:
        (tmp_path / f"text/{word}.txt").write_text(f" {word}" * 50)
    data = prepared(tmp_path / "text", tmp_path / "cache", tokenizer="bpe", vocab_size=2000)
    tokenizer = data.tokenizer()
    for side in ("train", "held_out"):
        found = {text.split()[0] for text in documents(data, side)}
        assert found
        lengths = {len(tokenizer.encode_batch([f" {word}"])[0]) for word in found}
        assert lengths == {1} if side == "train" else min(lengths) > 1


def test_a_tokenizer_is_trained_on_so_much_text_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.data.prepare.TOKENIZER_BYTES", 1 << 20)
    settings = config(big_jsonl(tmp_path / "x.jsonl", 3), tmp_path / "cache", tokenizer="bpe")
    data = prepare(settings, 1, report=silent)
    assert any(re.fullmatch(r"data: the .* trained on 3\d% of the text", n) for n in data.notes)
    assert "of older sources" not in "".join(data.notes)


def test_a_tokenizer_from_a_file(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    given = tmp_path / "tokenizer.json"
    given.write_text(train_bpe(["some other text " * 9], 300).replace("<|end|>", "<|stop|>"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|stop|>"}')
    data = prepared(tmp_path / "text", tmp_path / "cache", tokenizer=str(given))
    assert data.end_id == 0
    assert data.tokenizer().end == "<|stop|>"
    assert data.tokenizer_file.read_text() == given.read_text()
    assert isinstance(data.tokenizer(), FileTokenizer)
    other = given.with_name("other.json")
    other.write_text(train_bpe(["quite another text " * 9], 300))
    assert (
        prepared(tmp_path / "text", tmp_path / "cache", tokenizer=str(other)).folder != data.folder
    )


def test_a_second_time_only_opens(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    settings = config(tmp_path / "text", tmp_path / "cache")
    first = prepare(settings, 1, report=silent)
    changed = {p: p.stat().st_mtime_ns for p in first.folder.iterdir()}

    def refuse(*_: object) -> None:
        pytest.fail("worked again")

    again = prepare(settings, 1, report=refuse)
    assert again == first
    assert changed == {p: p.stat().st_mtime_ns for p in first.folder.iterdir()}


def test_what_does_not_change_tokens_shares_a_cache(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    first = prepared(tmp_path / "text", tmp_path / "cache")
    same = prepared(
        tmp_path / "text", tmp_path / "cache", seq_len=8, mask_documents=True, workers=3
    )
    assert same.folder == first.folder
    assert same.train.num_samples > first.train.num_samples
    for changes in ({"tokenizer": "bpe"}, {"held_out": 0.3}, {"limit_mb": 0.02}):
        assert prepared(tmp_path / "text", tmp_path / "cache", **changes).folder != first.folder


def change_content(root: Path) -> None:
    (root / "a/file000.txt").write_text("Something else, and longer.\n" * 100)


def add_file(root: Path) -> None:
    (root / "zzz.txt").write_text("A new file.\n")


def remove_file(root: Path) -> None:
    (root / "a/file000.txt").unlink()


def rename_file(root: Path) -> None:
    (root / "a/file000.txt").rename(root / "a/file999.txt")


def touch_file(root: Path) -> None:
    """The same size, another content, a moment later."""
    path = root / "a/file000.txt"
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("change", [change_content, add_file, remove_file, rename_file, touch_file])
def test_a_stale_cache_is_noticed_and_made_again(tmp_path: Path, change: object) -> None:
    folder_of_texts(tmp_path / "text", 30)
    first = prepared(tmp_path / "text", tmp_path / "cache")
    change(tmp_path / "text")  # type: ignore[operator]
    second = prepared(tmp_path / "text", tmp_path / "cache")
    assert second.notes == (
        "data: what the cache held was of older sources, so it was tokenized again",
    )
    assert second.fingerprint != first.fingerprint
    fresh = prepared(tmp_path / "text", tmp_path / "other")
    assert second.fingerprint == fresh.fingerprint
    assert sorted(path.name for path in second.folder.parent.iterdir()) == [
        second.folder.name,
        f"{second.folder.name}.lock",
    ]


def cut_shard(folder: Path) -> None:
    path = next(folder.glob("*train*.bin"))
    path.write_bytes(path.read_bytes()[:-2])


def lose_shard(folder: Path) -> None:
    next(folder.glob("*train*.bin")).unlink()


def lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_meta(folder: Path) -> None:
    path = folder / "prepared.json"
    path.write_text(path.read_text()[:-20])


def other_format(folder: Path) -> None:
    path = folder / "prepared.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))


@pytest.mark.parametrize("damage", [cut_shard, lose_shard, lose_tokenizer, cut_meta, other_format])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: object) -> None:
    folder_of_texts(tmp_path / "text", 30)
    first = prepared(tmp_path / "text", tmp_path / "cache")
    damage(first.folder)  # type: ignore[operator]
    second = prepared(tmp_path / "text", tmp_path / "cache")
    assert second.notes == ("data: what the cache held was damaged, so it was tokenized again",)
    assert second.fingerprint == first.fingerprint


def test_the_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    found = []
    for place in ("one", "two"):
        folder_of_texts(tmp_path / place, 30)
        for path in (tmp_path / place).rglob("*.txt"):
            os.utime(path, (1_000_000, 1_000_000 if place == "one" else 2_000_000))
        found.append(prepared(tmp_path / place, tmp_path / "cache"))
    assert found[0].folder != found[1].folder
    assert found[0].fingerprint == found[1].fingerprint


def test_progress_counts_up_to_all_of_it(tmp_path: Path) -> None:
    path = big_jsonl(tmp_path / "x.jsonl")
    told: list[tuple[int, int, str]] = []
    settings = config(path, tmp_path / "cache", tokenizer="bpe", vocab_size=300)
    prepare(settings, 1, report=lambda *args: told.append(args))
    size = path.stat().st_size
    for stage in ("training the tokenizer", "tokenizing"):
        done = [count for count, _, text in told if text == stage]
        assert done == sorted(done) and done[-1] == size and len(done) > 3, stage
    assert {total for _, total, _ in told} == {size}


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = big_jsonl(tmp_path / "x.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    lines[-5] = "{broken\n"
    path.write_text("".join(lines))
    with pytest.raises(ConfigError) as caught:
        prepare(config(path, tmp_path / "cache"), 1, report=silent)
    assert f"{path}:{len(lines) - 4}: Expecting property name" in str(caught.value)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from data_cases import config
from weft.data.prepare import prepare
settings = config({path!r}, Path({cache!r}), tokenizer="bpe", vocab_size=300)
prepare(settings, 1, report=lambda *_: None)
"""


def test_two_that_prepare_at_once_do_the_work_once(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 200, words=2000)
    context, coming = warm_context(), list[Connection]()
    for _ in range(3):
        here, there = context.Pipe(duplex=False)
        words = (there, tmp_path / "text", tmp_path / "cache")
        context.Process(target=prepares, args=words, daemon=True).start()
        coming.append(here)
        there.close()
    answers = [here.recv() if here.poll(600) else None for here in coming]
    assert None not in answers
    assert len({fingerprint for fingerprint, _ in answers}) == 1
    assert sorted(worked for _, worked in answers) == [False, False, True]


def test_a_lock_that_nobody_keeps_alive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with locked(path), pytest.raises(PrepareError) as caught, locked(path, wait_s=0.2):
        pytest.fail("two hold the lock")
    assert str(caught.value) == (
        f"{path} is held by process {os.getpid()}, which prepares the same data and gave no sign "
        "of life for 0 s. End that process, or choose another data.cache_dir."
    )
    with locked(path, wait_s=0):
        pass


def test_a_lock_that_is_kept_alive_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder works for longer than others wait, and tells them so. Waiting moves the clock."""
    path, polls = tmp_path / "x.lock", 0
    with ExitStack() as holder:
        tell = holder.enter_context(locked(path))(silent)

        def poll(_: float) -> None:
            nonlocal polls
            polls += 1
            sleep(0.03)  # more than one tick of the times of files
            if polls == 10:
                holder.close()
            else:
                tell(0, 0, "")

        clock = SimpleNamespace(monotonic=lambda: 30.0 * polls, sleep=poll)
        monkeypatch.setattr("weft.data.cache.time", clock)
        with locked(path, wait_s=45.0):
            assert polls == 10


def test_remains_of_a_killed_preparation_are_removed(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    first = prepared(tmp_path / "text", tmp_path / "cache")
    left = first.folder.with_name(f".{first.folder.name}.abcd")
    first.folder.rename(left)
    assert prepared(tmp_path / "text", tmp_path / "cache").fingerprint == first.fingerprint
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30)
    first = prepared(tmp_path / "text", tmp_path / "cache")
    lock = first.folder.with_name(f"{first.folder.name}.lock")
    lock.unlink()
    assert prepared(tmp_path / "text", tmp_path / "cache") == first
    assert not lock.exists()


@pytest.mark.parametrize("kept", ["in_the_way", "in_the_way/below"])
def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, kept: str) -> None:
    folder_of_texts(tmp_path / "text", 30)
    (tmp_path / "in_the_way").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "text", tmp_path / kept)
    expected = f"data.cache_dir = '{tmp_path / kept}': expected a folder that can be written ("
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("Name another.")


@pytest.mark.parametrize(("code", "is_named"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_a_cache_without_room_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_named: bool
) -> None:
    """What goes wrong otherwise, in sources for instance, is not called that."""
    folder_of_texts(tmp_path / "text", 30)

    def build(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("weft.data.prepare._Builder.build", build)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError if is_named else OSError) as caught:
        prepared(tmp_path / "text", Path("cache"))
    said = "data.cache_dir = '.*': expected a folder with room .No space left.*Make room there"
    assert bool(re.match(said, str(caught.value))) == is_named


def test_too_little_text_for_one_sample(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30, words=10)
    data = prepared(tmp_path / "text", tmp_path / "cache", held_out=0)
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "text", tmp_path / "cache", held_out=0, seq_len=9999)
    assert str(caught.value) == (
        f"data.seq_len = 9999: expected at most {data.train_tokens - 1}, for one sample to fit. "
        f"{tmp_path / 'text'} has {data.train_tokens} tokens to train on. Give more text."
    )
    longest = data.train_tokens - 1
    fits = prepared(tmp_path / "text", tmp_path / "cache", held_out=0, seq_len=longest)
    assert fits.train.num_samples == 1


def test_too_little_held_out_for_one_sample(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30, words=10)
    data = prepared(tmp_path / "text", tmp_path / "cache")
    held_out_tokens = sum(store.num_tokens for store in data.held_out.stores)
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "text", tmp_path / "cache", seq_len=held_out_tokens)
    assert str(caught.value) == (
        f"data.held_out = 0.2: expected a part with room for one sample of {held_out_tokens} "
        f"tokens and its last target. It has {held_out_tokens} tokens. Give more text, a larger "
        "part, or a smaller data.seq_len."
    )


def test_a_weight_that_leaves_a_source_out_is_refused(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "a", 30)
    folder_of_texts(tmp_path / "b", 30)
    sources = [{"path": str(tmp_path / "a")}, {"path": str(tmp_path / "b"), "weight": 1e-9}]
    with pytest.raises(ConfigError, match=r"data\.sources\[1\]\.weight = 1e-09"):
        prepared(None, tmp_path / "cache", sources=sources)


def test_nothing_held_out_when_nothing_is_asked_for(tmp_path: Path) -> None:
    texts = folder_of_texts(tmp_path / "text", 5)
    data = prepared(tmp_path / "text", tmp_path / "cache", held_out=0)
    assert documents(data, "train") == [text for _, text in sorted(texts.items())]
    assert data.held_out.open().num_samples == 0
    assert not any(store.num_tokens for store in data.held_out.stores)


def test_a_vocabulary_that_the_text_cannot_fill_is_told(tmp_path: Path) -> None:
    folder_of_texts(tmp_path / "text", 30, words=10)
    data = prepared(tmp_path / "text", tmp_path / "cache", tokenizer="bpe", vocab_size=50_000)
    assert 257 < data.vocab_size < 50_000
    assert data.notes == (
        f"data: the text has only {data.vocab_size} different tokens (data.vocab_size = 50000)",
    )


def test_several_sources_keep_apart_and_mix_by_weight(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 80_000)
    (tmp_path / "b.txt").write_text("b" * 20_000)
    sources = [
        {"path": str(tmp_path / "a.txt"), "weight": 1},
        {"path": str(tmp_path / "b.txt"), "weight": 3},
    ]
    data = prepared(None, tmp_path / "cache", sources=sources, held_out=0)
    batch = data.train.open().batch(range(data.train.num_samples))
    of_b = (batch.tokens == ord("b")).all(axis=1).sum()
    assert abs(of_b - 0.75 * data.train.num_samples) <= 1
    mixed = data.train_stream(1000)
    assert (len(mixed), (mixed == ord("b")).sum()) == (999, 200)


def test_preparing_needs_no_torch_and_no_pickle() -> None:
    code = "import sys, weft.data.prepare, weft.data.loader; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "tokenizers", "pyarrow"} & set(found.stdout.split())
