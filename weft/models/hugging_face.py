"""Folders of Hugging Face safetensors: in, out, and nothing that runs code on the way."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from weft.config.errors import ConfigError
from weft.models.config_folder import CONFIG_JSON, converters, read_json
from weft.models.config_json import Entry
from weft.models.hugging_face_weights import INDEX, HuggingFaceWeights
from weft.models.registry import FAMILIES
from weft.plan.model import ModelSpec

WEIGHTS = "model.safetensors"
SHARD_BYTES = 4 << 30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""A tokenizer, and beside it what its special tokens are for."""


def export_hf(
    folder: Path,
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer_file: Path | None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` opens, without custom code.

    ``read`` gives a whole parameter by its logical name, in the dtype to be written; each is asked
    for once, when it is written. ``tokenizer_file`` is a ``tokenizer.json``.

    Raises ConfigError: no Hugging Face architecture has this shape.
    """
    converter = FAMILIES[spec.family].converter
    if converter is None:
        raise ConfigError("model.family", spec.family, f"one of {', '.join(converters())}")
    fields = converter.to_fields(spec)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    total, dtype = 0, None
    for number, shard in enumerate(_shards(converter.entries(spec), read, shard_bytes)):
        name = f"model-{number + 1:05d}.safetensors"
        _write_tensors(shard, folder / name)
        files |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = next(iter(shard.values())).dtype
    _name_shards(folder, files, total)
    end_id = None if tokenizer_file is None else _copy_tokenizer(tokenizer_file, folder)
    known = {"torch_dtype": str(dtype).removeprefix("torch."), "eos_token_id": end_id}
    _write_json(folder / CONFIG_JSON, {**fields, "bos_token_id": None, **known})


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """With the permissions of any new file; safetensors writes one for its owner's eyes alone."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def _shards(
    entries: list[Entry], read: Callable[[str], Tensor], shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Their tensors in order, up to ``shard_bytes`` together."""
    shard: dict[str, Tensor] = {}
    held = 0
    read = lru_cache(maxsize=1)(read)  # of a stack each element is an entry, one after the other
    for entry in entries:
        parts = [read(name) for name in entry.ours]
        tensor = _joined(entry, parts if entry.at is None else [part[entry.at] for part in parts])
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[entry.theirs] = tensor
        held += tensor.nbytes
    yield shard


def _joined(entry: Entry, parts: list[Tensor]) -> Tensor:
    turned = [part.detach().cpu().T if entry.transposed else part.detach().cpu() for part in parts]
    return torch.cat(turned, dim=-1).contiguous()


def _name_shards(folder: Path, files: dict[str, str], total: int) -> None:
    """One file gets the plain name; several get their count and an index."""
    names = sorted(set(files.values()))
    if len(names) == 1:
        (folder / names[0]).rename(folder / WEIGHTS)
        return
    final = {name: f"{Path(name).stem}-of-{len(names):05d}.safetensors" for name in names}
    for name, path in final.items():
        (folder / name).rename(folder / path)
    weight_map = {tensor: final[name] for tensor, name in files.items()}
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _copy_tokenizer(tokenizer_file: Path, folder: Path) -> int | None:
    """Copy the tokenizer; returns the id of its end-of-text token where it names one."""
    source, config = (tokenizer_file.with_name(name) for name in TOKENIZER_FILES)
    shutil.copyfile(tokenizer_file, folder / source.name)
    if not config.is_file():
        return None
    shutil.copyfile(config, folder / config.name)
    named = read_json(config).get("eos_token")
    end = named.get("content") if isinstance(named, dict) else named
    added = read_json(tokenizer_file).get("added_tokens") or []
    return next((int(token["id"]) for token in added if token["content"] == end), None)


def import_hf(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The shape, and every parameter by its logical name in the dtype of the file.

    Raises ConfigError: as ``HuggingFaceWeights``.
    """
    weights = HuggingFaceWeights(folder)
    return weights.spec, {name: weights.read(name) for name in weights.names()}


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
