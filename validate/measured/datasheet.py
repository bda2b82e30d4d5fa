"""The least time that a step can take on a GPU by its datasheet, computed apart from every latency model."""

from __future__ import annotations

from collections.abc import Iterator

from hwmodels.latency import LatencyModel
from serving.catalog import Gpu
from serving.llm import KV_BYTES, WEIGHT_BYTES, Llm
from serving.plan import StepShape

DECODES, CONTEXTS, CHUNKS = (1, 4, 16, 64, 256), (128, 1024, 8192), (256, 1024, 4096, 8192)


def floor_s(llm: Llm, gpu: Gpu, tensor_parallel: int, weight_dtype: str | None, kv_dtype: str, shape: StepShape) -> float:
    """Seconds of a dense LLM's step if its layers ran at peak FLOP/s or its weights and KV streamed at peak bandwidth, whichever is longer.

    Layers only: two flops a weight and token, four a query-key pair and head dimension; embedding, LM head, norms,
    activations and links are left out, so the true floor is higher.
    """
    tokens = sum(new for new, _ in shape.chunks) + shape.decodes * shape.query_tokens_per_decode
    if not tokens:
        return 0.0
    dtype = llm.dtype_of_weights(weight_dtype)
    matrices = [*llm.attention_matrices(1), *llm.mlp_matrices(llm.intermediate, 1)]
    weights = llm.layers * sum(matrix.inputs * matrix.outputs for matrix in matrices)
    pairs = sum(new * before + new * (new + 1) / 2 for new, before in shape.chunks) + shape.decode_context_tokens
    flops_s = 2 * weights * tokens / gpu.peak_flops(dtype) + 4 * llm.layers * llm.heads * llm.head_dim * pairs / gpu.peak_flops("bf16")
    kv_bytes = llm.kv_bytes_per_token("bf16", 1) * KV_BYTES[kv_dtype] / KV_BYTES["bf16"]
    context = shape.decode_context_tokens + sum(new + before for new, before in shape.chunks)
    bytes_s = (weights * WEIGHT_BYTES[dtype] + kv_bytes * context) / gpu.memory_bytes_per_s
    return max(flops_s, bytes_s) / tensor_parallel


def least_ratio(model: LatencyModel, llm: Llm, gpu: Gpu, tensor_parallel: int, weight_dtype: str | None, kv_dtype: str = "bf16") -> float:
    """The smallest of priced / datasheet over a grid of steps: below 1, the model is faster than the GPU can be."""
    return min(model.step_s(shape) / floor_s(llm, gpu, tensor_parallel, weight_dtype, kv_dtype, shape) for shape in _shapes())


def _shapes() -> Iterator[StepShape]:
    for decodes in DECODES:
        for context in CONTEXTS:
            yield StepShape((), decodes, decodes * context, decodes)
            yield StepShape(((1024, 0),), decodes, decodes * context, decodes + 1)
    for chunk in CHUNKS:
        for before in (0, *CONTEXTS):
            yield StepShape(((chunk, before),), 0, 0, 1)
