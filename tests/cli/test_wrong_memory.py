"""What cannot be of low precision and of memory: said before any work, with what would do."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.cli.main import run
from weft.cluster.cluster import Cluster, Node, catalogue
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.resolve import folder_here
from weft.resolve.resolve import Resolved, resolve

BF16 = ["compute.precision=bf16", "compute.device=cpu"]
DELAYED = ["compute.precision=fp8-delayed", "compute.device=cpu"]
ON_DISK = [*BF16, "optim.state_tier=disk"]
COMMAND_LINE, WHERE = "on the command line", "optim.state_folder"

WRONG = {
    "no such folder": (
        [*ON_DISK, f"{WHERE}=none"],
        f"{WHERE} = 'none': expected a folder that is there. Make it on every machine, or name "
        f"another. {COMMAND_LINE}",
    ),
    "nor where memory is not checked": (
        [*ON_DISK, f"{WHERE}=none", "compute.check_memory=false"],
        f"{WHERE} = 'none': expected a folder that is there.",
    ),
    "not to be written to": (
        [*ON_DISK, f"{WHERE}=/proc"],
        f"{WHERE} = '/proc': expected a folder that can be written to (",
    ),
    "no folder": (
        ON_DISK,
        f"{WHERE} = null: expected a folder for what is kept on disk. Choose one on a fast disk",
    ),
    "a folder for nothing": (
        [*BF16, f"{WHERE}=."],
        f"{WHERE} = '.': expected null where nothing is kept on disk. optim.state_tier=disk keeps",
    ),
    "a host of a host": (
        [*BF16, "optim.state_tier=host"],
        "optim.state_tier = 'host': expected device or disk on processors.",
    ),
    "activations on a host of a host": (
        [*BF16, "compute.recompute=offload"],
        "compute.recompute = 'offload': expected off on processors.",
    ),
    "some activations on a host of a host": (
        [*BF16, "compute.recompute=feed_forward+offload"],
        "compute.recompute = 'feed_forward+offload': expected feed_forward on processors.",
    ),
    "modes that do not go together": (
        [*BF16, "compute.recompute=full+offload_disk"],
        "Where full is, offload_disk has nothing to do; full:3+offload_disk is for offload_disk "
        "after three layers.",
    ),
    "nothing beside something": (
        [*BF16, "compute.recompute=off+core"],
        "compute.recompute = 'off+core': expected 'auto', 'off', ",
    ),
    "a mode twice": (
        [*BF16, "compute.recompute=core+core:2"],
        "compute.recompute = 'core+core:2': expected one of off, ",
    ),
    "more layers than stages have": (
        [*BF16, "compute.recompute=full:9"],
        "compute.recompute = 'full:9': expected 3 layers at most",
    ),
    "layers of stages that a planner chooses": (
        [*BF16, "plan=auto", "batch.samples=8", "compute.recompute=full:1"],
        "compute.recompute = 'full:1': expected modes without numbers of layers, where the",
    ),
    "a budget and a mode": (
        [*BF16, "compute.activations_gib=1", "compute.recompute=full"],
        "compute.recompute = 'full': expected 'auto' beside compute.activations_gib. Leave one of",
    ),
    "no budget": (
        [*BF16, "compute.activations_gib=0"],
        "compute.activations_gib = 0: expected a number > 0, or null.",
    ),
    "parameters without masters": (
        ["compute.device=cpu", "compute.precision=fp32", "optim.param_tier=disk", f"{WHERE}=."],
        "optim.param_tier = 'disk': expected device. fp32 updates what it computes with; bf16, "
        f"fp16 and fp8 have copies. {COMMAND_LINE}",
    ),
    "no history": (
        [*DELAYED, "compute.delayed.history=0"],
        "compute.delayed.history = 0: expected an integer from 1 to 1024.",
    ),
    "too long a history": (
        [*DELAYED, "compute.delayed.history=1025"],
        "compute.delayed.history = 1025: expected an integer from 1 to 1024.",
    ),
    "less than no margin": (
        [*DELAYED, "compute.delayed.margin=-1"],
        "compute.delayed.margin = -1: expected an integer from 0 to 8.",
    ),
    "too large a margin": (
        [*DELAYED, "compute.delayed.margin=9"],
        "compute.delayed.margin = 9: expected an integer from 0 to 8.",
    ),
    "half a power of two": (
        [*DELAYED, "compute.delayed.margin=1.5"],
        "compute.delayed.margin = 1.5: expected an integer from 0 to 8.",
    ),
    "delayed scales of other products": (
        ["compute.device=cpu", "compute.precision=fp8", "compute.delayed.history=8"],
        "compute.delayed = {history: 8, margin: 0}: expected null with this precision. precision: "
        "fp8-delayed has scales of earlier steps.",
    ),
    "emulated for nothing": (
        [*BF16, "compute.emulate_fp8=true"],
        "compute.emulate_fp8 = true: expected false where nothing is emulated (bf16 on cpu).",
    ),
}


def said_of(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize("name", WRONG)
def test_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked, problem = WRONG[name]
    assert run(["train", "debug", *asked, "--out", "mine"]) == 2
    assert problem in said_of(capsys)
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = SimpleNamespace(f_bavail=1000, f_frsize=1000)
    monkeypatch.setattr(folder_here.os, "statvfs", lambda _: full)
    out = tmp_path / "mine"
    assert run(["train", "debug", *ON_DISK, f"{WHERE}={tmp_path}", "--out", str(out)]) == 2
    said = said_of(capsys)
    assert f"{WHERE} = '{tmp_path}': expected a folder with room: ranks 0 to 1 need 0.0" in said
    assert "GiB, and its disk has 0.00093 GiB. Another disk may have it." in said
    assert not out.exists()


OLD, NEW, AMD = (catalogue()[n] for n in ("A100-SXM4-80GB", "H100-SXM5-80GB", "MI300X"))
CARDS = "bf16, fp16, fp32"


def on(names: Sequence[str], *asked: str) -> Resolved:
    chips = tuple(catalogue()[name] for name in names)
    node = Node(host="", cpu="some", cores=8, memory_gib=64, cpu_bf16=True, chips=chips)
    stages = "plan.stages=[{device: cuda}]" if chips else "plan.stages=[{device: cpu}]"
    return resolve(load_config("debug", [stages, *asked]), Cluster(nodes=(node,)))


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-delayed"])
@pytest.mark.parametrize("name", [OLD.name, AMD.name])
def test_no_units_for_eight_bits(precision: str, name: str) -> None:
    asked = f"compute.precision={precision}"
    has = ", ".join(d for d in ("bf16", "fp16", "fp32") if catalogue()[name].peak_flops(d))
    with pytest.raises(ConfigErrors) as caught:
        on([name], asked)
    assert str(caught.value).splitlines()[1:] == [
        f"  compute.precision = '{precision}': expected a precision that {name} has units for "
        f"({has}). Take bf16; compute.emulate_fp8=true rounds as {precision} does and multiplies "
        "as bf16, slower than bf16.",
        f"      {COMMAND_LINE}",
    ]
    notes = on([name], asked, "compute.emulate_fp8=true").notes
    words = "is emulated: rounded to eight bits, multiplied as bf16, slower than bf16"
    assert f"{precision} on {name} {words}" in notes


def test_no_units_for_bf16() -> None:
    slow = "bf16 on T4 is multiplied as fp32 is, for want of such units; fp16 is faster there"
    assert slow in on(["T4"], "compute.precision=bf16").notes
    assert slow not in on(["T4"], "compute.precision=fp16").notes
    assert not any("multiplied" in note for note in on([NEW.name], "compute.precision=bf16").notes)
    with pytest.raises(ConfigErrors, match=r"\(fp16, fp32\). Take fp16; compute.emulate_fp8=true"):
        on(["T4"], "compute.precision=fp8")


def test_units_for_eight_bits() -> None:
    assert not any("emulated" in note for note in on([NEW.name], "compute.precision=fp8").notes)
    assert any("fp8 on cpu is emulated" in note for note in on([], "compute.precision=fp8").notes)
    # Nobody's units make these: the same on every chip.
    for precision in ("fp8-blockwise", "fp8-fp64"):
        assert on([OLD.name], f"compute.precision={precision}").plan.world_size == 1


def test_a_cluster_of_which_some_lack_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pools = [
        f"  - {{chip: {name}, nodes: 1, chips_per_node: 1}}\n" for name in (NEW.name, OLD.name)
    ]
    Path("both.yaml").write_text("pools:\n" + "".join(pools))
    asked = ["plan", "debug", "--cluster", "both.yaml", "batch.samples=8"]
    assert run([*asked, "compute.precision=fp8"]) == 2
    assert f"expected a precision that {OLD.name} has units for ({CARDS})" in said_of(capsys)
