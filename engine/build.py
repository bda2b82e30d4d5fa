"""From a scenario to an engine: the device, the weights, and a KV pool as large as the measured memory allows."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.architecture import Architecture, from_llm
from engine.attention_trace import AttentionTrace
from engine.clocks import NormalisedClock
from engine.drafting.build import drafter_of, proposer_of, share_of_pages
from engine.early_exit import EarlyExit, load_gates, random_gates
from engine.images import with_images
from engine.kv_formats import FORMATS
from engine.loader import load, random_weights
from engine.lora.slots import AdapterStore, LoraSlots
from engine.model import DecoderWeights
from engine.ops import load_chosen
from engine.ranks import RankedRunner, Recipe
from engine.run import Engine, check_servable, longest_sequence
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from engine.two_streams import TwoStreams
from serving.catalog import Gpu, load_gpu, load_llm
from serving.errors import InputError, nearest
from serving.graph_buckets import default_sizes
from serving.layer_reuse import owners_of, reusing
from serving.llm import Llm
from serving.memory import GIB, blocks_for, check_capacity, kv_capacity
from serving.policies.build import policies_of
from serving.scenario import Scenario

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REFERENCE_SEQS = 4  # sequences of the reference step: they have table rows of their own, and no blocks but the reserved one
REFERENCE_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Choices:
    """How to run. ``device`` auto takes a CUDA GPU if there is one, ``dtype`` auto is fp32 on CPU and bf16 on CUDA. ``weights`` None: random ones.

    ``skip_experts_below``: of the largest share of a token's experts. ``adapters`` is a folder of LoRA adapters by name; None: random ones.
    """

    device: str = "auto"
    dtype: str = "auto"
    weights: Path | None = None
    attention: str | None = None
    eager: bool = False
    threads: int = 1
    adapters: Path | None = None
    skip_experts_below: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a device holds before there is a KV cache, bytes: in all, weights, activations of the largest step, everything else."""

    total: int
    weights: int
    activation: int | None
    other: int


def build_engine(scenario: Scenario, choices: Choices) -> Engine:
    """Load or make the weights, size the pool by what is left, and return the engine.

    Raises InputError when the scenario asks for more than one GPU, a dtype or device is not there, or it does not fit (saying what would).
    """
    check_servable(scenario)
    torch.set_num_threads(choices.threads)
    device = _device(choices.device)
    dtype_name = choices.dtype if choices.dtype != "auto" else ("bf16" if device.type == "cuda" else "fp32")
    if dtype_name not in DTYPES:
        raise InputError("--dtype", f"'{dtype_name}' is no dtype of the engine", nearest(dtype_name, DTYPES))
    ranks = scenario.cluster.tensor_parallel
    if ranks != 1 and (device.type != "cpu" or scenario.policy.sharding.name != "head"):
        raise InputError("cluster.tensor_parallel", "the engine runs on one GPU; on the CPU it splits heads over processes", "set it to 1")
    llm, gpu = load_llm(scenario.llm), load_gpu(scenario.cluster.gpu)
    shape, weights = _weights(scenario, choices, llm, device, DTYPES[dtype_name])
    weights, images = with_images(scenario, weights)
    if scenario.retention is not None and (shape.positions != "rope" or shape.window or ranks > 1):
        raise InputError("retention", "the engine drops pages of rotary networks without a window of their own, on one device", "leave it out")
    if scenario.kv_cache.layer_reuse is not None:
        if scenario.adapters is not None or ranks > 1:
            raise InputError("kv_cache.layer_reuse", "the engine shares layers on one device and without adapters", "leave it out")
        shape = dataclasses.replace(shape, kv_owners=tuple(owners_of(llm, scenario.kv_cache.layer_reuse)))
        llm = reusing(llm, scenario.kv_cache.layer_reuse)
    if scenario.speculation is not None and scenario.retention is not None:
        raise InputError("speculation", "the engine drops no pages while it verifies drafts", "leave it out")
    drafter = drafter_of(scenario, shape, weights)
    if drafter is not None and ranks > 1:
        raise InputError("speculation.proposer", "a network drafts on one device", "use prompt_lookup")
    exits = _exits(scenario, choices, shape, device)
    lora = _lora(scenario, choices, shape, weights, ranks)
    use = measured_use(scenario, shape, weights, device)
    beside = sum(part.bytes() for part in (drafter, lora, images) if part is not None)
    use = dataclasses.replace(use, weights=use.weights + beside)
    blocks = _blocks(scenario, llm, gpu, shape, use, dtype_name, share_of_pages(shape, drafter))
    longest = longest_sequence(scenario, blocks, shape.max_model_len)
    batching = scenario.policy.batching
    sizes = () if choices.eager or device.type != "cuda" else default_sizes(min(batching.max_batch_seqs, 256))
    options = RunnerOptions(
        blocks=blocks, block_tokens=scenario.kv_cache.block_tokens, max_seqs=batching.max_batch_seqs + REFERENCE_SEQS,
        max_batch_tokens=_most_tokens(scenario), max_model_len=max(longest, REFERENCE_CONTEXT), graph_sizes=sizes,
        attention=choices.attention, seed=scenario.seed, kv_format=_kv_format(scenario), skip_experts_below=_checked_share(choices.skip_experts_below),
    )  # fmt: skip
    if ranks > 1:
        runner = RankedRunner(Recipe(shape, DTYPES[dtype_name], scenario.seed, choices.weights), weights, options, ranks)
    else:
        watched = scenario.retention is not None and policies_of(scenario).retention.entropy_below > 0
        runner = Runner(shape, weights, options, AttentionTrace(top=1, keep=False) if watched else None, lora=lora, exits=exits)
        if getattr(policies_of(scenario).batching, "streams", 1) == 2:
            runner = TwoStreams(runner)
    runner.warm_up()
    return Engine(
        runner, blocks, longest, shape.vocab, device_name(device, choices.threads), gpu.price_usd_per_h,
        {"torch": str(torch.__version__), "dtype": dtype_name, "weights": str(choices.weights.name) if choices.weights else "random"},
        proposer_of(scenario, drafter, options),
        {name: part.report for name, part in (("early_exit", exits), ("images", images)) if part is not None}, images,
    )  # fmt: skip


