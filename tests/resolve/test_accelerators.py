"""What a run does with the accelerators of a machine: it never leaves them alone in silence."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from cluster.test_vendors import CPU, CUDA, answering, tools

from weft.cli.main import run
from weft.cluster.cluster import Cluster
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.lab.ranks import hidden_from_all
from weft.platform.detect import detect_node
from weft.platform.vendor import TorchBuild
from weft.resolve.resolve import Resolved, resolve

WHEEL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
UNUSABLE = (
    "compute.device = 'auto': expected accelerators that can be used. NVIDIA: 2 x H100-SXM5-80GB "
    f"found, but PyTorch 2.13.0+cpu is not built for them. Either {WHEEL}; or train on the "
    "processor: compute.device=cpu."
)


def here(environment: dict[str, str], torch: TorchBuild, timeout_s: float = 10) -> Cluster:
    return Cluster(nodes=(detect_node(Path("/"), environment, torch=torch, timeout_s=timeout_s),))


def resolved(cluster: Cluster, *pairs: str) -> Resolved:
    return resolve(load_config("debug", list(pairs)), cluster)


def test_auto_is_not_the_processor_beside_accelerators(tmp_path: Path) -> None:
    cluster = here(answering(tmp_path, "nvidia-smi"), CPU)
    with pytest.raises(ConfigErrors) as caught:
        resolved(cluster)
    assert [str(error) for error in caught.value.errors] == [UNUSABLE]
    asked = resolved(cluster, "compute.device=cpu")
    assert (set(asked.plan.devices), asked.warnings) == ({"cpu"}, ())
    with pytest.raises(ConfigErrors, match=r"or compute\.device=cpu\. NVIDIA: 2 x "):
        resolved(cluster, "compute.device=cuda")


def test_plan_auto_refuses_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit code is 2."""
    cluster = here(answering(tmp_path, "nvidia-smi"), CPU)
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: cluster)
    for words in (["train", "debug"], ["plan", "debug", "plan=auto"]):
        assert run(words) == 2
        assert UNUSABLE in capsys.readouterr().err


def test_a_tool_that_does_not_answer(tmp_path: Path) -> None:
    """Nobody knows what there is: a run that nobody told to take the processor does not."""
    cluster = here(tools(tmp_path, nvidia_smi="exec tail -f /dev/null"), CPU, timeout_s=0.2)
    with pytest.raises(ConfigErrors, match=r"did not answer in 0\.2 s\. Either try again"):
        resolved(cluster)
    assert set(resolved(cluster, "compute.device=cpu").plan.devices) == {"cpu"}


def test_what_stays_idle_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer accelerators than ranks; on standard error, also where notes are not printed."""
    cluster = here(answering(tmp_path, "nvidia-smi"), CUDA)
    text = (
        "trains on the processor: 2 x H100-SXM5-80GB stay idle; "
        "compute.device=cpu says that this is meant"
    )
    assert resolved(cluster, "plan.shares=[1,1,1]").warnings == (text,)
    assert resolved(cluster, "plan.shares=[1,1,1]", "compute.device=cpu").warnings == ()
    assert set(resolved(cluster).plan.devices) == {"cuda"}
    assert resolved(cluster).warnings == ()
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: cluster)
    assert run(["plan", "debug", "plan.shares=[1,1,1]", "--json"]) == 0
    assert f"warning: {text}" in capsys.readouterr().err


def test_a_tool_that_fails_is_said(tmp_path: Path) -> None:
    cluster = here(tools(tmp_path, nvidia_smi="echo no driver >&2; exit 9"), CPU)
    (warning,) = resolved(cluster).warnings
    assert warning.startswith(
        "trains on the processor: NVIDIA: nvidia-smi failed (exit code 9: no driver); "
    )


def test_ranks_of_a_lab_see_none(tmp_path: Path) -> None:
    """Their chips are parts of cores, whatever else the machine has; nobody is asked."""
    names = dict.fromkeys(("nvidia-smi", "amd-smi", "npu-smi"), f"touch {tmp_path}/asked")
    environment = {**tools(tmp_path, **names), **hidden_from_all()}
    node = here(environment, CPU).nodes[0]
    assert (node.chips, node.unusable, node.problems) == ((), (), ())
    assert not (tmp_path / "asked").exists()
    assert replace(node, host="") == replace(here({"PATH": os.defpath}, CPU).nodes[0], host="")
