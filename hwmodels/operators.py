"""What each operator of a decoder step costs on one GPU of a replica: seconds by side of the roofline.

A linear layer takes latency + max(flops / (peak x ec), bytes / (bandwidth x em)); attention over prefill chunks the sum of
both sides (measured kernels do not overlap them); everything else streams bytes. Rates are the datasheet's, efficiencies and
latencies those of the GPU's kernel set. Formulas, sources and errors: docs/latency-models.md.
"""

from __future__ import annotations

from typing import NamedTuple

from hwmodels.group_links import GroupLinks
from hwmodels.parallel import expert_exchange_bytes
from serving.catalog import Gpu, KernelFit
from serving.layout import Layout
from serving.llm import KV_BYTES, WEIGHT_BYTES, Llm, Matrix

ACTIVATION_BYTES = 2  # bf16 activations
LOGIT_BYTES = 2 + 4 + 4  # a logit is written as bf16, widened to fp32 and read again by the sampler


class Cost(NamedTuple):
    """Seconds of one operator, by what they are spent on. ``kernels`` counts launches."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    link_s: float = 0.0
    kernels: int = 0
    overlapped: bool = True  # compute and memory proceed together, so the longer one counts

    @property
    def seconds(self) -> float:
        work = max(self.compute_s, self.memory_s) if self.overlapped else self.compute_s + self.memory_s
        return work + self.launch_s + self.link_s

    @property
    def side(self) -> str:
        """Which term is the largest: compute, memory, launch or link."""
        return max(("compute", self.compute_s), ("memory", self.memory_s), ("launch", self.launch_s), ("link", self.link_s),
                   key=lambda side: side[1])[0]  # fmt: skip

    def times(self, count: int) -> Cost:
        return Cost(self.compute_s * count, self.memory_s * count, self.launch_s * count, self.link_s * count,
                    self.kernels * count, self.overlapped)  # fmt: skip


class ChunkTerms(NamedTuple):
    """Prefill attention of one chunk, all layers: seconds = fixed + per_token n + per_context c + per_pair n (c + (n+1)/2)."""

    per_token: float
    per_context: float
    per_pair: float


class DecodeTerms(NamedTuple):
    """Decode attention of a batch, all layers of one kind: seconds = fixed + per_context x (sum of contexts)."""

    fixed: float
    per_context: float
    compute_bound: bool


class Operators:
    """Operator costs of one stage: an LLM (its layers in this stage) on one GPU of a layout. Stateless apart from derived constants.

    ``first`` and ``last`` stages embed and sample. ``imbalance`` is what the busiest expert rank gets over the mean.
    ``kv_reread_from_cache`` of what a layer reads of an earlier layer's KV entries does not come from memory again.
    """

    def __init__(self, llm: Llm, gpu: Gpu, layout: Layout, weight_dtype: str | None, kv_dtype: str, links: GroupLinks, *,
                 first: bool = True, last: bool = True, imbalance: float = 1.0, kv_reread_from_cache: float = 0.0) -> None:  # fmt: skip
        self.llm = llm
        self.gpu = gpu
        self.layout = layout
        self.links = links
        self.first = first
        self.last = last
        self.imbalance = imbalance
        self.kv_reread_from_cache = kv_reread_from_cache
        self.tensor_parallel = layout.tensor_parallel
        self.weight_dtype = llm.dtype_of_weights(weight_dtype)
        self.expert_dtype = llm.dtype_of_experts(weight_dtype)
        self.kv_bytes = KV_BYTES[kv_dtype]
        self.bandwidth = gpu.memory_bytes_per_s
        self.all_reduce_s = links.all_reduce_s
        self.windowed_layers = llm.sliding_window.layers if llm.sliding_window else 0
        self.full_layers = llm.layers - self.windowed_layers

    # -- linear layers --------------------------------------------------------------------------------------------

    def matmul(self, rows: float, matrix: Matrix, dtype: str, copies: float = 1.0, kernels: int = 1) -> Cost:
        """``rows`` activations (over all copies) times ``copies`` matrices of one shape, as one grouped kernel."""
        fit = self._gemm(dtype)
        flops = 2.0 * rows * matrix.inputs * matrix.outputs
        moved = copies * matrix.weights * WEIGHT_BYTES[dtype] + rows * (matrix.inputs + matrix.outputs) * ACTIVATION_BYTES
        return Cost(flops / (self.gpu.peak_flops(dtype) * fit.compute_efficiency), moved / (self.bandwidth * fit.memory_efficiency),
                    fit.latency_s * kernels, kernels=kernels)  # fmt: skip

    def _gemm(self, dtype: str) -> KernelFit:
        fits = self.gpu.kernels.gemm
        return fits.get(dtype, fits["bf16"])

    def elementwise(self, rows: float, bytes_per_row: float, kernels: int = 1) -> Cost:
        """``kernels`` passes that together move ``bytes_per_row`` for each row."""
        fit = self.gpu.kernels.elementwise
        return Cost(0.0, rows * bytes_per_row / (self.bandwidth * fit.memory_efficiency), fit.latency_s * kernels, kernels=kernels)

    def dense(self, tokens: int, routed: int | None = None) -> dict[str, Cost]:
        """All work of a step that depends on its token counts only, by operator, summed over layers.

        ``tokens`` are those of one attention group, ``routed`` (default: the same) those of all groups, whose experts are shared.
        """
        llm, size = self.llm, ACTIVATION_BYTES
        costs = {"embedding": self.elementwise(tokens, 2 * llm.hidden * size)} if self.first else {}
        own, queries = llm.layers - llm.reusing_layers, llm.heads // self.tensor_parallel
        for matrix in llm.attention_matrices(self.tensor_parallel):
            costs[matrix.name] = self.matmul(tokens, matrix, self.weight_dtype).times(own if matrix.name == "qkv" else llm.layers)
        heads = queries + llm.kv_heads_per_gpu(self.tensor_parallel)
        costs["rope_and_kv_write"] = self.elementwise(tokens, 2 * heads * llm.head_dim * size).times(own)
        if llm.reusing_layers:
            only_queries = Matrix("q", llm.hidden, queries * llm.head_dim)
            costs["q"] = self.matmul(tokens, only_queries, self.weight_dtype).times(llm.reusing_layers)
            costs["rope"] = self.elementwise(tokens, 2 * queries * llm.head_dim * size).times(llm.reusing_layers)
        costs["norms"] = self.elementwise(tokens, 4 * llm.hidden * size).times(llm.norms_per_layer * llm.layers + self.last)
        costs |= self._feed_forward(tokens, tokens if routed is None else routed)
        if self.tensor_parallel > 1:
            one = self.all_reduce_s(tokens * llm.hidden * size)
            count = 2 * llm.layers + self.first
            if self.layout.data > 1:  # experts of other groups send their part of the sum with the combining all-to-all
                count -= llm.moe_layers
            costs["all_reduce"] = Cost(link_s=one * count, kernels=count)
        if self.layout.kv_shards > 1:
            costs["merge_shards"] = self._merge_shards(tokens).times(llm.layers)
        return costs

    def _merge_shards(self, tokens: int) -> Cost:
        """Gather queries among GPUs that share the tokens of a KV head, and merge their partial softmaxes: per head an output, a
        maximum and a sum (``hwmodels.parallel.kv_shards``).
        """
        ranks, llm = self.layout.kv_shards, self.llm
        heads = llm.heads // self.layout.head_ranks
        gather = self.links.all_gather_s(tokens * heads * llm.head_dim * ACTIVATION_BYTES, ranks)
        return Cost(link_s=gather + self.links.group_all_reduce_s(tokens * heads * (llm.head_dim + 2) * ACTIVATION_BYTES, ranks), kernels=2)

    def merge_ring_s(self, decodes: int, queries: int) -> float:
        """Seconds, all layers, to merge the partial softmaxes of a decode batch over the ranks that hold its sequences in shares."""
        ranks, llm = self.layout.ring, self.llm
        if ranks == 1:
            return 0.0
        heads = llm.heads // self.tensor_parallel
        return llm.layers * self.links.ring_all_reduce_s(decodes * queries * heads * (llm.head_dim + 2) * ACTIVATION_BYTES, ranks)

    def _feed_forward(self, tokens: int, routed_tokens: int) -> dict[str, Cost]:
        llm, tp = self.llm, self.tensor_parallel
        costs: dict[str, Cost] = {}
        if llm.dense_layers:
            up, down = llm.mlp_matrices(llm.intermediate, tp)
            costs["mlp_up"] = self.matmul(tokens, up, self.weight_dtype).times(llm.dense_layers)
            costs["mlp_down"] = self.matmul(tokens, down, self.weight_dtype).times(llm.dense_layers)
            costs["activation"] = self._activation(tokens, up, down).times(llm.dense_layers)
        if llm.moe_layers:
            moe = llm.moe
            layers = llm.moe_layers
            costs["router"] = self.matmul(tokens, Matrix("router", llm.hidden, moe.experts), "bf16").times(layers)
            costs |= self._experts(routed_tokens)
            if moe.shared_intermediate:
                up, down = llm.mlp_matrices(moe.shared_intermediate, tp)
                costs["shared_up"] = self.matmul(tokens, up, self.weight_dtype).times(layers)
                costs["shared_down"] = self.matmul(tokens, down, self.weight_dtype).times(layers)
        return costs

    def _experts(self, tokens: int) -> dict[str, Cost]:
        """Routed experts: in slices on every GPU, or whole ones on the busiest of ``expert_parallel`` ranks, with their exchange."""
        llm, moe, layers = self.llm, self.llm.moe, self.llm.moe_layers
        ranks = self.layout.expert_parallel
        up, down = llm.mlp_matrices(moe.expert_intermediate, self.tensor_parallel if ranks == 1 else 1)
        routed = tokens * moe.experts_per_token * (self.imbalance / ranks)
        touched = experts_touched(tokens, moe.experts, moe.experts_per_token) / ranks
        if self.expert_dtype in self.gpu.kernels.experts:
            costs = {"experts": self._grouped_experts(routed, touched, up, down).times(layers)}
        else:
            costs = {
                "experts_up": self.matmul(routed, up, self.expert_dtype, touched).times(layers),
                "experts_down": self.matmul(routed, down, self.expert_dtype, touched).times(layers),
                "expert_activation": self._activation(routed, up, down).times(layers),
            }
        if self.layout.data > 1:
            size = expert_exchange_bytes(tokens, llm.hidden, moe.experts_per_token, ranks, ACTIVATION_BYTES) * self.imbalance
            costs["expert_exchange"] = Cost(link_s=2 * self.links.all_to_all_s(size, ranks), kernels=2).times(layers)
        return costs

    def _grouped_experts(self, rows: float, copies: float, up: Matrix, down: Matrix) -> Cost:
        """``rows`` tokens through ``copies`` experts by the measured kernel of a whole layer, whose two sides do not overlap."""
        fit, dtype = self.gpu.kernels.experts[self.expert_dtype], self.expert_dtype
        flops = 2.0 * rows * (up.weights + down.weights)
        moved = copies * (up.weights + down.weights) * WEIGHT_BYTES[dtype]
        moved += rows * (up.inputs + up.outputs + down.inputs + down.outputs) * ACTIVATION_BYTES
        return Cost(flops / (self.gpu.peak_flops(dtype) * fit.compute_efficiency), moved / (self.bandwidth * fit.memory_efficiency),
                    fit.latency_s, kernels=3, overlapped=False)  # fmt: skip

    def _activation(self, rows: float, up: Matrix, down: Matrix) -> Cost:
        return self.elementwise(rows, (up.outputs + down.inputs) * ACTIVATION_BYTES)

    def head(self, rows: int) -> dict[str, Cost]:
        """LM head and sampler over ``rows`` logits rows; the vocabulary is split and gathered under tensor parallelism."""
        if not self.last:
            return {}
        share = -(-self.llm.vocab // self.tensor_parallel)
        costs = {
            "lm_head": self.matmul(rows, Matrix("lm_head", self.llm.hidden, share), "bf16"),
            "sampler": self.elementwise(rows, self.llm.vocab * LOGIT_BYTES, kernels=2),
        }
        if self.tensor_parallel > 1:  # an all-gather moves half of what an all-reduce of the same tensor moves
            costs["gather_logits"] = Cost(link_s=self.all_reduce_s(rows * self.llm.vocab * ACTIVATION_BYTES / 2), kernels=1)
        return costs

    # -- attention ------------------------------------------------------------------------------------------------

    def chunk_terms(self) -> ChunkTerms:
        """Prefill attention per layer: flops over query-key pairs, bytes of q, k, v, o and of the context's KV."""
        fit = self.gpu.kernels.prefill_attention
        compute = 1.0 / (self.gpu.peak_flops("bf16") * fit.compute_efficiency)
        memory = 1.0 / (self.bandwidth * fit.memory_efficiency)
        heads = self.llm.heads // self.tensor_parallel
        kv_token = self._kv_bytes_per_layer()
        mla = self.llm.mla
        if mla is None:
            query_dim = value_dim = self.llm.head_dim
            expand = 0.0
        else:  # the latent of every context token is expanded to keys and values again
            query_dim, value_dim = mla.nope_dim + mla.rope_dim, mla.v_dim
            expand = 2.0 * mla.kv_lora_rank * heads * (mla.nope_dim + mla.v_dim) * compute
        per_pair = 2.0 * heads * (query_dim + value_dim) * compute
        per_token = (kv_token + heads * (query_dim + value_dim) * ACTIVATION_BYTES) * memory
        return ChunkTerms(per_token, kv_token * memory + expand, per_pair)

    def decode_terms(self, decodes: int, queries: int, layers: int) -> DecodeTerms:
        """Decode attention of ``decodes`` sequences with ``queries`` query tokens each over ``layers`` layers."""
        fit = self.gpu.kernels.decode_attention
        llm, layout = self.llm, self.layout
        heads = llm.heads // self.tensor_parallel
        units = decodes * (1 if llm.mla else llm.kv_heads_per_gpu(layout.head_ranks))
        slowdown = 1.0 + fit.half_saturation_units / units
        memory = slowdown / (self.bandwidth * fit.memory_efficiency)
        kv_token = self._kv_bytes_per_layer()
        mla = llm.mla
        dims = 2 * llm.head_dim if mla is None else 2 * mla.kv_lora_rank + mla.rope_dim  # MLA attends in the latent space
        flops = 2.0 * heads * dims * queries
        compute = flops / (self.gpu.peak_flops("bf16") * self.gpu.kernels.prefill_attention.compute_efficiency)
        fixed = fit.latency_s + decodes * queries * heads * dims * ACTIVATION_BYTES * memory
        again = max(compute, kv_token * memory * (1.0 - self.kv_reread_from_cache))  # of what the layer before may have left in the cache
        spread = layout.ring * layout.data
        slope = max(compute, kv_token * memory) / spread * (layers - llm.reusing_layers) + again / spread * llm.reusing_layers
        return DecodeTerms(fixed * layers, slope, compute > kv_token * memory)

    def _kv_bytes_per_layer(self) -> float:
        """KV bytes of a token in one layer that one GPU of a tensor-parallel group reads, tokens dealt out averaged."""
        per_token = self.llm.kv_bytes_per_token("bf16", self.layout.head_ranks) / self.layout.kv_shards
        return per_token / (self.llm.layers - self.llm.reusing_layers) * self.kv_bytes / 2


def experts_touched(tokens: float, experts: int, per_token: int) -> float:
    """Expected number of distinct experts that ``tokens`` tokens reach when each picks ``per_token`` of them evenly."""
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)
