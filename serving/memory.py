"""The memory model: what a GPU holds beside the KV cache, and how many KV blocks are left.

KV bytes = total x memory fraction - weights - activation peak - non-torch - graphs, as vLLM sizes its pool. Every term can
be given as measured; the rest is computed from the language model's shape. GiB = 2^30 bytes, per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.catalog import Gpu
from serving.errors import InputError
from serving.layout import Layout
from serving.llm import Llm

GIB = 2**30
MOST_GIB = 1_000_000_000  # an EiB: no GPU is near, and sums stay exact
RESERVED_BLOCKS = 1  # the null block: padding writes there, no sequence owns it


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What fits on each GPU of a replica. ``binding_limit`` is empty when everything fits, else 'limit: reason'."""

    weights_gib: float
    activation_gib: float
    non_torch_gib: float
    graphs_gib: float
    kv_gib: float
    kv_bytes_per_token: int
    blocks: int  # the reserved one included
    block_tokens: int
    kv_tokens: int  # blocks x block_tokens
    max_concurrency: float  # sequences of max_model_len that the pool holds, as vLLM prints it
    fits: bool
    binding_limit: str

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences can own."""
        return max(0, self.blocks - RESERVED_BLOCKS)


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that ``tokens`` tokens occupy."""
    return -(-tokens // block_tokens)


def blocks_in(kv_bytes: float, block_tokens: int, kv_bytes_per_token: int) -> int:
    """Whole blocks that ``kv_bytes`` hold, the reserved one included; 0 when there is nothing."""
    return max(0, int(kv_bytes // (block_tokens * kv_bytes_per_token)))


def activation_bytes(llm: Llm, *, tensor_parallel: int, max_batch_tokens: int, max_batch_seqs: int) -> int:
    """Peak of activations at the largest step: hidden states and the widest feed-forward intermediate of every token at
    bf16, or the logits of every sequence as bf16 and fp32 with the sampler's fp32 copy, whichever is larger.
    """
    width = llm.intermediate
    if llm.moe:
        routed = llm.moe.experts_per_token * llm.moe.expert_intermediate + llm.moe.shared_intermediate
        width = max(routed, llm.intermediate if llm.moe.dense_layers else 0)
    layer = max_batch_tokens * (4 * llm.hidden + 3 * width // tensor_parallel) * 2
    logits = max_batch_seqs * llm.vocab * (2 + 4 + 4)
    return max(layer, logits)


def kv_capacity(
    llm: Llm,
    gpu: Gpu,
    *,
    tensor_parallel: int = 1,
    layout: Layout | None = None,
    memory_fraction: float = 0.9,
    block_tokens: int = 16,
    max_model_len: int | None = None,
    max_batch_tokens: int = 2048,
    max_batch_seqs: int = 256,
    weight_dtype: str | None = None,
    kv_dtype: str = "bf16",
    weights_gib: float | None = None,
    activation_gib: float | None = None,
    non_torch_gib: float | None = None,
    graphs_gib: float = 0.0,
    gpu_gib: float | None = None,
    blocks: int | None = None,
    where: str = "kv_cache",
) -> KvCapacity:
    """Return what one replica's GPUs hold; a shortage is a value (``fits``, ``binding_limit``), not an error.

    ``layout`` replaces ``tensor_parallel`` where a replica is more than one group of GPUs; the fullest GPU then decides.
    ``max_model_len`` None takes the language model's own. ``blocks`` overrides the pool that the memory would give.
    Graph memory defaults to none because vLLM captures graphs after sizing the pool, outside ``memory_fraction``.
    Raises InputError for values out of range and for a tensor-parallel degree that does not divide the heads.
    """
    layout = layout or Layout(tensor_parallel=tensor_parallel)
    layout.check(llm)
    tensor_parallel = layout.tensor_parallel
    length = llm.max_model_len if max_model_len is None else max_model_len
    _check_ranges(
        where, memory_fraction,
        {"block_tokens": block_tokens, "max_model_len": length, "blocks": 1 if blocks is None else blocks},
        {"weights_gib": weights_gib, "activation_gib": activation_gib, "non_torch_gib": non_torch_gib, "graphs_gib": graphs_gib,
         "gpu_gib": gpu_gib},
    )  # fmt: skip
    weights = _gib(weights_gib, layout.weight_bytes(llm, weight_dtype))
    activation = _gib(activation_gib, activation_bytes(
        llm, tensor_parallel=tensor_parallel, max_batch_tokens=max_batch_tokens, max_batch_seqs=max_batch_seqs))  # fmt: skip
    non_torch = _gib(non_torch_gib, gpu.host.non_torch_bytes(tensor_parallel))
    total = _gib(gpu_gib, gpu.total_memory_bytes)
    per_token = layout.kv_bytes_per_token(llm, kv_dtype)
    left = total * memory_fraction - weights - activation - non_torch - graphs_gib
    held = blocks_in(left * GIB, block_tokens, per_token) if blocks is None else blocks
    pool = left if blocks is None else blocks * block_tokens * per_token / GIB
    limit = _binding_limit(left, pool, total, memory_fraction, weights, held, block_tokens, length)
    tokens = held * block_tokens
    return KvCapacity(weights, activation, non_torch, graphs_gib, pool, per_token, held, block_tokens, tokens,
                      tokens / length, not limit, limit)  # fmt: skip


def _check_ranges(where: str, fraction: float, counts: dict[str, int], given_gib: dict[str, float | None]) -> None:
    if not 0 < fraction <= 1:
        raise InputError(f"{where}.memory_fraction", "must lie in (0, 1]", f"got {fraction}")
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{where}.{name}", "must be at least 1", f"got {value}")
    for name, amount in given_gib.items():
        if amount is not None and not (0 <= amount <= MOST_GIB):
            raise InputError(f"{where}.{name}", f"must be a number of GiB that is not negative and at most {MOST_GIB:,}", f"got {amount}")


def check_capacity(capacity: KvCapacity, where: str) -> None:
    """Raise InputError naming ``where`` when ``capacity`` does not fit."""
    if not capacity.fits:
        limit, reason = capacity.binding_limit.split(": ", 1)
        raise InputError(where, f"does not fit: {reason}", f"the limit is {limit}")


def _binding_limit(left: float, pool: float, total: float, fraction: float, weights: float, held: int,
                   block_tokens: int, length: int) -> str:  # fmt: skip
    if pool > left + 1e-9 and left >= 0:
        return f"blocks: the pool of {pool:.2f} GiB exceeds the {left:.2f} GiB that are left"
    if left <= 0:
        return (f"gpu_memory: weights of {weights:.2f} GiB, activations and the rest exceed {fraction:g} of {total:.2f} GiB "
                f"by {-left:.2f} GiB, nothing is left for KV")  # fmt: skip
    needed = blocks_for(length, block_tokens)
    usable = held - RESERVED_BLOCKS
    if needed > usable:
        return (f"max_model_len: a sequence of {length} tokens needs {needed} blocks, the pool has {max(0, usable)} "
                f"({max(0, usable) * block_tokens} tokens, {pool:.2f} GiB)")  # fmt: skip
    return ""


def _gib(given: float | None, computed_bytes: float) -> float:
    return computed_bytes / GIB if given is None else given
