"""Executes steps on a device: prepare inputs, run the decoder by graph or eagerly, sample, return the tokens.

``launch`` issues a step and ``collect`` waits for its tokens, so that a loop may prepare the next step meanwhile; ``execute`` does both.
Scheduling, sequences and block ownership are the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.attention import geometry, load
from engine.attention_trace import AttentionTrace
from engine.block_tables import BlockTables
from engine.early_exit import EarlyExit
from engine.graphs import DecodeGraphs, StepPath, cuda_capture, plain_capture
from engine.host_pages import HostPages
from engine.inputs import InputBuffers, StepLayout
from engine.kv_cache import KvCache
from engine.logits import LogitsProcessor
from engine.lora.slots import LoraSlots
from engine.model import Decoder, DecoderWeights
from engine.ops import load_chosen, load_ops
from engine.sampling import (
    ACCEPTANCE,
    DRAFTS,
    INSTEAD,
    NOT_FINITE,
    PLAIN,
    SamplingParams,
    distribution,
    request_seeds,
    sample,
    sample_against,
    uniforms,
)
from engine.step import SequenceInput, StepInput, StepOutput, StepTimes
from serving.errors import InputError


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Sizes and choices of a runner. ``blocks`` includes the reserved block 0; ``graph_sizes`` empty runs everything eagerly.

    ``attention`` and ``ops`` None follow the device: ``triton`` on CUDA, ``torch`` on CPU. ``seed`` is for requests without their own.
    """

    blocks: int
    block_tokens: int = 16
    max_seqs: int = 256
    max_batch_tokens: int = 2048
    max_model_len: int | None = None
    graph_sizes: tuple[int, ...] = ()
    attention: str | None = None
    ops: str | None = None
    seed: int = 0
    kv_format: str | None = None  # fp8, int8 or int4; None: as the activations
    skip_experts_below: float = 0.0  # of the largest share of a token's experts: those with less are not computed
    drafts: bool = False  # it proposes for another: draws from a stream of its own and reports what it drew from


class InFlight(NamedTuple):
    """A launched step: its layout, the tokens on their way to the host, and what is known of its times."""

    layout: StepLayout
    path: StepPath
    tokens: Tensor
    errors: dict[int, str]
    marks: tuple[float, float, float, float]  # host clock: begin, prepared, launched, sampled
    events: tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event] | None  # begin, end of the computation, tokens on the host
    entropy: dict[int, float]  # of each request's last row, where attention is traced
    probabilities: dict[int, Tensor]  # that each request's last row was drawn from, where it drafts


#: The layout that stands for padding alone.
NO_STEP = StepLayout([], 0, (), 0, 1, [], np.empty(0), {})


