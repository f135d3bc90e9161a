"""What the cuda family refuses before anything is computed, and what it says of a device.

Those marked ``gpu`` ask a real one.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.config.errors import ConfigError
from weft.platform.cuda import arch_of, runs_on
from weft.platform.registry import PLATFORMS, platform_named

CUDA = PLATFORMS["cuda"]
WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a real device")


@pytest.mark.parametrize(
    ("built", "own", "runs"),
    [
        (WHEEL, "sm_90", True),
        (WHEEL, "sm_89", True),  # kernels of an earlier card of the same version
        (WHEEL, "sm_70", False),
        (WHEEL, "sm_37", False),
        (WHEEL, "sm_110", False),
        (WHEEL, "sm_130", True),  # made by the driver
        (["sm_90"], "sm_100", False),
        (["sm_90a"], "sm_90", True),
        (["sm_90a"], "sm_92", False),
        (["sm_100f"], "sm_103", True),
        (["gfx90a", "gfx942"], "gfx942", True),
        (["gfx90a", "gfx942"], "gfx1100", False),
        (["gfx9-4-generic"], "gfx942", True),
        (["ivcore11"], "sm_71", True),  # who knows
        ([], "sm_90", True),
    ],
)
def test_which_cards_a_build_has_kernels_for(built: list[str], own: str, runs: bool) -> None:
    assert runs_on(built, own) == runs


def test_what_compilers_call_a_card() -> None:
    assert arch_of(9, 0, "NVIDIA H200") == "sm_90"
    assert arch_of(9, 4, "gfx942:sramecc+:xnack-") == "gfx942"


def test_a_card_that_the_wheel_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a kernel of it is missed in the first step."""
    card = SimpleNamespace(name="Tesla K80", major=3, minor=7, gcnArchName="Tesla K80")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: card)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr("torch.cuda.set_device", lambda number: None)
    monkeypatch.setattr("torch.__version__", "2.13.0+cu130")
    with pytest.raises(ConfigError) as caught:
        CUDA.device(1)
    assert str(caught.value) == (
        "compute.device = 'cuda': expected a card that PyTorch 2.13.0+cu130 is built for (sm_75, "
        "sm_80). Device 1, Tesla K80, is sm_37: install a build that has it, leave it out with "
        "CUDA_VISIBLE_DEVICES, or train with compute.device=cpu."
    )
    card.major, card.minor = 8, 0
    assert CUDA.device(1) == torch.device("cuda", 1)


def test_what_the_driver_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)\nAnd")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", init)
    with pytest.raises(ConfigError, match=r"\(cpu\)\. The NVIDIA driver .* 11040\)\.$"):
        platform_named("cuda")


def test_fp32_products_are_asked_for_in_one_way() -> None:
    """All of PyTorch's ways to read what was asked agree: its compiler uses several."""
    asked = torch.get_float32_matmul_precision()
    for tf32, word in ((True, "high"), (False, "highest")):
        CUDA.multiply_fp32(tf32=tf32)
        assert torch.get_float32_matmul_precision() == word
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")
    torch.set_float32_matmul_precision(asked)


@pytest.mark.gpu
@on_gpu
def test_a_real_card_is_taken() -> None:
    assert CUDA.device(0) == torch.device("cuda", 0)
    assert CUDA.build().startswith("nccl 2 of ")
    assert CUDA.versions().keys() == {"nccl", "driver"}


@pytest.mark.gpu
@on_gpu
def test_a_real_card_says_what_it_has_too_little_of() -> None:
    """As the words of ``weft.train.out_of_memory`` expect it."""
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate "):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def test_memory_is_noted_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of what follows: what PyTorch is asked for, and that it ends."""
    asked: list[object] = []
    note = lambda enabled="all", **_: asked.append(enabled)  # noqa: E731
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", note)
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", asked.append)
    write = CUDA.memory_history()
    assert write is not None
    write(tmp_path / "memory")
    assert asked == ["all", str(tmp_path / "memory"), None]
    assert platform_named("cpu").memory_history() is None


@pytest.mark.gpu
@on_gpu
def test_a_device_writes_its_memory(tmp_path: Path) -> None:
    write = CUDA.memory_history()
    assert write is not None
    torch.ones(1024, device="cuda")
    write(tmp_path / "memory")
    assert (tmp_path / "memory").stat().st_size > 0
