"""References share no code with what they check, and compute what transformers does."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
from models.test_hugging_face import OURS, _ours
from transformers import AutoConfig, AutoModelForCausalLM

import weft.models
from weft.models.decoder_spec import DecoderSpec
from weft.models.reference import Params, Samples, next_token
from weft.models.registry import FAMILIES

MODELS = Path(weft.models.__file__).parent
ALLOWED = {"weft.models.decoder_spec", "weft.models.reference"}
TOLERANCE = 1e-5
"""transformers turns positions and sums norms in fp32, in a model of fp64 too."""


@pytest.mark.parametrize(
    "path", sorted(MODELS.rglob("reference.py")), ids=lambda path: path.parent.name
)
def test_a_reference_uses_descriptions_alone(path: Path) -> None:
    """And PyTorch: nothing that is checked, and nothing that could import it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    used = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    used |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    assert {name for name in used if name and name.startswith("weft")} <= ALLOWED


def test_every_family_of_ours_has_one() -> None:
    assert all(family.reference is not None for family in FAMILIES.values())


def by_transformers(spec: DecoderSpec, params: Params, samples: Samples) -> tuple[Tensor, Tensor]:
    """The loss as in ``Reference``, with logits of the same parameters under their names."""
    converter = FAMILIES[spec.family].converter
    assert converter is not None
    fields = converter.to_fields(spec)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._experts_implementation = "eager"  # its fast product has no fp64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    theirs = {}
    for entry in converter.entries(spec):
        parts = [params[name].T if entry.transposed else params[name] for name in entry.ours]
        parts = parts if entry.at is None else [part[entry.at] for part in parts]
        theirs[entry.theirs] = torch.cat(parts, dim=-1)
    theirs = stacked(theirs)
    segments, seq = samples.segments, samples.tokens.shape[1]
    may_look = (segments[:, :, None] == segments[:, None, :]) & torch.ones(seq, seq).tril().bool()
    mask = torch.zeros(may_look.shape, dtype=torch.float64).masked_fill(~may_look, -1e30)
    given = {"attention_mask": mask[:, None], "use_cache": False}
    result = functional_call(model, theirs, (samples.tokens,), given)
    return next_token(result.logits, samples)


def stacked(tensors: Params) -> dict[str, Tensor]:
    """Experts as their modules hold them, from the names that their files have."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for theirs, tensor in tensors.items():
        name = theirs.replace("block_sparse_moe", "mlp")
        if ".experts." not in name:
            found[name] = tensor
            continue
        where, _, rest = name.partition(".experts.")
        own = rest.split(".")[1]
        experts.setdefault(f"{where}.experts.{names.get(own, own)}", []).append(tensor)
    for name, parts in experts.items():
        if name.endswith("gate_proj"):
            up = experts[name.replace("gate_proj", "up_proj")]
            both = torch.cat((torch.stack(parts), torch.stack(up)), 1)
            found[name.replace("gate_proj", "gate_up_proj")] = both
        elif name.endswith("down_proj"):
            found[name] = torch.stack(parts)
    return found


def some_samples(spec: DecoderSpec) -> Samples:
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, spec.vocab_size, (3, 25), generator=draw)
    begins = torch.rand((3, 24), generator=draw) < 0.15
    return Samples(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weights=torch.rand((3, 24), generator=draw, dtype=torch.float64),
        segments=begins.int().cumsum(1),
        numbers=torch.arange(3),
        seed=1,
        step=0,
    )


@pytest.mark.parametrize("name", OURS)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    spec = replace(OURS[name], dropout=0.0)
    samples, values = some_samples(spec), _ours(spec, torch.float64)
    reference = FAMILIES[spec.family].reference
    assert reference is not None
    sides = []
    for loss in (reference().loss, by_transformers):
        params = {key: value.clone().requires_grad_() for key, value in values.items()}
        total, weight = loss(spec, params, samples)
        (total / weight).backward()
        sides.append((total.item(), {key: param.grad for key, param in params.items()}))
    (ours, our_grads), (theirs, their_grads) = sides
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    largest = max(float(grad.abs().max()) for grad in their_grads.values() if grad is not None)
    settled = {key for key in their_grads if key.endswith("router.bias")}  # no gradient's business
    assert all(grads[key] is None for grads in (our_grads, their_grads) for key in settled)
    for key in their_grads.keys() - settled:  # that of a key's bias is zero but for rounding
        grad = their_grads[key]
        atol = TOLERANCE * max(float(grad.abs().max()), 1e-3 * largest)
        assert float((our_grads[key] - grad).abs().max()) <= atol, key