class Runner:
    """One decoder on one device with its KV cache. Not thread-safe: one thread drives it."""

    def __init__(
        self, shape: Architecture, weights: DecoderWeights, options: RunnerOptions, trace: AttentionTrace | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None, lora: LoraSlots | None = None, exits: EarlyExit | None = None, beside: Runner | None = None,
    ) -> None:  # fmt: skip
        """Allocate the cache and all buffers. Raises InputError when the cache does not fit or a name is unknown.

        With ``trace`` every step runs eagerly and attention of one layer is recorded. ``reduce`` and ``lora``: see ``Decoder``.
        ``exits``: tokens may leave early; then too. ``beside``: use that runner's cache and block tables, so that both can run parts of one step.
        """
        device, dtype = weights.embedding.device, weights.embedding.dtype
        length = options.max_model_len or shape.max_model_len
        if length > shape.max_model_len:
            raise InputError("engine.max_model_len", f"{length} exceeds the network's {shape.max_model_len} positions")
        self.shape = shape
        self.options = options
        self.device = device
        default = "triton" if device.type == "cuda" else "torch"
        backend = load(options.attention or default, geometry(shape, options.max_seqs, device))
        self.decoder = Decoder(shape, weights, backend, load_ops(options.ops or default), reduce, lora, load_chosen(options.ops or default), options.skip_experts_below)
        if options.kv_format is not None and (options.attention or default) == "triton":
            raise InputError("kv_cache.dtype", f"the triton back end reads no {options.kv_format} pages", "use --attention torch")
        self.cache = beside.cache if beside else KvCache(shape, blocks=options.blocks, block_tokens=options.block_tokens, dtype=dtype, device=device, narrow=options.kv_format)
        self.host_pages = HostPages(self.cache)
        self.tables = beside.tables if beside else BlockTables(options.max_seqs, -(-length // options.block_tokens), device)
        self.inputs = InputBuffers(options.max_batch_tokens, options.max_seqs, options.block_tokens, len(weights.embedding), device, adapters=lora is not None)
        self._lora = lora
        self.exits = exits
        self._trace = trace
        self._last_tokens = beside._last_tokens if beside else torch.zeros(options.max_seqs + 1, dtype=torch.int32, device=device)
        self._weights_version = 0
        self._layout = NO_STEP
        self._probabilities: dict[int, Tensor] = {}
        cuda = device.type == "cuda"
        sizes = options.graph_sizes if trace is None and exits is None and (backend.capturable or not cuda) else ()
        sizes = tuple(size for size in sizes if size <= min(options.max_seqs, options.max_batch_tokens))
        self.graphs = DecodeGraphs(sizes, self._decode, self._signature, cuda_capture(device) if cuda else plain_capture)

    def beside(self) -> Runner:
        """A second way through the same network, with buffers and attention state of its own and no graphs."""
        weights = self.decoder.weights
        return Runner(self.shape, weights, replace(self.options, graph_sizes=()), self._trace, self.decoder.reduce, self._lora, self.exits, self)

    def execute(self, batch: StepInput) -> StepOutput:
        """Run one step to its end and return the sampled tokens.

        A request whose own data is at fault (a token outside the vocabulary, logits that are not finite, a failing processor) is named
        in ``errors`` and the others go on. Anything else raises, and the runner can be used again.
        """
        return self.collect(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: StepInput) -> InFlight:
        """Issue one step and return without waiting for the device. Later steps may use ``LAST_SAMPLED`` as a token."""
        begin = time.perf_counter()
        if batch.moves:
            self.host_pages.apply(batch.moves)
        for slot, name in batch.adapters:
            self._lora.put(slot, name)
        layout = self.inputs.fill(batch, self.tables)
        path = self.graphs.path(layout.decodes, len(layout.chunks))
        if path.padding:
            self.inputs.pad(layout, path.rows)
        self.inputs.send(self.tables)
        prepared = time.perf_counter()
        events = None
        if self.device.type == "cuda":
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Event())
            events[0].record()
        logits = self._forward(layout, path)
        launched = time.perf_counter()
        tokens, errors = self._sample(layout, logits)
        if events:
            events[1].record()
            tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
            events[2].record()
        entropy = {} if self._trace is None else self._trace.take_spread()
        marks = (begin, prepared, launched, time.perf_counter())
        return InFlight(layout, path, tokens, layout.errors | errors, marks, events, entropy, self._take_probabilities())

    def collect(self, step: InFlight) -> StepOutput:
        """Wait for the step's tokens and return them."""
        if step.events:
            step.events[2].synchronize()
        arrived = time.perf_counter()
        tokens: dict[int, tuple[int, ...]] = {}
        errors = dict(step.errors)
        sequences = step.layout.sequences
        for owner, token in zip(step.layout.row_owner, step.tokens.tolist()):
            request_id = sequences[owner].request_id
            if token == NOT_FINITE:
                errors.setdefault(request_id, "its logits are not finite")
            else:
                tokens[request_id] = tokens.get(request_id, ()) + (token,)
        for request_id in errors:
            tokens.pop(request_id, None)
        begin, prepared, launched, sampled = step.marks
        on_device = step.events[0].elapsed_time(step.events[1]) / 1000 if step.events else launched - prepared
        times = StepTimes(
            prepare_s=prepared - begin,
            launch_s=launched - prepared if step.events else 0.0,
            sample_s=sampled - launched,
            post_s=time.perf_counter() - arrived,
            device_s=on_device,
        )
        return StepOutput(tokens, step.path, times, errors, step.probabilities, step.entropy)

    def warm_up(self) -> None:
        """Capture all graphs now rather than at first use."""
        self._layout = NO_STEP
        self.inputs.device["context"].fill_(1)  # the other buffers hold zeros or an older step's inputs: all valid as padding
        with torch.inference_mode():
            self.graphs.capture_all()

    def weights_changed(self) -> None:
        """Say that weight tensors were replaced: graphs hold the old addresses and are captured again at their next use."""
        self._weights_version += 1

    def _forward(self, layout: StepLayout, path: StepPath) -> Tensor:
        """Return the logits of the sampled rows, [R, vocab]."""
        self._layout = layout
        if not layout.sequences:
            return torch.empty(0, self.shape.vocab, dtype=self.cache.keys[0].dtype, device=self.device)
        selected = self.inputs.device["selected"][: len(layout.row_owner)]
        if path.kind == "graph":
            return self.graphs.replay(path.rows).index_select(0, selected)
        self.graphs.stats.eager += 1
        hidden = self._hidden(layout, layout.decodes)
        return self.decoder.logits(hidden.index_select(0, selected))

    def _hidden(self, layout: StepLayout, decodes: int, *, recorded: bool = False) -> Tensor:
        batch = self.inputs.attention_batch(layout, self.tables.table, decodes, recorded=recorded)
        view, count = self.inputs.device, batch.slots.shape[0]
        tokens = view["tokens"][:count]
        # Each token's own sequence remembers its last sampled token; only decodes may ask for it.
        asked = self._last_tokens[batch.rows[:decodes].long()]
        tokens = torch.cat((torch.where(tokens[:decodes] < 0, asked, tokens[:decodes]), tokens[decodes:]))
        if self.exits is not None:
            return self.exits.forward(self.decoder, tokens, view["positions"][:count], batch, self.cache)
        observe = self._trace.observer(batch, self.cache, layout) if self._trace else None
        return self.decoder.forward(tokens, view["positions"][:count], batch, self.cache, observe)

    def _decode(self, rows: int) -> Tensor:
        """Return the logits of ``rows`` decodes from the static buffers: what a graph records."""
        return self.decoder.logits(self._hidden(self._layout, rows, recorded=True))

    def _signature(self, rows: int) -> tuple:
        pages, table = self.cache.keys[0], self.tables.table
        return rows, pages.data_ptr(), tuple(pages.shape), pages.dtype, table.data_ptr(), self._weights_version

    def _sample(self, layout: StepLayout, logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        rows = len(layout.row_owner)
        if not rows:
            return torch.empty(0, dtype=torch.int64), {}
        owners = [layout.sequences[owner] for owner in layout.row_owner]
        params = [seq.sampling for seq in owners]
        errors: dict[int, str] = {}
        if any(p.processors for p in params):
            view = self.inputs.device
            selected = view["selected"][:rows].long()
            last = view["tokens"][selected]
            last = torch.where(last < 0, self._last_tokens[view["rows"][layout.row_owner].long()], last).long()
            logits, failed = apply_processors(logits, last, params)
            errors = {owners[row].request_id: reason for row, reason in failed.items()}
        draws = np.zeros(rows)
        drawn = any(p.temperature > 0 for p in params)
        if drawn:
            seeds = request_seeds(self.options.seed, [seq.request_id for seq in owners], [p.seed for p in params])
            draws = uniforms(seeds, layout.row_positions, DRAFTS if self.options.drafts else PLAIN)
        tokens = sample(logits, params, draws)
        if drawn and self.options.drafts:
            self._report(logits, owners)
        if drawn and any(seq.drafted is not None for seq in layout.sequences):
            verify_drawn(tokens, logits, layout, seeds)
        targets = self.inputs.device["targets"][:rows].long()
        self._last_tokens[targets] = tokens.clamp(min=0).to(torch.int32)
        return tokens, errors


    def _report(self, logits: Tensor, owners: list[SequenceInput]) -> None:
        for row, seq in enumerate(owners):
            if seq.sampling.temperature > 0:
                self._probabilities[seq.request_id] = distribution(logits[row : row + 1], [seq.sampling])[0]

    def _take_probabilities(self) -> dict[int, Tensor]:
        taken, self._probabilities = self._probabilities, {}
        return taken


def verify_drawn(tokens: Tensor, logits: Tensor, layout: StepLayout, seeds: np.ndarray) -> None:
    """Put rejection sampling's choice into those rows of ``tokens`` whose draft was drawn from known probabilities; ``seeds`` are by row."""
    rows, drafts, proposed, first = [], [], [], 0
    for seq in layout.sequences:
        if seq.drafted is not None and seq.sampling.temperature > 0:
            rows += range(first, first + len(seq.tokens) - 1)
            drafts += seq.tokens[1:]
            proposed.append(seq.drafted)
        first += seq.sampled_rows
    if not rows:
        return
    index = torch.tensor(rows, device=logits.device)
    params = [layout.sequences[layout.row_owner[row]].sampling for row in rows]
    draws, instead = (uniforms(seeds[rows], layout.row_positions[rows], stream) for stream in (ACCEPTANCE, INSTEAD))
    chosen = sample_against(logits[index], params, torch.tensor(drafts, device=logits.device), torch.cat(proposed).to(logits.device), draws, instead)
    tokens[index] = torch.where(tokens[index] == NOT_FINITE, NOT_FINITE, chosen)


def apply_processors(logits: Tensor, last_tokens: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, dict[int, str]]:
    """Apply each row's processors in order; rows with equal processors go together. Returns new logits and the rows that failed, with reasons."""
    logits = logits.clone()
    groups: dict[tuple[LogitsProcessor, ...], list[int]] = {}
    for row, p in enumerate(params):
        if p.processors:
            groups.setdefault(p.processors, []).append(row)
    failed: dict[int, str] = {}
    for processors, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        try:
            changed = logits[index]
            for process in processors:
                changed = process(changed, last_tokens[index])
            logits[index] = changed.to(logits.dtype)
        except Exception as error:  # a third party's code: whatever it raises is that request's failure, not the batch's
            failed |= {row: f"a logits processor failed: {type(error).__name__}: {error}" for row in rows}
    return logits, failed
