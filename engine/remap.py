"""Foreign names of weights turned into the canonical ones (``Architecture.weight_shapes``): a table of rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine.architecture import Architecture
from serving.errors import InputError


class Rule(NamedTuple):
    """Names that match ``pattern`` hold ``targets`` (regex templates): the ``same`` tensor, a ``split`` by rows, or ``rotary`` pairs to reorder.

    ``rotary``: the original Llama files store each head's rows as interleaved pairs (0, 1), (2, 3)...; this engine pairs i with i + D/2.
    """

    pattern: str
    targets: tuple[str, ...]
    kind: str = "same"


LAYER = r"^layers\.(\d+)\."
TO = r"model.layers.\1."
RULES: tuple[Rule, ...] = (
    # a text decoder inside a larger network
    Rule(r"^(?:language_model|text_model|model\.language_model)\.(?:model\.)?((?:embed_tokens|layers|norm)\..*)$", (r"model.\1",)),
    Rule(r"^(?:language_model|text_model)\.(lm_head\..*)$", (r"\1",)),
    # fused projections (Phi-3)
    Rule(r"^(model\.layers\.\d+\.self_attn)\.qkv_proj\.weight$", (r"\1.q_proj.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"), "split"),
    Rule(r"^(model\.layers\.\d+\.mlp)\.gate_up_proj\.weight$", (r"\1.gate_proj.weight", r"\1.up_proj.weight"), "split"),
    # Mixtral's experts
    Rule(r"^(model\.layers\.\d+)\.block_sparse_moe\.gate\.weight$", (r"\1.mlp.gate.weight",)),
    Rule(r"^(model\.layers\.\d+)\.block_sparse_moe\.(experts\.\d+)\.w1\.weight$", (r"\1.mlp.\2.gate_proj.weight",)),
    Rule(r"^(model\.layers\.\d+)\.block_sparse_moe\.(experts\.\d+)\.w2\.weight$", (r"\1.mlp.\2.down_proj.weight",)),
    Rule(r"^(model\.layers\.\d+)\.block_sparse_moe\.(experts\.\d+)\.w3\.weight$", (r"\1.mlp.\2.up_proj.weight",)),
    # the original Llama and Mistral files
    Rule(r"^tok_embeddings\.weight$", ("model.embed_tokens.weight",)),
    Rule(r"^norm\.weight$", ("model.norm.weight",)),
    Rule(r"^output\.weight$", ("lm_head.weight",)),
    Rule(LAYER + r"attention_norm\.weight$", (TO + "input_layernorm.weight",)),
    Rule(LAYER + r"ffn_norm\.weight$", (TO + "post_attention_layernorm.weight",)),
    Rule(LAYER + r"attention\.w([qk])\.weight$", (TO + r"self_attn.\2_proj.weight",), "rotary"),
    Rule(LAYER + r"attention\.w([vo])\.weight$", (TO + r"self_attn.\2_proj.weight",)),
    Rule(LAYER + r"feed_forward\.w1\.weight$", (TO + "mlp.gate_proj.weight",)),
    Rule(LAYER + r"feed_forward\.w2\.weight$", (TO + "mlp.down_proj.weight",)),
    Rule(LAYER + r"feed_forward\.w3\.weight$", (TO + "mlp.up_proj.weight",)),
)


class Source(NamedTuple):
    """Where a canonical weight comes from: the stored logical name, how it is changed, and its first row there."""

    name: str
    kind: str
    first_row: int


def locate(names: list[str], shape: Architecture, extra: Mapping[str, str] | None = None) -> dict[str, Source]:
    """Return the source of every canonical name that ``names`` (logical, stored) provide.

    ``extra`` maps regular expressions to replacements (``re.sub``), applied before the table; names without a rule stand for themselves.
    Raises InputError for an expression that is not one.
    """
    rows = {name: size[0] for name, size in shape.weight_shapes().items()}
    found: dict[str, Source] = {}
    for name in names:
        current, kind = _renamed(name, extra or {}), "same"
        targets: tuple[str, ...] = (current,)
        for rule in RULES:
            match = re.search(rule.pattern, current)
            if match:
                targets, kind = tuple(match.expand(target) for target in rule.targets), rule.kind
                if kind != "same":
                    break
                current = targets[0]
        first = 0
        for target in targets:
            found[target] = Source(name, kind, first)
            first += rows.get(target, 0)
    return found


def _renamed(name: str, extra: Mapping[str, str]) -> str:
    for pattern, replacement in extra.items():
        try:
            name = re.sub(pattern, replacement, name)
        except re.error as error:
            raise InputError(f"remap.{pattern}", f"is no regular expression with a fitting replacement: {error}") from None
    return name


def take(tensor: Tensor, source: Source, size: tuple[int, ...], head_dim: int) -> Tensor:
    """Return the canonical weight of shape ``size`` out of its stored ``tensor``."""
    if source.kind == "split":
        return tensor[source.first_row : source.first_row + size[0]]
    if source.kind == "rotary":
        pairs = tensor.view(-1, head_dim // 2, 2, tensor.shape[1])
        return torch.cat((pairs[:, :, 0], pairs[:, :, 1]), dim=1).reshape(tensor.shape)
    return tensor
