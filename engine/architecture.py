"""The shape of a decoder transformer, from a catalogue entry or a Hugging Face ``config.json``; plain numbers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serving.errors import InputError, nearest
from serving.files import read_json_object


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies stretch beyond the trained length: ``linear`` divides all, ``llama3`` only the slow ones.

    ``llama3`` (Llama 3.1 release notes): wavelengths above ``original_max / low_freq_factor`` are divided by ``factor``, those below
    ``original_max / high_freq_factor`` kept, those between interpolated.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max: int = 8192


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder transformer with grouped-query attention and SwiGLU, dense or with routed experts. Sizes in elements.

    ``intermediate`` is the dense MLP's width; with ``experts`` > 0 each layer has a router and experts of ``expert_intermediate`` instead, plus
    a shared expert if ``shared_intermediate`` > 0. ``window`` limits attention to the last tokens (0: all) in ``window_layers`` layers spread
    evenly (0: in every layer); ``positions`` is ``rope`` or ``alibi`` (linear bias per head, usually with a window: the band). ``rope_table`` is ``float32`` or ``int8``.
    ``kv_owners`` names for each layer the one, itself or an earlier one, whose keys and values it reads; empty: all have their own.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_model_len: int = 8192
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    normalise_router: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    window: int = 0
    window_layers: int = 0
    positions: str = "rope"
    rope_table: str = "float32"
    kv_owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError("llm.kv_heads", f"{self.heads} query heads do not divide into {self.kv_heads} key/value heads")
        if self.head_dim % 2 and self.positions == "rope":
            raise InputError("llm.head_dim", f"rotary embedding needs an even head dimension, not {self.head_dim}")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise InputError("llm.experts_per_token", f"{self.experts_per_token} of {self.experts} experts cannot be chosen")
        for key, value, known in (("positions", self.positions, ("rope", "alibi")), ("rope_table", self.rope_table, ("float32", "int8"))):
            if value not in known:
                raise InputError(f"llm.{key}", f"'{value}' is not known", nearest(value, known))

    def window_of(self, layer: int) -> int:
        """Return the window of one layer, 0 for all tokens."""
        count = self.window_layers or self.layers
        return self.window if (layer + 1) * count // self.layers > layer * count // self.layers else 0

    def owner_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        return self.kv_owners[layer] if self.kv_owners else layer

    @property
    def kv_layers(self) -> int:
        """How many layers keep keys and values."""
        return len(set(self.kv_owners)) if self.kv_owners else self.layers

    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the KV cache bytes of one token over all layers."""
        return 2 * self.kv_layers * self.kv_heads * self.head_dim * element_bytes

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every weight's canonical name (Hugging Face's Llama and Mixtral-like names) and its [out, in] shape."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()})
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
        }
        if self.qkv_bias:
            shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        if not self.experts:
            return shapes | _mlp_shapes("mlp", hidden, self.intermediate)
        shapes["mlp.gate.weight"] = (self.experts, hidden)
        for expert in range(self.experts):
            shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, self.expert_intermediate)
        if self.shared_intermediate:
            shapes |= _mlp_shapes("mlp.shared_expert", hidden, self.shared_intermediate) | {"mlp.shared_expert_gate.weight": (1, hidden)}
        return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.gate_proj.weight": (width, hidden), f"{prefix}.up_proj.weight": (width, hidden), f"{prefix}.down_proj.weight": (hidden, width)}


#: Hugging Face architectures whose layers this engine computes, and what their config.json leaves unsaid.
HF_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Phi3ForCausalLM": {},
    "MixtralForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen2MoeForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True},
}


def from_hf(config: dict[str, Any] | Path) -> Architecture:
    """Read a Hugging Face ``config.json`` (its path or its content).

    Raises InputError for an unknown architecture, a missing key or a rotary scaling that the engine does not compute.
    """
    where = "config.json"
    if isinstance(config, Path):
        where = str(config)
        config = read_json_object(config)
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in HF_ARCHITECTURES:
        raise InputError(f"{where}: architectures", f"'{name}' is not an architecture this engine computes", nearest(name, HF_ARCHITECTURES))
    try:
        return _from_hf(config, name, where)
    except KeyError as error:
        raise InputError(where, f"has no key {error}") from None


