"""An adapter's matrices: from a folder in PEFT's layout, or random ones of any network's shape (Hu et al. 2021).

A network's layer multiplies by four fused matrices; an adapter adds B·A·x to each, part by part:

    qkv (q, k, v)   output (o)   gate_up (gate, up)   down (down)        A [parts · rank, inputs]   B [outputs, rank], the parts' rows in order
"""

from __future__ import annotations

import math
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.checkpoint import Checkpoint
from serving.errors import InputError
from serving.files import read_json_object

PARTS = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
TENSOR = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.lora_([AB])(?:\.default)?\.weight")


class Matrix(NamedTuple):
    """A fused matrix of a layer: its inputs, and the outputs of each part."""

    inputs: int
    widths: tuple[int, ...]


class Low(NamedTuple):
    """The two factors that an adapter adds to one matrix."""

    a: Tensor
    b: Tensor


#: By layer, by name of the matrix.
Adapter = list[dict[str, Low]]


def matrices(shape: Architecture) -> dict[str, Matrix]:
    """The matrices of a layer that adapters add to. Raises InputError for networks of experts."""
    if shape.experts:
        raise InputError("adapters", "the engine applies adapters to dense networks", "leave it out")
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": Matrix(shape.hidden, (queries, keys, keys)), "output": Matrix(queries, (shape.hidden,)),
        "gate_up": Matrix(shape.hidden, (shape.intermediate, shape.intermediate)), "down": Matrix(shape.intermediate, (shape.hidden,)),
    }  # fmt: skip


def random_adapter(shape: Architecture, rank: int, name: str, seed: int) -> Adapter:
    """Normal factors, float32 on the CPU, that change outputs by about a third of their size; equal for equal seed and name."""
    word = int(np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1)[0])
    generator = torch.Generator().manual_seed(word)

    def normal(rows: int, columns: int, spread: float) -> Tensor:
        return torch.empty(rows, columns).normal_(0.0, spread, generator=generator)

    return [
        {
            key: Low(normal(len(one.widths) * rank, one.inputs, one.inputs**-0.5), normal(sum(one.widths), rank, 0.3 * rank**-0.5))
            for key, one in matrices(shape).items()
        }
        for _ in range(shape.layers)
    ]


def load_adapter(folder: Path, shape: Architecture, rank: int) -> Adapter:
    """Read ``adapter_config.json`` and the safetensors beside it; factors of a smaller rank are padded with zeros, alpha is folded into B.

    Raises InputError naming file and tensor for what is missing, of another shape, of a larger rank than the slots', or no LoRA of a projection.
    """
    config = _config(folder)
    own = config["r"]
    if own > rank:
        raise InputError(str(folder / "adapter_config.json"), f"is of rank {own}, the slots hold {rank}", f"set adapters.rank to {own}")
    scale = config.get("lora_alpha", own) / (math.sqrt(own) if config.get("use_rslora") else own)
    checkpoint = Checkpoint(folder)
    sizes = matrices(shape)
    adapter: Adapter = [
        {key: Low(torch.zeros(len(one.widths) * rank, one.inputs), torch.zeros(sum(one.widths), rank)) for key, one in sizes.items()}
        for _ in range(shape.layers)
    ]
    for name, stored in checkpoint.tensors.items():
        found = TENSOR.fullmatch(name)
        if found is None or int(found[1]) >= shape.layers:
            raise InputError(str(stored.file), f"tensor '{name}' is no LoRA factor of a projection of this network", "adapters of other kinds are not applied")
        key, part = next((key, parts.index(found[2])) for key, parts in PARTS.items() if found[2] in parts)
        widths = sizes[key].widths
        expected = (own, sizes[key].inputs) if found[3] == "A" else (widths[part], own)
        if stored.shape != expected:
            raise InputError(str(stored.file), f"tensor '{name}' has shape {list(stored.shape)}, expected {list(expected)}", "it is of another network")
        low, value = adapter[int(found[1])][key], checkpoint.read(name).float()
        if found[3] == "A":
            low.a[part * rank : part * rank + own] = value
        else:
            first = sum(widths[:part])
            low.b[first : first + widths[part], :own] = value * scale
    return adapter


def _config(folder: Path) -> dict:
    file = folder / "adapter_config.json"
    try:
        config = read_json_object(file)
    except InputError as error:
        raise InputError(error.where, error.problem, "an adapter is a folder as PEFT writes it") from None
    if config.get("peft_type", "LORA") != "LORA" or not isinstance(config.get("r"), int) or config["r"] < 1:
        raise InputError(str(file), "describes no LoRA: it needs peft_type LORA and a rank r")
    for key in ("use_dora", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise InputError(str(file), f"asks for {key}, which is not applied")
    return config