def _exits(scenario: Scenario, choices: Choices, shape: Architecture, device: torch.device) -> EarlyExit | None:
    """The gates of the scenario's exits: those beside the weights, or random ones for random weights. Raises InputError."""
    spec = None if scenario.weights is None else scenario.weights.early_exit
    if spec is None:
        return None
    if scenario.retention is not None or scenario.adapters is not None or scenario.cluster.tensor_parallel > 1:
        raise InputError("weights.early_exit", "the engine lets tokens leave on one device, without adapters or retention", "leave those out")
    if choices.weights is not None:
        return load_gates(spec, shape, choices.weights, device)
    return random_gates(spec, shape, scenario.seed, device)


def _lora(scenario: Scenario, choices: Choices, shape: Architecture, weights: DecoderWeights, ranks: int) -> LoraSlots | None:
    """The scenario's adapter slots on the device of ``weights``; None without any. Raises InputError."""
    spec = scenario.adapters
    if spec is None:
        return None
    if ranks > 1:
        raise InputError("adapters", "the engine applies adapters on one device", "set cluster.tensor_parallel to 1")
    mix = scenario.workload.adapters
    store = AdapterStore(shape, spec.rank, folder=choices.adapters, seed=scenario.seed, names=() if mix is None else mix.all_names())
    device = weights.embedding.device
    apply = load_chosen("triton" if device.type == "cuda" else "torch").add_adapters
    return LoraSlots(shape, spec.slots, spec.rank, store, apply, dtype=weights.embedding.dtype, device=device)


def _checked_share(share: float) -> float:
    if not 0.0 <= share <= 1.0:
        raise InputError("--skip-experts-below", f"{share:g} is no fraction from 0 to 1")
    return share


def _kv_format(scenario: Scenario) -> str | None:
    return scenario.kv_cache.dtype if scenario.kv_cache.dtype in FORMATS else None


def reference_step(runner: Runner | RankedRunner | TwoStreams) -> Callable[[], None]:
    """A fixed step that touches nothing but the reserved block: a few decodes over a middling context, through all layers."""
    table = [0] * blocks_for(REFERENCE_CONTEXT, runner.options.block_tokens)
    batch = StepInput([SequenceInput(-1 - one, (1,), REFERENCE_CONTEXT - 1, table) for one in range(REFERENCE_SEQS)])

    inner = runner if isinstance(runner, Runner) else runner.runner

    def run() -> None:
        exits, inner.exits = inner.exits, None
        runner.execute(batch)
        inner.exits = exits

    return run


def normalised(engine: Engine, reference_s: float) -> tuple[Engine, NormalisedClock]:
    """The engine with its device named by what its seconds are, and a clock on which its reference step takes ``reference_s``.

    Where the device is this processor, the processor time of this thread is measured: who else runs here does not count.
    """
    timer = time.thread_time if engine.runner.device.type == "cpu" else time.perf_counter
    clock = NormalisedClock(reference_step(engine.runner), reference_s, timer)
    return dataclasses.replace(engine, device=f"{engine.device}, normalised to a reference step of {reference_s * 1e3:g} ms"), clock


