"""Weights of a decoder: from a local folder in Hugging Face's layout, or random ones of any shape."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.architecture import Architecture, from_hf
from engine.checkpoint import MANIFEST, Checkpoint, verify_manifest
from engine.model import DecoderWeights, ExpertWeights, LayerWeights
from engine.quantised import LogicalWeight, dequantise, recognise
from engine.remap import Source, locate, take
from serving.errors import InputError, nearest

Get = Callable[[str], Tensor]


class Loaded(NamedTuple):
    """What a folder held: the shape, the weights, and how many matrices were stored in each format (``plain``, ``fp8``, ``gptq``...)."""

    shape: Architecture
    weights: DecoderWeights
    formats: dict[str, int]


def load(
    folder: Path | str, *, device: torch.device, dtype: torch.dtype, shape: Architecture | None = None,
    manifest: Path | str | None = None, remap: Mapping[str, str] | None = None,
) -> Loaded:  # fmt: skip
    """Load a folder of safetensors; ``shape`` defaults to its ``config.json``. Quantised weights become ``dtype``.

    A SHA-384 manifest (``manifest``, or ``SHA384SUMS`` in the folder) is verified first and refuses any difference. ``remap`` maps regular
    expressions to canonical names, before the built-in table. Raises InputError naming file and tensor for anything missing, truncated, unknown or of another shape.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(str(folder), "is no folder", "weights are read from a local folder, never from the network")
    manifest = Path(manifest) if manifest else folder / MANIFEST if (folder / MANIFEST).is_file() else None
    if manifest is not None:
        verify_manifest(folder, manifest)
    shape = shape or from_hf(folder / "config.json")
    if '"gptq_v2"' in _text(folder / "config.json"):
        raise InputError(str(folder / "config.json"), "names the format gptq_v2, whose zero points look like gptq's but are one less", "convert it to gptq")
    checkpoint = Checkpoint(folder)
    logical = recognise(checkpoint.tensors)
    sources = locate(list(logical), shape, remap)
    _check_names(checkpoint, logical, sources, shape)
    sizes = shape.weight_shapes()

    def get(name: str) -> Tensor:
        source = sources[name]
        weight = logical[source.name]
        tensor = take(dequantise(weight, checkpoint.read), source, sizes[name], shape.head_dim)
        if tuple(tensor.shape) != sizes[name]:
            file = checkpoint.tensors[weight.main].file
            raise InputError(str(file), f"tensor '{source.name}' has shape {list(tensor.shape)}, expected {list(sizes[name])}", "config.json is of another network")
        return tensor.to(device=device, dtype=dtype)

    return Loaded(shape, assemble(shape, get), dict(Counter(weight.format for weight in logical.values())))


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _check_names(checkpoint: Checkpoint, logical: dict[str, LogicalWeight], sources: dict[str, Source], shape: Architecture) -> None:
    wanted = shape.weight_shapes()
    for name in wanted:
        if name not in sources:
            raise InputError(str(checkpoint.folder), f"no file holds tensor '{name}'", nearest(name, sources))
    for name, source in sources.items():
        # A tied head may be stored all the same.
        if name not in wanted and not (shape.tied_embeddings and name == "lm_head.weight"):
            file = checkpoint.tensors[logical[source.name].main].file
            raise InputError(str(file), f"tensor '{source.name}' has no place in this architecture", nearest(name, wanted))


def assemble(shape: Architecture, get: Get) -> DecoderWeights:
    """Build the fused weights out of canonical ones; ``get`` returns each, on its device, exactly once."""
    embedding = get("model.embed_tokens.weight")
    layers = [_layer(shape, f"model.layers.{index}.", get) for index in range(shape.layers)]
    head = embedding if shape.tied_embeddings else get("lm_head.weight")
    return DecoderWeights(embedding=embedding, layers=layers, norm=get("model.norm.weight"), lm_head=head)


def _layer(shape: Architecture, prefix: str, get: Get) -> LayerWeights:
    attention = prefix + "self_attn."

    def fused(leaf: str) -> Tensor:
        return torch.cat([get(f"{attention}{name}_proj.{leaf}") for name in "qkv"])

    dense = not shape.experts
    return LayerWeights(
        attention_norm=get(prefix + "input_layernorm.weight"),
        qkv=fused("weight"),
        qkv_bias=fused("bias") if shape.qkv_bias else None,
        q_norm=get(attention + "q_norm.weight") if shape.qk_norm else None,
        k_norm=get(attention + "k_norm.weight") if shape.qk_norm else None,
        output=get(attention + "o_proj.weight"),
        mlp_norm=get(prefix + "post_attention_layernorm.weight"),
        gate_up=_gate_up(prefix + "mlp.", get) if dense else None,
        down=get(prefix + "mlp.down_proj.weight") if dense else None,
        experts=None if dense else _experts(shape, prefix + "mlp.", get),
    )


def _gate_up(prefix: str, get: Get) -> Tensor:
    return torch.cat([get(prefix + "gate_proj.weight"), get(prefix + "up_proj.weight")])


def _experts(shape: Architecture, prefix: str, get: Get) -> ExpertWeights:
    shared = bool(shape.shared_intermediate)
    return ExpertWeights(
        router=get(prefix + "gate.weight"),
        gate_up=torch.stack([_gate_up(f"{prefix}experts.{expert}.", get) for expert in range(shape.experts)]),
        down=torch.stack([get(f"{prefix}experts.{expert}.down_proj.weight") for expert in range(shape.experts)]),
        shared_gate_up=_gate_up(prefix + "shared_expert.", get) if shared else None,
        shared_down=get(prefix + "shared_expert.down_proj.weight") if shared else None,
        shared_gate=get(prefix + "shared_expert_gate.weight") if shared else None,
    )


def random_weights(shape: Architecture, seed: int, *, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Return random weights: matrices normal with variance 1/inputs (activations keep their size), norms 1.

    Each weight has its own stream of (seed, name), so a weight does not depend on the others; equal seeds give equal weights on one kind of device.
    """
    sizes = shape.weight_shapes()

    def get(name: str) -> Tensor:
        size = sizes[name]
        if name.endswith("norm.weight"):
            return torch.ones(size, dtype=dtype, device=device)
        # One word of 32 bits, well mixed: torch's CPU generator takes no more.
        word = int(np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1)[0])
        generator = torch.Generator(device=device).manual_seed(word)
        return torch.empty(size, dtype=dtype, device=device).normal_(0.0, size[-1] ** -0.5, generator=generator)

    return assemble(shape, get)