def _from_hf(config: dict[str, Any], name: str, where: str) -> Architecture:
    heads = config["num_attention_heads"]
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    if (config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")) and experts:
        raise InputError(where, "mixes dense and expert layers", "every layer must have experts")
    windowed = config.get("use_sliding_window", name == "MistralForCausalLM")
    options = dict(HF_ARCHITECTURES[name])
    if "attention_bias" in config and name == "LlamaForCausalLM":
        options["qkv_bias"] = bool(config["attention_bias"])
    return Architecture(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_model_len=config.get("max_position_embeddings", 8192),
        experts=experts,
        experts_per_token=(config.get("num_experts_per_tok") or 0) if experts else 0,
        expert_intermediate=(config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else 0,
        shared_intermediate=(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
        normalise_router=config.get("norm_topk_prob", name == "MixtralForCausalLM"),
        tied_embeddings=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        rope_theta=_rope_parameters(config).get("rope_theta") or config.get("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(_rope_parameters(config), where),
        window=(config.get("sliding_window") or 0) if windowed else 0,
        **options,
    )


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _rope_scaling(found: dict[str, Any], where: str) -> RopeScaling | None:
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise InputError(f"{where}: rope_scaling", f"'{kind}' is not computed by this engine", "choose from: default, linear, llama3")
    return RopeScaling(
        kind=kind,
        factor=float(found["factor"]),
        low_freq_factor=found.get("low_freq_factor", 1.0),
        high_freq_factor=found.get("high_freq_factor", 4.0),
        original_max=found.get("original_max_position_embeddings", 8192),
    )


def from_llm(llm: Any) -> Architecture:
    """Take the shape of a catalogue entry (``serving.llm.Llm``, or anything with its attributes).

    Raises InputError, naming the entry, for what this engine does not compute: latent attention, ungated MLPs, extra norms, dense layers among expert layers.
    """
    moe, window = llm.moe, llm.sliding_window
    refused = {
        "latent attention (MLA)": llm.mla is not None,
        "an MLP without a gate": not llm.gated_mlp,
        f"{llm.norms_per_layer} norms a layer": llm.norms_per_layer != 2,
        "dense layers before its expert layers": bool(moe and moe.dense_layers),
    }
    for what, found in refused.items():
        if found:
            raise InputError(f"llm.{llm.name}", f"has {what}, which the engine does not compute", "the simulator does")
    return Architecture(
        layers=llm.layers,
        hidden=llm.hidden,
        heads=llm.heads,
        kv_heads=llm.kv_heads,
        head_dim=llm.head_dim,
        intermediate=llm.intermediate,
        vocab=llm.vocab,
        max_model_len=llm.max_model_len,
        experts=moe.experts if moe else 0,
        experts_per_token=moe.experts_per_token if moe else 0,
        expert_intermediate=moe.expert_intermediate if moe else 0,
        shared_intermediate=moe.shared_intermediate if moe else 0,
        tied_embeddings=llm.tied_embeddings,
        qkv_bias=llm.qkv_bias,
        qk_norm=llm.qk_norm,
        window=window.tokens if window else 0,
        window_layers=window.layers if window else 0,
    )


def scaled_down(shape: Architecture, *, layers: int, hidden: int, vocab: int, max_model_len: int = 2048) -> Architecture:
    """Return a small architecture of the same kind: the ratios of heads, MLP width and experts are kept as far as integers allow.

    For machines without the memory or speed for the real one; the weights are then random (``engine.loader.random_weights``).
    """
    head_dim = min(shape.head_dim, 64, hidden)
    ratio = shape.heads // shape.kv_heads
    kv_heads = max(1, round(hidden / head_dim / ratio))
    small = hidden / shape.hidden

    def width(full: int) -> int:
        return max(16, round(full * small / 16) * 16) if full else 0

    experts = min(shape.experts, 8)
    return replace(
        shape,
        layers=min(layers, shape.layers),
        window_layers=round(shape.window_layers * min(layers, shape.layers) / shape.layers),
        hidden=hidden,
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=width(shape.intermediate),
        expert_intermediate=width(shape.expert_intermediate),
        shared_intermediate=width(shape.shared_intermediate),
        experts=experts,
        experts_per_token=min(shape.experts_per_token, experts),
        vocab=min(vocab, shape.vocab),
        max_model_len=min(max_model_len, shape.max_model_len),
    )
