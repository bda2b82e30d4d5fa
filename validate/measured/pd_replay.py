"""Replays the runs of one prefill-to-decode ratio and one shape against the same simulated servers, as their client sent them.

The client (`vllm bench serve`, random data set) draws the same prompts in every run, for its seed is 0 unless it is told otherwise;
it sends the first of them once as a test, waits, and then keeps ``users`` requests open until none is left. SGLang's prefill servers
cache prefixes, so a later run finds there what an earlier one left, where the router sends a prompt to the same server again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serving.errors import InputError
from serving.instants import ARRIVAL
from serving.request import Arrival, Request
from serving.rng import stream

if TYPE_CHECKING:
    from serving.scenario import Scenario
    from sim.fleet import Parts

BLOCK_TOKENS = 16
SEED = 1
CHUNK_TOKENS = 8192  # SGLang's chunked_prefill_size on an H200 (sglang/srt/server_args.py)
MAX_SEQS = 1024
# SGLang of September 2025 ran gpt-oss on Hopper with OpenAI's triton_kernels (server_args.py: "Detected GPT-OSS model, enabling
# triton_kernels MOE kernel"). The package's vLLM tables timed that kernel for the experts, its SGLang tables another one.
PRICED_AS = "vllm"


class Figures(NamedTuple):
    """What the client reports of one run: means over its requests, seconds; output tokens over the length of the run."""

    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """Servers on one host: ``prefill`` and ``decode`` of them, each on ``tensor_parallel`` GPUs."""

    llm: str
    gpu: str
    topology: str
    prefill: int
    decode: int
    tensor_parallel: int

    @property
    def gpus(self) -> int:
        """GPUs that the servers occupy."""
        return (self.prefill + self.decode) * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Load:
    """One run: ``requests`` prompts, at most ``users`` at a time; an answer ends where the model ends it, or at the limit."""

    users: int
    requests: int
    prompt_tokens: int
    mean_output_tokens: float
    max_output_tokens: int


def replay(deployment: Deployment, loads: Sequence[Load]) -> tuple[list[Figures], str]:
    """Simulate ``loads`` one after the other on the same servers; return the figures of each and what priced the steps."""
    from sim.fleet import build_fleet, new_metrics

    scenario, parts, words = _resolved(deployment)
    metrics = new_metrics(scenario, keep_rows=True)
    client = Client(build_fleet(scenario, parts, metrics))
    spans = [client.run(load) for load in loads]
    columns = metrics.columns()
    return [_figures(columns, span) for span in spans], words


class Client:
    """Keeps a number of requests open on ``fleet``, in order; a prompt's number is its content."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._waiting: list[Arrival] = []
        self._next_id = 0
        fleet.on_outcome(self._answered)

    def run(self, load: Load) -> tuple[int, int]:
        """Send the test request and then all of ``load``; return the first id of those that count, and one past the last."""
        lengths = output_lengths(load)
        self._send(self._arrivals(load, lengths[:1]), 1)
        first = self._next_id
        self._send(self._arrivals(load, lengths), load.users)
        return first, self._next_id

    def _arrivals(self, load: Load, lengths: Sequence[int]) -> list[Arrival]:
        blocks, arrivals = load.prompt_tokens // BLOCK_TOKENS, []
        for prompt, tokens in enumerate(lengths):
            keys = tuple((prompt, block) for block in range(blocks))
            arrivals.append(Arrival(Request(self._next_id, 0.0, load.prompt_tokens, load.max_output_tokens, prefix_hashes=keys), tokens))
            self._next_id += 1
        return arrivals

    def _send(self, arrivals: list[Arrival], users: int) -> None:
        self._waiting = arrivals[::-1]
        for _ in range(users):
            self._submit(None)
        self._fleet.env.run()

    def _answered(self, request_id: int, time_s: float, status: str) -> None:
        self._fleet.env.at(time_s, self._submit, ARRIVAL)

    def _submit(self, event: object) -> None:
        if self._waiting:
            request, tokens = self._waiting.pop()
            self._fleet.submit(request._replace(arrival_s=self._fleet.env.now), tokens)