def device_name(device: torch.device, threads: int) -> str:
    """What the device is, for run.yaml."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = "unknown processor"
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} (CPU, {threads} thread{'s' if threads > 1 else ''})"


def _device(asked: str) -> torch.device:
    if asked not in ("auto", "cpu", "cuda"):
        raise InputError("--device", f"'{asked}' is no device of the engine", nearest(asked, ("auto", "cpu", "cuda")))
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device", "there is no CUDA GPU here", "use cpu")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def _most_tokens(scenario: Scenario) -> int:
    """Tokens of the largest step: a policy of whole prompts may exceed the budget by its decodes, or by one long prompt."""
    batching = scenario.policy.batching
    longest = scenario.max_model_len or 0
    return max(batching.max_batch_tokens, longest) + batching.max_batch_seqs


def _weights(scenario: Scenario, choices: Choices, llm: Llm, device: torch.device, dtype: torch.dtype) -> tuple[Architecture, DecoderWeights]:
    try:
        if choices.weights is not None:
            loaded = load(choices.weights, device=device, dtype=dtype)
            if (loaded.shape.layers, loaded.shape.hidden, loaded.shape.kv_heads) != (llm.layers, llm.hidden, llm.kv_heads):
                raise InputError(str(choices.weights), f"holds another network than the scenario's {llm.name}")
            return loaded.shape, loaded.weights
        shape = from_llm(llm)
        return shape, random_weights(shape, scenario.seed, device=device, dtype=dtype)
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise InputError("llm", f"the weights of {llm.name} do not fit: {free / GIB:.1f} of {total / GIB:.1f} GiB are free") from None


def _blocks(scenario: Scenario, llm: Llm, gpu: Gpu, shape: Architecture, use: MemoryUse, dtype: str, share: float) -> int:
    """Blocks of the KV pool, by the memory model that the simulator uses, with measured terms in place of computed ones; ``share`` of the memory is its own."""
    cache, batching = scenario.kv_cache, scenario.policy.batching
    capacity = kv_capacity(
        llm, gpu, memory_fraction=cache.memory_fraction, block_tokens=cache.block_tokens, max_model_len=scenario.max_model_len or 1,
        max_batch_tokens=batching.max_batch_tokens, max_batch_seqs=batching.max_batch_seqs, tensor_parallel=scenario.cluster.tensor_parallel, kv_dtype=_kv_format(scenario) or dtype,
        weights_gib=use.weights / GIB, activation_gib=None if use.activation is None else use.activation / GIB,
        non_torch_gib=use.other / GIB, gpu_gib=use.total / GIB, blocks=cache.blocks,
    )  # fmt: skip
    check_capacity(capacity, "kv_cache")
    if cache.blocks is not None:
        return cache.blocks
    # More than every seat could fill would only take time to clear.
    return min(int(capacity.blocks * share), 1 + batching.max_batch_seqs * blocks_for(scenario.max_model_len or shape.max_model_len, cache.block_tokens))


def measured_use(scenario: Scenario, shape: Architecture, weights: DecoderWeights, device: torch.device) -> MemoryUse:
    """Measure: on CUDA by the peak of the largest step on a cache just large enough for it; on CPU by what the system has left."""
    held = shape.parameters() * weights.embedding.element_size()
    if device.type != "cuda":
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        return MemoryUse(total, held, None, max(0, total - os.sysconf("SC_AVPHYS_PAGES") * page - held))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens, width = scenario.policy.batching.max_batch_tokens, scenario.kv_cache.block_tokens
    length = min(tokens, scenario.max_model_len or shape.max_model_len)
    per_seq = blocks_for(length, width)
    seqs = -(-tokens // length)
    trial = Runner(
        shape, weights,
        RunnerOptions(blocks=1 + seqs * per_seq, block_tokens=width, max_seqs=max(seqs, scenario.policy.batching.max_batch_seqs),
                      max_batch_tokens=_most_tokens(scenario), max_model_len=length),
    )  # fmt: skip
    cache = torch.cuda.memory_allocated(device) - before
    left, batch = tokens, []
    for one in range(seqs):
        count = min(left, length)
        batch.append(SequenceInput(one, [1] * count, 0, list(range(1 + one * per_seq, 1 + one * per_seq + blocks_for(count, width)))))
        left -= count
    trial.execute(StepInput(batch))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - cache
    del trial
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total, held, peak, max(0, total - free - torch.cuda.memory_reserved(device)))
