"""The shape of a language model and the arithmetic that follows from it: parameters, weight bytes, KV bytes."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import ConfigDict, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from serving.errors import InputError, nearest

FACT = ConfigDict(extra="forbid")

# Bytes per weight, quantisation scales included: int4 in groups of 128 carries an fp16 scale and a 4-bit zero point
# (AWQ, GPTQ); mxfp4 a shared 8-bit exponent per 32 (OCP Microscaling 1.0); nvfp4 an fp8 scale per 16.
WEIGHT_BYTES = {
    "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "int8": 1.0,
    "int4": 0.5 + 2.5 / 128, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


class Matrix(NamedTuple):
    """A weight matrix as one GPU holds it: ``inputs`` x ``outputs``, used by the operator ``name``."""

    name: str
    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


class Parameters(NamedTuple):
    """Parameter counts by part. ``experts`` holds all routed experts; ``active`` is what one token touches."""

    embedding: int
    attention: int
    mlp: int
    experts: int
    shared_experts: int
    router: int
    norms: int
    head: int
    active: int

    @property
    def total(self) -> int:
        return sum(self[:-1])


@dataclass(frozen=True, slots=True, config=FACT)
class Moe:
    """A mixture of experts in every layer but the first ``dense_layers``."""

    experts: PositiveInt
    experts_per_token: PositiveInt
    expert_intermediate: PositiveInt
    shared_intermediate: int = 0  # of all shared experts together
    dense_layers: int = 0
    expert_dtype: str | None = None  # null: as the other weights

    @model_validator(mode="after")
    def _consistent(self) -> Moe:
        if self.experts_per_token > self.experts:
            raise ValueError("experts_per_token exceeds experts")
        if self.expert_dtype is not None and self.expert_dtype not in WEIGHT_BYTES:
            raise ValueError(f"expert_dtype: {nearest(self.expert_dtype, WEIGHT_BYTES)}")
        return self


@dataclass(frozen=True, slots=True, config=FACT)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent vector per token."""

    kv_lora_rank: PositiveInt
    rope_dim: PositiveInt
    nope_dim: PositiveInt
    v_dim: PositiveInt
    q_lora_rank: int = 0  # 0: queries are projected directly


@dataclass(frozen=True, slots=True, config=FACT)
class SlidingWindow:
    """``layers`` of the layers attend to at most ``tokens`` of context; the others to all of it."""

    tokens: PositiveInt
    layers: PositiveInt


