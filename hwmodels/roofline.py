"""The roofline latency model: operator costs of ``hwmodels.operators`` folded into a few cached coefficients per step.

A decode step is min(a + b C, a' + b' C), C the sum of contexts; the second line binds only where some layers have a sliding
window. A mixed step adds a closed form per prefill chunk. So a step costs a dictionary look-up and a few float operations,
and a run of steps does exactly the same operations in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hwmodels.group_links import GroupLinks, by_library
from hwmodels.latency import check_options
from hwmodels.operators import ACTIVATION_BYTES, Cost, Operators
from hwmodels.patterns import ring_attention_s
from hwmodels.pipeline import Pipeline, check_pipeline
from hwmodels.two_streams import Stream, overlapped_s
from serving.catalog import Gpu
from serving.errors import InputError, nearest
from serving.graph_buckets import GraphBuckets, Path, default_sizes
from serving.layout import Layout
from serving.llm import KV_BYTES, Llm
from serving.plan import StepShape

PIECEWISE_LAUNCHES_PER_LAYER = 3  # a mixed step replays one graph per layer and launches attention and its cache write around it


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``latency: {name: roofline, ...}``. None: the constant of the GPU's host entry."""

    capture_sizes: tuple[int, ...] | None = None  # sizes of captured CUDA graphs; None: the default list up to capture_largest
    capture_largest: int = 512
    capture_mixed: bool = True  # mixed steps replay graphs piecewise; False: they run eagerly
    host_step_s: float | None = None
    host_sequence_s: float | None = None
    launch_s: float | None = None
    graph_launch_s: float | None = None
    stream_contention: float = 0.2  # share of the possible overlap of two streams that is lost (an assumption: measure it)
    all_reduce: str = "kernels"  # kernels: the engine's own where they are quicker; library: as engines that may not use them
    ring_overlap: bool = True  # on a ring, a block of keys and values travels while the one before is computed
    schedule: str = "steady"  # of pipeline stages: steady (the next step's micro-batches follow at once) or flush
    micro_batches: int | None = None  # of a pipeline; None: as many as stages
    kv_reread_from_cache: float = 0.0  # share of a layer's reads of another layer's KV entries that the GPU's L2 answers


class DecodeLine(NamedTuple):
    """A decode step of one batch size: max(floor, min(a + b C, a_window + b_window C)) + host."""

    a: float
    b: float
    a_window: float
    b_window: float
    floor: float
    host: float


