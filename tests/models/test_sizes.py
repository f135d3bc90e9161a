"""Published shapes have their published sizes: in the module, in the arithmetic, in the books."""

import os
from dataclasses import replace

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from weft.models.registry import FAMILIES, build_model
from weft.plan.model import ModelSpec

# Total parameters as the model cards on Hugging Face state them (the "safetensors" box counts
# every element once); GPT-2's are those of its four released checkpoints.
PUBLISHED = {
    ("llama", "tinyllama-1.1b"): 1_100_048_384,
    ("llama", "llama2-7b"): 6_738_415_616,
    ("llama", "llama2-13b"): 13_015_864_320,
    ("llama", "llama2-70b"): 68_976_648_192,
    ("llama", "llama3-8b"): 8_030_261_248,
    ("llama", "llama3-70b"): 70_553_706_496,
    ("llama", "llama3-405b"): 405_853_388_800,
    ("llama", "llama3.2-1b"): 1_235_814_400,
    ("llama", "llama3.2-3b"): 3_212_749_824,
    ("llama", "qwen2.5-0.5b"): 494_032_768,
    ("llama", "qwen2.5-1.5b"): 1_543_714_304,
    ("llama", "qwen2.5-3b"): 3_085_938_688,
    ("llama", "qwen2.5-7b"): 7_615_616_512,
    ("llama", "qwen2.5-14b"): 14_770_033_664,
    ("llama", "qwen2.5-32b"): 32_763_876_352,
    ("llama", "qwen2.5-72b"): 72_706_203_648,
    ("llama", "qwen3-0.6b"): 596_049_920,
    ("llama", "qwen3-1.7b"): 1_720_574_976,
    ("llama", "qwen3-4b"): 4_022_468_096,
    ("llama", "qwen3-8b"): 8_190_735_360,
    ("llama", "qwen3-14b"): 14_768_307_200,
    ("llama", "qwen3-32b"): 32_762_123_264,
    ("llama", "mixtral-8x7b"): 46_702_792_704,
    ("llama", "mixtral-8x22b"): 140_630_071_296,
    ("llama", "qwen1.5-moe-a2.7b"): 14_315_784_192,
    ("llama", "qwen3-30b-a3b"): 30_532_122_624,
    ("llama", "olmoe-1b-7b"): 6_919_161_856,
    ("gpt2", "small"): 124_439_808,
    ("gpt2", "medium"): 354_823_168,
    ("gpt2", "large"): 774_030_080,
    ("gpt2", "xl"): 1_557_611_200,
}
# No exact count is published; the formula of a Llama, by hand: 2 V d for the tables, and a layer
# of 2 d^2 (q, o) + 2 d kv (k, v) + 3 d d_ff + 2 d (norms), and d for the last norm.
BY_HAND = {
    ("llama", "aquila2-7b"): 2 * 100_008 * 4096
    + 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096)
    + 4096,
    ("llama", "aquila2-34b"): 2 * 100_008 * 6144
    + 60 * (2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 24_576 + 2 * 6144)
    + 6144,
    ("llama", "aquila2-70b"): 2 * 100_008 * 8192
    + 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192)
    + 8192,
}
# Latent attention (arXiv 2412.19437, section 2.1): q and kv to their ranks and the norms there,
# from these to 128 (16) heads of 128 + 64 and 128 + 128, and o; three matrices of a feed-forward,
# and of each expert; a gate with a bias; two norms a layer. The layer of the second token is left.
BY_HAND |= {
    ("llama", "deepseek-v3"): 2 * 129_280 * 7168
    + 7168
    + 61 * (7168 * (1536 + 512 + 64) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256)
    + 61 * (128 * 128 * 7168 + 2 * 7168)
    + 3 * 3 * 7168 * 18_432
    + 58 * (257 * 3 * 7168 * 2048 + 256 * (7168 + 1)),
    ("llama", "moonlight-16b-a3b"): 2 * 163_840 * 2048
    + 2048
    + 27 * (2048 * (16 * 192 + 512 + 64) + 512 + 512 * 16 * 256 + 16 * 128 * 2048 + 2 * 2048)
    + 3 * 2048 * 11_264
    + 26 * (66 * 3 * 2048 * 1408 + 64 * (2048 + 1)),
}
ROWS = [(family, size) for family in FAMILIES for size in FAMILIES[family].sizes]
OURS = {row for row in ROWS if row[1].startswith(("debug-", "demo-"))}
"""Which nobody else counts."""
CONVERTED = [row for row in ROWS if FAMILIES[row[0]].converter is not None]


def _spec(row: tuple[str, str]) -> ModelSpec:
    return FAMILIES[row[0]].sizes[row[1]]


def _count(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def test_every_row_is_counted() -> None:
    assert set(ROWS) == PUBLISHED.keys() | BY_HAND.keys() | OURS


@pytest.mark.parametrize("row", PUBLISHED | BY_HAND, ids=" ".join)
def test_published_number_of_parameters(row: tuple[str, str]) -> None:
    expected = (PUBLISHED | BY_HAND)[row]
    with torch.device("meta"):
        model = build_model(_spec(row))
    assert _count(model) == expected
    assert sum(param.numel for param in FAMILIES[row[0]].param_specs(_spec(row))) == expected


@pytest.mark.parametrize("row", CONVERTED, ids=" ".join)
def test_transformers_counts_the_same(row: tuple[str, str]) -> None:
    """The shape as a config.json makes a module of as many parameters there."""
    fields = FAMILIES[row[0]].converter.to_fields(_spec(row))
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    biases = sum(p.numel for p in FAMILIES[row[0]].param_specs(_spec(row)) if p.settled)
    whole = sum(p.numel for p in FAMILIES[row[0]].param_specs(_spec(row)))
    assert _count(theirs) == whole - biases  # which are buffers there


@pytest.mark.parametrize(
    ("row", "low", "high"), [("debug-1m", 0.9e6, 1.2e6), ("demo-5m", 4.9e6, 5.2e6)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_sizes_are_what_they_are_called(
    family: str, row: str, low: float, high: float
) -> None:
    assert low < sum(p.numel for p in FAMILIES[family].param_specs(_spec((family, row)))) < high


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_specs_name_the_module_s_parameters_in_order(row: tuple[str, str]) -> None:
    spec = replace(_spec(row), num_layers=2)
    with torch.device("meta"):
        model = build_model(spec)
    held = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    assert held == [(p.name, p.shape) for p in FAMILIES[spec.family].param_specs(spec)]


@pytest.mark.parametrize("family", FAMILIES)
def test_decay_and_starts_are_where_they_belong(family: str) -> None:
    spec = replace(_spec((family, "debug-1m")), tied=False)
    specs, ends = FAMILIES[family].param_specs(spec), ("attn.o.weight", "ff.down.weight")
    branches = sum(param.name.endswith(ends) for param in specs)
    for param in specs:
        is_table = param.name in ("embed.weight", "positions.weight")
        assert param.decay == (len(param.shape) == 2 and not is_table), param.name
        if len(param.shape) == 2:
            std = (0.4 / spec.d_model / (branches if param.name.endswith(ends) else 1)) ** 0.5
            std = 1.0 if param.name == "embed.weight" else std
            assert param.init.kind == "normal" and param.init.std == pytest.approx(std)
        else:
            assert param.init.kind == ("zeros" if param.name.endswith("bias") else "ones")