@dataclass(frozen=True, slots=True, config=FACT)
class Llm:
    """A decoder-only language model as its published configuration describes it."""

    name: str
    source: str
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate: PositiveInt
    vocab: PositiveInt
    max_model_len: PositiveInt
    weight_dtype: str = "bf16"
    tied_embeddings: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: PositiveInt = 2
    moe: Moe | None = None
    mla: Mla | None = None
    sliding_window: SlidingWindow | None = None
    kv_layers: PositiveInt | None = None  # layers with keys and values of their own, which the others read too; null: all
    notes: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Llm:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) is no multiple of kv_heads ({self.kv_heads})")
        if self.weight_dtype not in WEIGHT_BYTES:
            raise ValueError(f"weight_dtype: {nearest(self.weight_dtype, WEIGHT_BYTES)}")
        if self.moe and self.moe.dense_layers > self.layers:
            raise ValueError("moe.dense_layers exceeds layers")
        if self.sliding_window and self.sliding_window.layers > self.layers:
            raise ValueError("sliding_window.layers exceeds layers")
        if self.kv_layers is not None and (self.kv_layers > self.layers or self.mla or self.sliding_window):
            raise ValueError("kv_layers exceeds layers, or is combined with mla or sliding_window")
        return self

    # -- sharding -------------------------------------------------------------------------------------------------

    def tensor_parallel_problem(self, tensor_parallel: int) -> str:
        """Return why the heads cannot be split over ``tensor_parallel`` GPUs, or an empty string when they can."""
        if tensor_parallel < 1:
            return "must be at least 1"
        if self.heads % tensor_parallel:
            return f"does not divide the {self.heads} attention heads of {self.name}"
        if self.mla is None and self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            return f"neither divides nor is a multiple of the {self.kv_heads} KV heads of {self.name}"
        return ""

    def check_tensor_parallel(self, tensor_parallel: int, where: str) -> None:
        """Raise InputError naming ``where`` when the heads cannot be split over ``tensor_parallel`` GPUs."""
        problem = self.tensor_parallel_problem(tensor_parallel)
        if problem:
            fitting = [str(n) for n in range(1, self.heads + 1) if not self.tensor_parallel_problem(n)]
            raise InputError(where, f"{tensor_parallel} {problem}", f"choose from: {', '.join(fitting)}")

    def kv_heads_per_gpu(self, tensor_parallel: int = 1) -> int:
        """KV heads that each GPU holds: at least one, so beyond kv_heads GPUs they are replicated."""
        return max(1, self.kv_heads // tensor_parallel)

    @property
    def reusing_layers(self) -> int:
        """Layers that read the keys and values of an earlier one and project none."""
        return 0 if self.kv_layers is None else self.layers - self.kv_layers

    # -- parts ----------------------------------------------------------------------------------------------------

    @property
    def moe_layers(self) -> int:
        return self.layers - self.moe.dense_layers if self.moe else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    def attention_matrices(self, tensor_parallel: int = 1) -> tuple[Matrix, ...]:
        """Projections of one attention layer, per GPU. Down-projections of MLA are replicated, the rest is split."""
        heads = self.heads // tensor_parallel
        if self.mla is None:
            qkv = (heads + 2 * self.kv_heads_per_gpu(tensor_parallel)) * self.head_dim
            return Matrix("qkv", self.hidden, qkv), Matrix("o", heads * self.head_dim, self.hidden)
        mla = self.mla
        key_dim = mla.nope_dim + mla.rope_dim
        latent = mla.kv_lora_rank + mla.rope_dim
        if mla.q_lora_rank:
            query = (Matrix("qkv", self.hidden, mla.q_lora_rank + latent), Matrix("q_up", mla.q_lora_rank, heads * key_dim))
        else:
            query = (Matrix("qkv", self.hidden, heads * key_dim + latent),)
        return (
            *query,
            Matrix("kv_up", mla.kv_lora_rank, heads * (mla.nope_dim + mla.v_dim)),
            Matrix("o", heads * mla.v_dim, self.hidden),
        )

    def mlp_matrices(self, intermediate: int, tensor_parallel: int = 1) -> tuple[Matrix, ...]:
        """Up (and gate) and down projections of a feed-forward block of width ``intermediate``, per GPU."""
        share = -(-intermediate // tensor_parallel)
        return Matrix("gate_up", self.hidden, share * (2 if self.gated_mlp else 1)), Matrix("down", share, self.hidden)

    def parameters(self) -> Parameters:
        """Return parameter counts by part."""
        attention = self._attention_weights(1)
        if self.qkv_bias:
            attention += (self.layers * self.heads + (self.layers - self.reusing_layers) * 2 * self.kv_heads) * self.head_dim
        mlp = self.dense_layers * sum(m.weights for m in self.mlp_matrices(self.intermediate))
        norms = (self.norms_per_layer * self.layers + 1) * self.hidden + (2 * self.head_dim * self.layers if self.qk_norm else 0)
        embedding = self.vocab * self.hidden
        head = 0 if self.tied_embeddings else embedding
        expert = shared = router = 0
        per_token = 0
        if self.moe:
            one = sum(m.weights for m in self.mlp_matrices(self.moe.expert_intermediate))
            expert = self.moe_layers * self.moe.experts * one
            per_token = self.moe_layers * self.moe.experts_per_token * one
            shared = self.moe_layers * self._shared_weights(1)
            router = self.moe_layers * self.moe.experts * self.hidden
        active = attention + mlp + per_token + shared + router + norms + (head or embedding)
        return Parameters(embedding, attention, mlp, expert, shared, router, norms, head, active)

    def _attention_weights(self, tensor_parallel: int) -> int:
        """Of all layers, per GPU."""
        unused = self.reusing_layers * 2 * self.kv_heads_per_gpu(tensor_parallel) * self.head_dim * self.hidden
        return self.layers * sum(m.weights for m in self.attention_matrices(tensor_parallel)) - unused

    def _shared_weights(self, tensor_parallel: int) -> int:
        width = self.moe.shared_intermediate if self.moe else 0
        return sum(m.weights for m in self.mlp_matrices(width, tensor_parallel)) if width else 0

    # -- bytes ----------------------------------------------------------------------------------------------------

    def dtype_of_weights(self, dtype: str | None = None) -> str:
        """Return the dtype of the linear layers: ``dtype`` if given, else the checkpoint's. Raises InputError."""
        return _known(dtype or self.weight_dtype, WEIGHT_BYTES, "weight_dtype")

    def dtype_of_experts(self, dtype: str | None = None) -> str:
        """Return the dtype of the routed experts: an explicit ``dtype`` wins over the checkpoint's own."""
        own = self.moe.expert_dtype if self.moe else None
        return self.dtype_of_weights(dtype or own)

    def weight_bytes(self, dtype: str | None = None, tensor_parallel: int = 1) -> int:
        """Bytes of weights on each GPU. Embedding, LM head, norms and router stay at bf16, as quantised checkpoints keep them."""
        self.check_tensor_parallel(tensor_parallel, "tensor_parallel")
        linear = WEIGHT_BYTES[self.dtype_of_weights(dtype)]
        parts = self.parameters()
        attention = self._attention_weights(tensor_parallel)
        mlp = self.dense_layers * sum(m.weights for m in self.mlp_matrices(self.intermediate, tensor_parallel))
        shared = self.moe_layers * self._shared_weights(tensor_parallel)
        vocabulary = (parts.embedding + parts.head) // tensor_parallel
        plain = 2 * (vocabulary + parts.norms + parts.router)
        experts = WEIGHT_BYTES[self.dtype_of_experts(dtype)] * parts.experts / tensor_parallel
        return int(linear * (attention + mlp + shared) + experts) + plain

    def kv_bytes_per_token(self, kv_dtype: str = "bf16", tensor_parallel: int = 1) -> int:
        """Bytes of KV cache per token on each GPU: 2 x KV layers x max(1, kv_heads/TP) x head_dim x bytes; MLA: the latent."""
        size = KV_BYTES[_known(kv_dtype, KV_BYTES, "kv_dtype")]
        if self.mla:
            return int(self.layers * (self.mla.kv_lora_rank + self.mla.rope_dim) * size)
        return int(2 * (self.layers - self.reusing_layers) * self.kv_heads_per_gpu(tensor_parallel) * self.head_dim * size)


def _known(dtype: str, table: dict[str, float], what: str) -> str:
    if dtype not in table:
        raise InputError(what, f"unknown dtype '{dtype}'", nearest(dtype, table))
    return dtype
