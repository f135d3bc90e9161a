"""The chip catalogue, clusters as JSON, and detection against made-up machines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from weft.cluster.cluster import Chip, Cluster, Node, catalogue, chip_of_product, packages
from weft.platform.detect import detect, detect_node
from weft.platform.vendor import TorchBuild

X86 = "processor\t: 0\nmodel name\t: Fast Chip 9000\nflags\t\t: fpu avx2 {flag} sse\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"
H200 = "NVIDIA H200, 143771, GPU-aaaa-1"
T4 = "Tesla T4, 15360, GPU-aabb-2"
ODD = "NVIDIA Weaver 1, [N/A], GPU-cccc-3"
CUDA = TorchBuild("2.13.0+cu130", {"cuda": "13.0"})


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder that holds what ``/proc`` and ``/sys`` would."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def driver(folder: Path, script: str) -> dict[str, str]:
    """An environment whose ``nvidia-smi`` is this shell script."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:/usr/bin:/bin"}


def test_catalogue_is_complete_and_sane() -> None:
    """Every number is in the range that real chips have, so a slipped unit shows."""
    chips = catalogue()
    assert len(chips) == 45
    for name, chip in chips.items():
        assert name == chip.name
        assert chip.sources
        assert 16 <= chip.memory_gib <= 288, name
        assert (chip.devices > 1) == bool(chip.package), name
        assert chip.package not in chips, name
        assert chip.memory_gb_s is not None
        assert 300 <= chip.memory_gb_s <= 8000, name
        assert chip.link_gb_s is None or 10 <= chip.link_gb_s <= 1000, name
        assert chip.power_w is None or 50 <= chip.power_w <= 1500, name
        assert set(chip.peak_tflops) == {"fp32", "tf32", "bf16", "fp16", "fp8"}
        assert all(value is None or 5 <= value <= 6000 for value in chip.peak_tflops.values())
        peak, measured = chip.peak_tflops["bf16"], chip.measured_tflops["bf16"]
        assert measured is None or (peak is not None and 0.4 * peak < measured <= 1.05 * peak), name
        known = {field.name for field in fields(Chip)} | {"*"}
        assert {part.partition(".")[0] for part in chip.unverified} <= known


def test_catalogue_against_data_sheets() -> None:
    h100 = catalogue()["H100-SXM5-80GB"]
    assert h100.peak_flops("bf16") == pytest.approx(989.4e12)
    assert (h100.memory_gib, h100.memory_gb_s, h100.link_gb_s) == (80, 3350, 450)
    assert catalogue()["T4"].peak_flops("bf16") is None
    assert catalogue()["A100-SXM4-80GB"].peak_flops("tf32") == pytest.approx(156e12)


def test_packages_are_sold_and_devices_are_seen() -> None:
    """What the device sees: half of what is printed of each package."""
    found = packages()
    assert set(found) == {"MI250", "MI250X", "Max1550", "Ascend-910C", "BI-V150"}
    printed = {
        "MI250X": (128, 383, 3280, 350, 560),
        "Ascend-910C": (128, 780, 3200, 392, None),
        "BI-V150": (64, 192, 1600, 32, 350),
    }
    for name, whole in printed.items():
        chip = found[name]
        bf16 = chip.peak_tflops["bf16"]
        values = chip.memory_gib, bf16, chip.memory_gb_s, chip.link_gb_s, chip.power_w
        assert tuple(value and 2 * value for value in values) == whole, name
        assert chip.devices == 2


def test_products_belong_to_one_chip() -> None:
    products = [product for chip in catalogue().values() for product in chip.product_names]
    assert len(products) == len(set(products)) > 15
    for chip in catalogue().values():
        assert all(chip_of_product(product) is chip for product in chip.product_names)
    assert chip_of_product("NVIDIA Weaver 1") is None