class Roofline:
    """Prices steps of one replica. Caches grow with the distinct token counts and batch sizes seen, nothing else."""

    def __init__(self, operators: Operators, options: Options, graphs: GraphBuckets) -> None:
        host = operators.gpu.host
        self.graphs = graphs
        self._operators = operators
        self._capture_mixed = options.capture_mixed
        self._overlap = options.ring_overlap
        self._contention = options.stream_contention
        self._occupied: dict[tuple[int, int], tuple[float, float]] = {}  # compute and memory seconds by (tokens, logits rows)
        self._host_step_s = _either(options.host_step_s, host.step_s)
        self._host_sequence_s = _either(options.host_sequence_s, host.sequence_s)
        self._launch_s = _either(options.launch_s, host.launch_s)
        self._graph_launch_s = _either(options.graph_launch_s, host.graph_launch_s)
        window = operators.llm.sliding_window
        self._window = window.tokens if window else 0
        layout = operators.layout
        self._groups = layout.data  # that attend to sequences of their own
        self._ring = layout.ring  # ranks that share every sequence
        self._spread = layout.data > 1 or layout.ring > 1
        self._uneven = self._spread or self._window > 0  # chunks need more than the plain sum
        terms = operators.chunk_terms()
        layers = operators.llm.layers
        self._per_token = terms.per_token * layers
        self._per_context = terms.per_context * layers
        self._per_pair = terms.per_pair * layers
        self._decode: dict[int | tuple[int, int], DecodeLine] = {}
        self._decode_attention: dict[int | tuple[int, int], tuple[float, float, float, float]] = {}
        self._mixed: dict[int | tuple[int, int], tuple[float, float]] = {}
        self._head: dict[int, float] = {0: 0.0}

    @property
    def operators(self) -> Operators:
        """What it adds up."""
        return self._operators

    # -- the protocol ---------------------------------------------------------------------------------------------

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step. In a decode-only step every sequence samples, so ``logits_rows`` is not consulted."""
        decodes = shape.decodes
        queries = shape.query_tokens_per_decode
        key = decodes if queries == 1 else (decodes, queries)
        chunks = shape.chunks
        if not chunks:
            try:
                a, b, a_window, b_window, floor, host = self._decode[key]
            except KeyError:
                a, b, a_window, b_window, floor, host = self._decode_line(decodes, queries)
            context = shape.decode_context_tokens
            seconds = a + b * context
            bounded = a_window + b_window * context
            if bounded < seconds:
                seconds = bounded
            return (seconds if seconds > floor else floor) + host
        if shape.streams == 2 and decodes:
            return self._two_streams_s(shape)
        tokens = decodes * queries
        if self._uneven:
            tokens, seconds = self._uneven_chunks(chunks, tokens)
        else:
            seconds = 0.0
            for new, before in chunks:
                tokens += new
                seconds += new * (self._per_token + self._per_pair * (before + 0.5 * (new + 1))) + (before + new) * self._per_context
        if decodes:
            try:
                a, b, a_window, b_window = self._decode_attention[key]
            except KeyError:
                a, b, a_window, b_window = self._attention_line(decodes, queries)
            context = shape.decode_context_tokens
            attention = a + b * context
            bounded = a_window + b_window * context
            seconds += bounded if bounded < attention else attention
        try:
            base, floor = self._mixed[tokens]
        except KeyError:
            base, floor = self._mixed_base(tokens)
        try:
            head = self._head[shape.logits_rows]
        except KeyError:
            head = self._head_s(shape.logits_rows)
        seconds += base + head
        return (seconds if seconds > floor else floor) + self._host_step_s + self._host_sequence_s * (decodes + len(chunks))

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """Seconds of ``steps`` successive decode steps; each does the float operations of ``step_s`` in the same order."""
        decodes, queries = shape.decodes, shape.query_tokens_per_decode
        key = decodes if queries == 1 else (decodes, queries)
        a, b, a_window, b_window, floor, host = self._decode.get(key) or self._decode_line(decodes, queries)
        first = shape.decode_context_tokens
        contexts = range(first, first + steps * decodes, decodes) if decodes else [first] * steps
        if not self._window and floor <= a:
            return [a + b * context + host for context in contexts]
        return [max(floor, min(a + b * context, a_window + b_window * context)) + host for context in contexts]

    # -- what a record or a report asks for -----------------------------------------------------------------------

    def path(self, shape: StepShape) -> tuple[int, Path]:
        """Return (tokens executed after padding, graph or eager)."""
        tokens = shape.decodes * shape.query_tokens_per_decode + sum(new for new, _ in shape.chunks)
        return self.graphs.path(tokens) if self._capture_mixed or not shape.chunks else (tokens, "eager")

    def describe(self, shape: StepShape) -> dict[str, Any]:
        """Return the seconds of a step by operator and by side (compute, memory, launch, link, host) and the side that binds.

        Keys: ``seconds``, ``operators`` {name: {seconds, side}}, ``sides`` {side: seconds}, ``bottleneck``, ``path``,
        ``executed_tokens``. The operators and the host add up to ``seconds``, the value of ``step_s``.
        """
        executed, path = self.path(shape)
        costs = self._step_costs(shape, executed)
        sides = dict.fromkeys(("compute", "memory", "launch", "link", "host"), 0.0)
        for cost in costs.values():
            if not cost.overlapped:
                sides["compute"] += cost.compute_s
                sides["memory"] += cost.memory_s
            else:
                work = "compute" if cost.compute_s > cost.memory_s else "memory"
                sides[work] += max(cost.compute_s, cost.memory_s)
            sides["launch"] += cost.launch_s
            sides["link"] += cost.link_s
        seconds = self.step_s(shape)
        sequences = shape.decodes + len(shape.chunks)
        sides["host"] = self._host_step_s + self._host_sequence_s * sequences
        operators = {name: {"seconds": cost.seconds, "side": cost.side} for name, cost in costs.items()}
        waiting = seconds - sides["host"] - sum(cost.seconds for cost in costs.values())
        if abs(waiting) > 1e-12:  # the graph's own launch, or the host launching kernels slower than the device runs them
            operators["launch"] = {"seconds": waiting, "side": "launch"}
            sides["launch"] += waiting
        return {"seconds": seconds, "operators": operators, "sides": sides, "bottleneck": max(sides, key=sides.__getitem__),
                "path": path, "executed_tokens": executed}  # fmt: skip

    def _step_costs(self, shape: StepShape, executed: int) -> dict[str, Cost]:
        operators = self._operators
        if not shape.chunks and not shape.decodes:
            return {}
        costs = operators.dense(executed, executed * self._groups)
        rows = shape.logits_rows if shape.chunks else shape.decodes * shape.query_tokens_per_decode
        if rows:
            costs |= operators.head(-(-rows // self._groups))
        if shape.chunks:
            costs["prefill_attention"] = self._prefill_cost(shape.chunks)
        if shape.decodes:
            a, b, a_window, b_window = self._attention_line(shape.decodes, shape.query_tokens_per_decode)
            context = shape.decode_context_tokens
            seconds = min(a + b * context, a_window + b_window * context)
            terms = operators.decode_terms(shape.decodes, shape.query_tokens_per_decode, operators.llm.layers)
            launch = operators.gpu.kernels.decode_attention.latency_s * operators.llm.layers
            busy = seconds - launch
            costs["decode_attention"] = Cost(busy if terms.compute_bound else 0.0, 0.0 if terms.compute_bound else busy, launch)
        return costs

    def _prefill_cost(self, chunks: Iterable[tuple[int, int]]) -> Cost:
        compute = memory = 0.0
        for new, before in chunks:
            pairs, context = self._reach(new, before)
            compute += pairs * self._per_pair
            memory += new * self._per_token + context * self._per_context
        fit = self._operators.gpu.kernels.prefill_attention
        return Cost(compute, memory, fit.latency_s * self._operators.llm.layers, overlapped=False)

    # -- two streams ----------------------------------------------------------------------------------------------

    def _two_streams_s(self, shape: StepShape) -> float:
        """A step whose decodes run beside its prefill chunks; the host prepares and launches one after the other."""
        decodes, queries, chunks = shape.decodes, shape.query_tokens_per_decode, shape.chunks
        decoding = StepShape((), decodes, shape.decode_context_tokens, decodes * queries, queries)
        prefilling = StepShape(tuple(chunks), logits_rows=shape.logits_rows - decodes * queries)
        host_s = self._host_step_s + self._host_sequence_s * (decodes + len(chunks))
        seconds = overlapped_s(self._stream(decoding), self._stream(prefilling), self._contention)
        return seconds + host_s

    def _stream(self, shape: StepShape) -> Stream:
        sequences = shape.decodes + len(shape.chunks)
        tokens = shape.decodes * shape.query_tokens_per_decode + sum(new for new, _ in shape.chunks)
        key = (tokens, shape.logits_rows)
        if key not in self._occupied:
            own = -(-tokens // self._groups)
            costs = (*self._operators.dense(own, tokens).values(), *self._operators.head(-(-shape.logits_rows // self._groups)).values())
            self._occupied[key] = sum(cost.compute_s for cost in costs), sum(cost.memory_s for cost in costs)
        compute_s, memory_s = self._occupied[key]
        if shape.chunks:
            attention = self._prefill_cost(shape.chunks)
            compute_s, memory_s = compute_s + attention.compute_s, memory_s + attention.memory_s
        else:
            a, b, a_window, b_window = self._attention_line(shape.decodes, shape.query_tokens_per_decode)
            memory_s += min(a + b * shape.decode_context_tokens, a_window + b_window * shape.decode_context_tokens)
        seconds = self.step_s(shape) - self._host_step_s - self._host_sequence_s * sequences
        return Stream(seconds, compute_s, memory_s)

    # -- coefficients, computed once each -------------------------------------------------------------------------

    def _decode_line(self, decodes: int, queries: int) -> DecodeLine:
        key = decodes if queries == 1 else (decodes, queries)
        if not decodes:
            line = DecodeLine(0.0, 0.0, math.inf, 0.0, 0.0, self._host_step_s)
        else:
            tokens = -(-decodes // self._groups) * queries  # of the fullest attention group
            executed, path = self.graphs.path(tokens)
            dense = self._operators.dense(executed, executed * self._groups).values()
            head = self._operators.head(tokens).values()
            a, b, a_window, b_window = self._attention_line(decodes, queries)
            base = sum(cost.seconds for cost in dense) + sum(cost.seconds for cost in head)
            kernels = sum(cost.kernels for cost in (*dense, *head)) + self._operators.llm.layers
            floor = 0.0 if path == "graph" else kernels * self._launch_s
            base += self._graph_launch_s if path == "graph" else 0.0
            host = self._host_step_s + self._host_sequence_s * decodes
            line = DecodeLine(a + base, b, a_window + base, b_window, floor, host)
        self._decode[key] = line
        return line

    def _attention_line(self, decodes: int, queries: int) -> tuple[float, float, float, float]:
        """Decode attention as (a, b) with every layer seeing the whole context and (a', b') with windowed layers full."""
        key = decodes if queries == 1 else (decodes, queries)
        operators = self._operators
        fullest = -(-decodes // self._groups)
        merge_s = operators.merge_ring_s(decodes, queries)
        whole = operators.decode_terms(fullest, queries, operators.llm.layers)
        if self._window:
            full = operators.decode_terms(fullest, queries, operators.full_layers)
            windowed = operators.decode_terms(fullest, queries, operators.windowed_layers)
            capped = full.fixed + windowed.fixed + windowed.per_context * decodes * self._window
            line = (whole.fixed + merge_s, whole.per_context, capped + merge_s, full.per_context)
        else:
            line = (whole.fixed + merge_s, whole.per_context, math.inf, 0.0)
        self._decode_attention[key] = line
        return line

    def _mixed_base(self, tokens: int | tuple[int, int]) -> tuple[float, float]:
        """Return (seconds that depend on the token count only, seconds the host needs to launch) of a step with chunks."""
        own, routed = tokens if isinstance(tokens, tuple) else (tokens, tokens)
        executed, path = self.graphs.path(own) if self._capture_mixed else (own, "eager")
        costs = self._operators.dense(executed, max(routed, executed)).values()
        layers = self._operators.llm.layers
        base = sum(cost.seconds for cost in costs) + self._operators.gpu.kernels.prefill_attention.latency_s * layers
        if path == "graph":
            launches = PIECEWISE_LAUNCHES_PER_LAYER * layers
        else:
            launches = sum(cost.kernels for cost in costs) + layers
        self._mixed[tokens] = base, launches * self._launch_s
        return self._mixed[tokens]

    def _head_s(self, rows: int) -> float:
        fullest = -(-rows // self._groups)
        self._head[rows] = sum(cost.seconds for cost in self._operators.head(fullest).values()) if rows else 0.0
        return self._head[rows]

    def _uneven_chunks(self, chunks: Seq[tuple[int, int]], decode_tokens: int) -> tuple[int | tuple[int, int], float]:
        """Tokens of the fullest group (with those of all groups, if there are several), and seconds of attention over ``chunks``.

        A chunk is attended to by one data-parallel group, so fewer chunks than groups leave some idle. On a ring every rank computes its
        share of a chunk while keys and values circulate.
        """
        seconds, new_tokens = 0.0, 0
        ring = self._ring
        for new, before in chunks:
            pairs, context = self._reach(new, before)
            if ring == 1:
                new_tokens += new
                seconds += pairs * self._per_pair + new * self._per_token + context * self._per_context
            else:
                new_tokens += -(-new // ring)
                seconds += self._ring_s(new, pairs, context)
        if self._groups == 1:
            return decode_tokens + new_tokens, seconds
        busy = min(self._groups, len(chunks))
        own = -(-decode_tokens // self._groups) + -(-new_tokens // busy)
        return (own, decode_tokens + new_tokens), seconds / busy

    def _ring_s(self, new: int, pairs: float, context: float) -> float:
        operators, ring = self._operators, self._ring
        share_s = (pairs * self._per_pair + new * self._per_token + context * self._per_context) / ring
        layers = operators.llm.layers
        block_bytes = context / ring * operators.llm.kv_bytes_per_token("bf16", operators.layout.head_ranks) / (layers - operators.llm.reusing_layers) * operators.kv_bytes / 2
        return layers * ring_attention_s(share_s / layers / ring, operators.links.send_s(block_bytes), ring, self._overlap)

    def _reach(self, new: int, before: int) -> tuple[float, float]:
        """Query-key pairs and context tokens of a chunk, averaged over layers with and without a window."""
        pairs, context = new * (before + 0.5 * (new + 1)), before + new
        if not self._window:
            return pairs, context
        growing = min(new, max(0, self._window - before))  # queries that see fewer than a full window
        inside = growing * (before + 0.5 * (growing + 1)) + (new - growing) * self._window
        operators = self._operators
        share = operators.windowed_layers / operators.llm.layers
        return pairs + share * (inside - pairs), context + share * (min(context, self._window + new) - context)


def build(options: Mapping[str, Any], *, llm: Llm, gpu: Gpu, layout: Layout, weight_dtype: str | None, kv_dtype: str,
          links: GroupLinks, imbalance: float, where: str) -> Roofline | Pipeline:  # fmt: skip
    """Factory of ``latency: {name: roofline}``. Raises InputError for an unknown or impossible option."""
    check_options(options, Options.__dataclass_fields__, where)
    if kv_dtype not in KV_BYTES:
        raise InputError("kv_cache.dtype", f"unknown KV dtype '{kv_dtype}'", nearest(kv_dtype, KV_BYTES))
    chosen = Options(**options)
    for name in ("host_step_s", "host_sequence_s", "launch_s", "graph_launch_s", "capture_largest"):
        value = getattr(chosen, name)
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise InputError(f"{where}.{name}", "must be a number that is not negative", f"got {value!r}")
    for name in ("stream_contention", "kv_reread_from_cache"):
        value = getattr(chosen, name)
        if not (isinstance(value, (int, float)) and 0 <= value <= 1):
            raise InputError(f"{where}.{name}", "must lie in [0, 1]", f"got {value!r}")
    sizes = chosen.capture_sizes if chosen.capture_sizes is not None else default_sizes(int(chosen.capture_largest))
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, int) for size in sizes):
        raise InputError(f"{where}.capture_sizes", "must be a list of whole numbers", f"got {sizes!r}")
    if chosen.all_reduce not in ("kernels", "library"):
        raise InputError(f"{where}.all_reduce", f"there is no all-reduce by '{chosen.all_reduce}'", nearest(str(chosen.all_reduce), ["kernels", "library"]))
    if chosen.all_reduce == "library":
        links = by_library(links, gpu)
    graphs = GraphBuckets(sizes, f"{where}.capture_sizes")
    last = layout.stages - 1
    operators = [
        Operators(part, gpu, layout, weight_dtype, kv_dtype, links, first=i == 0, last=i == last, imbalance=imbalance,
                  kv_reread_from_cache=chosen.kv_reread_from_cache)
        for i, part in enumerate(layout.stage_llms(llm))
    ]
    if not last:
        return Roofline(operators[0], chosen, graphs)
    # The host prepares a micro-batch before its first stage; the later stages get theirs ready while they wait.
    late = replace(chosen, host_step_s=0.0, host_sequence_s=0.0)
    stages = [Roofline(part, chosen if i == 0 else late, graphs) for i, part in enumerate(operators)]
    activation_bytes = llm.hidden * ACTIVATION_BYTES / layout.tensor_parallel  # each rank sends its share
    check_pipeline(chosen.schedule, chosen.micro_batches, where)
    micro_batches = chosen.micro_batches or layout.stages
    return Pipeline(stages, micro_batches, lambda tokens: links.send_s(tokens * activation_bytes), steady=chosen.schedule == "steady")


def _either(value: float | None, default: float) -> float:
    return default if value is None else value
