"""What vendors' tools answer, who may use what they list, and what a PyTorch can do with it.

The answers are of ``answers``: written by hand after documented formats.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from weft.cluster.cluster import Cluster, catalogue
from weft.platform.detect import detect_node
from weft.platform.vendor import TorchBuild, installed_torch, vendors

ANSWERS = Path(__file__).parent / "answers"
CPU = TorchBuild("2.13.0+cpu")
CUDA = TorchBuild("2.13.0+cu130", {"cuda": "13.0"})
ROCM = TorchBuild("2.13.0+rocm6.4", {"hip": "6.4.43482"})
DTK = TorchBuild("2.4.1+das.opt2.dtk2504", {"hip": "6.1"})
METAX = TorchBuild("2.10.0+metax3.8.2.2", {"cuda": "11.6"})


def tools(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment with these commands (``_`` for ``-``), each a shell script."""
    (folder / "bin").mkdir()
    for name, script in scripts.items():
        tool = folder / "bin" / name.replace("_", "-")
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    return {"PATH": f"{folder}/bin:/usr/bin:/bin"}


def answering(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose commands of these names answer as the files say."""
    return tools(folder, **{name: f"cat {ANSWERS}/{name}.txt" for name in names})


READ = {
    "nvidia-smi": ("NVIDIA", [("H100-SXM5-80GB", 79.65)] * 2),
    "amd-smi": ("AMD", [("MI300X", 191.98)] * 2),
    "rocm-smi": ("AMD", [("MI250-GCD", 63.98)] * 2),
    "xpu-smi": ("Intel", [("Max1550-stack", 64.0)] * 2),
    "npu-smi": ("Huawei", [("Ascend-910B", 64.0)] * 2),
    "cnmon": ("Cambricon", [("MLU370-X8", 22.83)] * 2),
    "mx-smi": ("MetaX", [("C500", 64.0)] * 2),
    "mthreads-gmi": ("Moore Threads", [("MTT-S4000", 48.0), ("MTT S80", 16.0)]),
    "ixsmi": ("Iluvatar", [("BI-V150-chip", 32.0)] * 2),
    "hy-smi": ("Hygon", [("DCU-K100_AI", 63.98)] * 2),
}
"""Tool -> vendor, and name and memory of every accelerator in its file."""


@pytest.mark.parametrize("tool", READ)
def test_each_answer_is_read(tool: str, tmp_path: Path) -> None:
    """This PyTorch can use none of them, which is said with the way out."""
    vendor, expected = READ[tool]
    node = detect_node(tmp_path, answering(tmp_path, tool), torch=CPU)
    assert node.chips == ()
    (found,) = node.unusable
    assert (found.vendor, {chip.vendor for chip in found.chips}) == (vendor, {vendor})
    assert [(chip.name, chip.memory_gib) for chip in found.chips] == expected
    assert found.way_out and found.why
    assert Cluster.from_json(Cluster(nodes=(node,)).to_json()).nodes == (node,)


def test_every_tool_of_every_vendor_has_an_answer() -> None:
    asked = {tool.command[0] for vendor in vendors() for tool in vendor.tools}
    assert asked == set(READ) == {file.stem for file in ANSWERS.glob("*.txt")}
    assert {vendor.vendor for vendor in vendors()} <= {chip.vendor for chip in catalogue().values()}


def test_all_tools_are_asked_at_once(tmp_path: Path) -> None:
    """Each of three waits until all three have begun."""
    meet = f"cd {tmp_path}; touch $(basename $0); while [ $(ls *smi* | wc -l) -lt 3 ]; do :; done"
    names = ("nvidia-smi", "npu-smi", "mx-smi")
    scripts = {name: f"{meet}; cat {ANSWERS}/{name}.txt" for name in names}
    node = detect_node(tmp_path, tools(tmp_path, **scripts), timeout_s=60, torch=CUDA)
    assert [chip.name for chip in node.chips] == ["H100-SXM5-80GB"] * 2
    assert [found.vendor for found in node.unusable] == ["Huawei", "MetaX"]


@pytest.mark.parametrize(
    ("tool", "variables", "shown"),
    [
        ("amd-smi", {"HIP_VISIBLE_DEVICES": "1"}, 1),
        ("amd-smi", {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ("amd-smi", {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, 2),
        ("amd-smi", {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 0),
        ("amd-smi", {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ("rocm-smi", {"ROCR_VISIBLE_DEVICES": "GPU-02150e7d042a1124"}, 1),
        ("npu-smi", {"ASCEND_RT_VISIBLE_DEVICES": "1"}, 1),
        ("npu-smi", {"CUDA_VISIBLE_DEVICES": ""}, 2),
        ("xpu-smi", {"ZE_AFFINITY_MASK": "1"}, 1),
        ("cnmon", {"MLU_VISIBLE_DEVICES": "0"}, 1),
        ("mx-smi", {"MACA_VISIBLE_DEVICES": "0"}, 1),
        ("mthreads-gmi", {"MUSA_VISIBLE_DEVICES": "1"}, 1),
        ("ixsmi", {"CUDA_VISIBLE_DEVICES": "GPU-4"}, 1),
        ("hy-smi", {"HIP_VISIBLE_DEVICES": "0"}, 1),
    ],
)
def test_variables_choose(tool: str, variables: dict[str, str], shown: int, tmp_path: Path) -> None:
    node = detect_node(tmp_path, {**answering(tmp_path, tool), **variables}, torch=CPU)
    assert sum(len(found.chips) for found in node.unusable) == shown


def test_a_variable_that_names_none_is_said(tmp_path: Path) -> None:
    environment = {**answering(tmp_path, "nvidia-smi"), "CUDA_VISIBLE_DEVICES": "MIG-7"}
    node = detect_node(tmp_path, environment, torch=CUDA)
    assert node.problems == (
        "NVIDIA: CUDA_VISIBLE_DEVICES=MIG-7 names none of the 2 that are here.",
    )


def test_the_second_tool_is_for_where_the_first_fails(tmp_path: Path) -> None:
    environment = tools(tmp_path, amd_smi="echo No GPU", rocm_smi=f"cat {ANSWERS}/rocm-smi.txt")
    node = detect_node(tmp_path, environment, torch=ROCM)
    assert [chip.name for chip in node.chips] == ["MI250-GCD"] * 2
    assert node.problems == ("AMD: amd-smi said 'No GPU', which names none.",)


def test_a_slow_tool_is_not_no_accelerator(tmp_path: Path) -> None:
    environment = tools(tmp_path, nvidia_smi="exec tail -f /dev/null")
    node = detect_node(tmp_path, environment, timeout_s=0.2, torch=CUDA)
    assert node.problems == ("NVIDIA: nvidia-smi did not answer in 0.2 s.",)
    assert [str(each) for each in node.unusable] == ["NVIDIA: nvidia-smi did not answer in 0.2 s"]


@pytest.mark.parametrize(
    ("tool", "torch", "why"),
    [
        ("nvidia-smi", CUDA, None),
        (
            "nvidia-smi",
            CPU,
            "2 x H100-SXM5-80GB found, but PyTorch 2.13.0+cpu is not built for them",
        ),
        ("nvidia-smi", ROCM, "PyTorch 2.13.0+rocm6.4 is not built for them"),
        ("nvidia-smi", METAX, "PyTorch 2.10.0+metax3.8.2.2 is not built for them"),
        ("amd-smi", ROCM, None),
        ("amd-smi", DTK, "PyTorch 2.4.1+das.opt2.dtk2504 is not built for them"),
        ("hy-smi", DTK, None),
        ("hy-smi", ROCM, "PyTorch 2.13.0+rocm6.4 is not built for them"),
        ("amd-smi", CUDA, "PyTorch 2.13.0+cu130 is not built for them"),
        ("mx-smi", METAX, None),
        ("mx-smi", CUDA, "PyTorch 2.13.0+cu130 is not built for them"),
        ("npu-smi", CPU, "2 x Ascend-910B found, but the package torch_npu is missing"),
        ("xpu-smi", TorchBuild("2.13.0+xpu", {"xpu": "20250301"}), "Weft has no devices 'xpu'"),
    ],
)
def test_what_a_build_can_use(
    tool: str, torch: TorchBuild, why: str | None, tmp_path: Path
) -> None:
    node = detect_node(tmp_path, answering(tmp_path, tool), torch=torch)
    assert len(node.chips) == (0 if why else 2)
    assert [why in str(each) for each in node.unusable] == [True] * bool(why)


def test_an_old_driver_is_said(tmp_path: Path) -> None:
    """And no more than said: there are packages with which it works."""
    node = detect_node(tmp_path, answering(tmp_path, "nvidia-smi"), torch=CUDA)
    text = "NVIDIA: driver 550.54.15 is older than 580.65, which PyTorch 2.13.0+cu130 asks for."
    assert (len(node.chips), node.problems) == (2, (text,))


def test_ranks_of_a_launcher_ask_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told one of them within the last minute serves the others."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    at_exit: list[tuple[Callable[[Path], None], Path]] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    folder = tmp_path / f"weft-{os.getuid()}"
    folder.mkdir()
    (folder / "chips-7-9").touch()  # of a process that was killed
    os.utime(folder / "chips-7-9", (1e9, 1e9))
    script = f"echo >> {tmp_path}/asked; cat {ANSWERS}/nvidia-smi.txt"
    environment = {**tools(tmp_path, nvidia_smi=script), "WORLD_SIZE": "2"}

    def asked() -> int:
        return len((tmp_path / "asked").read_text().splitlines())

    first = detect_node(tmp_path, environment, torch=CUDA)
    other = {**environment, "CUDA_VISIBLE_DEVICES": "1"}
    assert detect_node(tmp_path, environment, torch=CUDA) == first
    assert len(detect_node(tmp_path, other, torch=CUDA).chips) == 1
    assert asked() == 1
    (kept,) = folder.glob("chips-*")
    data = json.loads(kept.read_text())
    kept.write_text(json.dumps({**data, "at": data["at"] - 3600}))
    assert detect_node(tmp_path, environment, torch=CUDA) == first
    assert asked() == 2
    environment.pop("WORLD_SIZE")
    detect_node(tmp_path, environment, torch=CUDA)
    assert asked() == 3
    for call, path in at_exit:
        call(path)
    assert not folder.exists()


def test_the_installed_torch_is_read_without_import() -> None:
    import torch

    found = installed_torch()
    own: Sequence[str | None] = (torch.version.cuda, torch.version.hip)
    assert found.version == torch.__version__
    assert (found.attributes.get("cuda"), found.attributes.get("hip")) == tuple(own)