def test_json_reads_back_equal() -> None:
    chip = catalogue()["MI300X"]
    node = Node(
        host="a",
        cpu="x",
        cores=3,
        memory_gib=1.5,
        cpu_bf16=True,
        chips=(chip, chip),
        problems=("p",),
    )
    cluster = Cluster(nodes=(node, Node(host="b", cpu="", cores=1, memory_gib=2, cpu_bf16=False)))
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("cpuinfo", "name", "bf16"),
    [
        (X86.format(flag="avx512_bf16"), "Fast Chip 9000", True),
        (X86.format(flag="amx_tile amx_bf16"), "Fast Chip 9000", True),
        (X86.format(flag="avx512f"), "Fast Chip 9000", False),
        (ARM, os.uname().machine, True),
        ("", os.uname().machine, False),
    ],
)
def test_processor(cpuinfo: str, name: str, bf16: bool, tmp_path: Path) -> None:
    node = detect_node(machine(tmp_path, {"proc/cpuinfo": cpuinfo}), {"PATH": ""})
    assert (node.cpu, node.cpu_bf16) == (name, bf16)


def test_empty_machine_is_tolerated(tmp_path: Path) -> None:
    """No /proc and no /sys, as outside Linux: still cores and memory, and nothing invented."""
    node = detect_node(tmp_path, {"PATH": ""})
    assert node.host == socket.gethostname()
    assert node.cores == len(os.sched_getaffinity(0))
    assert node.memory_gib > 0.1
    assert (node.cpu_bf16, node.chips, node.problems) == (False, (), ())


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "40000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:memory:/\n2:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "2000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "5000\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "99900000 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_container_quota(files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    """0.4 and 0.5 cores are one core, wherever the quota is set; no quota leaves all."""
    everything = len(os.sched_getaffinity(0))
    assert detect_node(machine(tmp_path, files), {"PATH": ""}).cores == (cores or everything)


def test_container_memory(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": str(2**28)}
    assert detect_node(machine(tmp_path, files), {"PATH": ""}).memory_gib == 0.25


def test_gpus(tmp_path: Path) -> None:
    """Known chips bring their rates and the driver's memory; an unknown one is said to be so."""
    node = detect_node(tmp_path, driver(tmp_path, f'echo "{H200}"; echo "{ODD}"'), torch=CUDA)
    known, odd = node.chips
    assert known.name == "H200-SXM-141GB"
    assert known.memory_gib == 140.4  # 143771 MiB
    assert known.peak_flops("bf16") == pytest.approx(989.4e12)
    assert (odd.name, odd.memory_gib, odd.peak_flops("bf16")) == ("NVIDIA Weaver 1", 0, None)
    problem = "NVIDIA: 'NVIDIA Weaver 1', number 1, is not in the catalogue; no peak rates."
    assert node.problems == (problem,)
    cluster = Cluster(nodes=(node,))
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("1,0", ["T4", "H200-SXM-141GB"]),
        ("1", ["T4"]),
        ("GPU-aaaa-1", ["H200-SXM-141GB"]),
        ("GPU-aab", ["T4"]),
        ("GPU-aa", []),
        ("0,7,1", ["H200-SXM-141GB"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_gpus(selection: str, names: list[str], tmp_path: Path) -> None:
    """As CUDA reads it: numbers, beginnings of UUIDs, and an end at the first that is wrong."""
    environment = driver(tmp_path, f'echo "{H200}"; echo "{T4}"')
    node = detect_node(tmp_path, {**environment, "CUDA_VISIBLE_DEVICES": selection}, torch=CUDA)
    assert [chip.name for chip in node.chips] == names


@pytest.mark.parametrize(
    ("script", "timeout_s", "problem"),
    [
        ("echo No driver; exit 9", 60, "NVIDIA: nvidia-smi failed (exit code 9: No driver)."),
        ("echo No devices were found", 60, "said 'No devices were found', which names none."),
        ("exec tail -f /dev/null", 0.2, "NVIDIA: nvidia-smi did not answer in 0.2 s."),
    ],
)
def test_broken_driver(script: str, timeout_s: float, problem: str, tmp_path: Path) -> None:
    node = detect_node(tmp_path, driver(tmp_path, script), timeout_s=timeout_s, torch=CUDA)
    assert node.chips == ()
    assert len(node.problems) == 1
    assert node.problems[0].endswith(problem)


def test_this_machine() -> None:
    cluster = detect()
    assert cluster.nodes[0].cores >= 1
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_import_is_light() -> None:
    heavy = "{'torch', 'numpy', 'pydantic'}"
    code = f"import sys, weft.platform.detect; print(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
