"""A record of a published run, and folders of such."""

import json
from pathlib import Path
from typing import Any

RECORD: dict[str, Any] = {
    "id": "r0",
    "group": "g",
    "status": "ok",
    "model": "Llama 7B",
    "n_layers": 32,
    "hidden": 4096,
    "n_heads": 32,
    "n_kv_heads": 8,
    "ffn_hidden": 11_008,
    "gated_mlp": True,
    "vocab": 32_000,
    "seq_len": 4096,
    "gpu": "H100-SXM5-80GB",
    "n_gpus": 16,
    "gpus_per_node": 8,
    "tp": 2,
    "pp": 2,
    "cp": 1,
    "dp": 4,
    "gbs": 64,
    "mbs": 1,
    "vpp": 4,
    "sp": True,
    "recompute": "full",
    "precision": "fp8",
    "dp_sharding": "distributed optimizer (ZeRO-1)",
    "framework": "NeMo",
    "iter_time_s": 3.0,
}


def write(folder: Path, *records: object, name: str = "throughput.json") -> Path:
    (folder / name).write_text(json.dumps(records), "utf-8")
    return folder