def output_lengths(load: Load) -> list[int]:
    """Output lengths in random order: quantiles of the geometric distribution on [1, limit] that has the measured mean.

    Of all distributions on that range with that mean it assumes least (maximum entropy).
    """
    limit, mean = load.max_output_tokens, load.mean_output_tokens
    if not 1 < mean < limit:
        return [limit if mean >= limit else 1] * load.requests
    values = np.arange(1, limit + 1)
    share = np.cumsum(_truncated_geometric(values, mean))
    quantiles = (np.arange(load.requests) + 0.5) / load.requests
    lengths = values[np.searchsorted(share, quantiles * share[-1])]
    return stream(SEED, "pd_ratio.lengths").permutation(lengths).tolist()


def _truncated_geometric(values: np.ndarray, mean: float) -> np.ndarray:
    from scipy.optimize import brentq

    place = values / values[-1]

    def weights(slope: float) -> np.ndarray:
        exponents = slope * place
        return np.exp(exponents - exponents.max())

    slope = brentq(lambda slope: np.average(values, weights=weights(slope)) - mean, -50.0 * len(values), 50.0 * len(values))
    return weights(slope)


def _figures(columns: dict[str, np.ndarray], span: tuple[int, int]) -> Figures:
    mine = (columns["request_id"] >= span[0]) & (columns["request_id"] < span[1])
    part = {name: column[mine] for name, column in columns.items()}
    tokens, arrival_s, first_s, finish_s = (part[name] for name in ("output_tokens", "arrival_s", "first_token_s", "finish_s"))
    several = tokens > 1
    tpot_s = (finish_s - first_s)[several] / (tokens[several] - 1)
    return Figures(float((first_s - arrival_s).mean()), float(tpot_s.mean()), float(tokens.sum() / (finish_s.max() - arrival_s.min())))


def _resolved(deployment: Deployment) -> tuple[Scenario, dict[str, Parts], str]:
    """The fleet with steps priced by the package behind ``silicon``, or by the roofline where that cannot price it."""
    from serving.scenario import from_mapping
    from sim.fleet import resolve_fleet

    for latency in ({"name": "silicon", "engine": PRICED_AS}, {"name": "roofline"}):
        scenario = from_mapping(_mapping(deployment) | {"latency": {**latency, "host_step_s": 0.0}})  # SGLang plans while the device works
        try:
            parts = resolve_fleet(scenario)
        except InputError:
            if latency["name"] == "roofline":
                raise
            continue
        no_cache = scenario.kv_cache.model_copy(update={"prefix_caching": False})  # SGLang's decode servers have none
        decode = parts["decode"]
        parts["decode"] = replace(decode, scenario=decode.scenario.model_copy(update={"kv_cache": no_cache}))
        return scenario, parts, _words(latency["name"], decode.latency)
    raise AssertionError("the roofline prices every deployment or refuses it")


def _words(name: str, model: Any) -> str:
    if name == "roofline":
        return name
    known = model.provenance()
    return f"silicon ({known['package']}, {known['engine']} {known['backend_version']})"


def _mapping(deployment: Deployment) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "pd-ratio",
        "seed": SEED,
        "llm": deployment.llm,
        "cluster": {
            "gpu": deployment.gpu,
            "topology": deployment.topology,
            "tensor_parallel": deployment.tensor_parallel,
            "first_token": "decode",  # SGLang's router passes on the decode server's answer
            "pools": [{"role": "prefill", "replicas": deployment.prefill}, {"role": "decode", "replicas": deployment.decode}],
        },
        "kv_cache": {"block_tokens": BLOCK_TOKENS, "prefix_caching": True},
        "policy": {
            "batching": {"name": "prefill_first", "max_batch_tokens": CHUNK_TOKENS, "max_batch_seqs": MAX_SEQS},
            "routing": "round_robin",
        },
        "workload": {"requests": 1, "arrivals": {"process": "closed_loop", "users": 1}, "prompt_tokens": 1, "output_tokens": 1},
    }
