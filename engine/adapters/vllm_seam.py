"""What is done around vLLM's scheduler: between its queue and our policies, between its steps and our log.

Everything here works on the scheduler object from outside and lives in one attribute of it (``engine.adapters.vllm``), so that no name of
ours can shadow one of vLLM's. No vLLM is imported.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engine.adapters.ordered_queue import OrderedQueue
from engine.adapters.policy_side import PolicySide
from engine.adapters.step_log import Composition, LogClock, Planned, StepLog
from serving.errors import InputError, nearest
from serving.scenario import Scenario, load

SETTINGS = ("scenario", "log")
#: The attributes of vLLM's scheduler that are used here and in the subclass.
USED = (
    "vllm_config.additional_config", "vllm_config.model_config.max_model_len", "scheduler_config", "cache_config.enable_prefix_caching",
    "max_num_running_reqs", "max_num_scheduled_tokens", "waiting", "running", "requests", "policy", "block_size",
    "kv_cache_manager.get_computed_blocks", "kv_cache_manager.block_pool.get_num_free_blocks", "kv_cache_manager.block_pool.num_gpu_blocks",
    "_preempt_request", "add_request", "finish_requests", "schedule", "update_from_output", "shutdown",
)  # fmt: skip


def missing_attributes(scheduler: Any) -> list[str]:
    """Which of the attributes in ``USED`` the scheduler lacks."""
    lacking = []
    for path in USED:
        found = scheduler
        for name in path.split("."):
            if not hasattr(found, name):
                lacking.append(path)
                break
            found = getattr(found, name)
    return lacking


def settings_of(additional_config: Any) -> dict[str, str]:
    """Our part of ``--additional-config``. Raises InputError when it is missing or holds an unknown key."""
    where = "--additional-config"
    given = additional_config.get("twinserve") if isinstance(additional_config, dict) else None
    if not isinstance(given, dict) or "scenario" not in given:
        raise InputError(f"{where} twinserve.scenario", "names the scenario whose policies decide", '\'{"twinserve": {"scenario": "FILE.yaml"}}\'')
    for key in given:
        if key not in SETTINGS:
            raise InputError(f"{where} twinserve.{key}", "there is no such setting", nearest(key, SETTINGS))
    return given


class Seam:
    """Attached to one scheduler. Raises InputError when that scheduler, the settings or a policy do not fit."""

    def __init__(self, scheduler: Any, distribution: str, version: str) -> None:
        lacking = missing_attributes(scheduler)
        if lacking:
            raise InputError(distribution, f"{version}: its scheduler has no {', '.join(lacking)}", "this vLLM works differently inside")
        settings = settings_of(scheduler.vllm_config.additional_config)
        scenario = load(settings["scenario"])
        self._scheduler = scheduler
        self._clock = LogClock()
        self._side = PolicySide(scenario, scheduler.block_size, self._cached_tokens)
        _set_budgets(scheduler, scenario.policy.batching)
        # Under its policy `priority` vLLM would choose victims itself; under `fcfs` it takes the last of the running list, which is ordered here.
        scheduler.policy = type(scheduler.policy)("fcfs")
        scheduler.waiting = OrderedQueue(self._side.key_of)
        self._planned: deque[tuple[Any, Planned]] = deque()
        self._submitted: list[int] = []
        self._evicted: list[int] = []
        self._before_commits: list[int] = []
        self._admissions = 0
        self._log = None
        if "log" in settings:
            self._log = StepLog(Path(settings["log"]), self._clock, facts(scheduler, scenario, distribution, version))

    # -- requests -------------------------------------------------------------------------------------------------------

    def entering(self, request: Any) -> None:
        """A request is about to be queued."""
        if self._side.knows(request.request_id):
            return  # the next part of a streamed input
        now_s = self._clock.now_s()
        arrival_s = min(now_s, self._clock.of_unix_s(request.arrival_time))
        self._submitted.append(self._side.enter(request, arrival_s, now_s).request_id)

    def preempting(self, request: Any) -> None:
        """A running request is about to be put back into the queue."""
        self._evicted.append(self._side.seq(request).request_id)
        self._side.back_in_queue(request)

    def see_off(self, present: Iterable[Any], status: str, now_s: float | None = None) -> list[int]:
        """Let go of those of ``present`` that have finished; returns our ids of them."""
        now_s = self._clock.now_s() if now_s is None else now_s
        ended = []
        for request in present:
            if request.is_finished() and self._side.knows(request.request_id):
                seq = self._side.leave(request, now_s, status)
                ended.append(seq.request_id)
                if self._log is not None:
                    self._log.request(seq, request.request_id, now_s, status)
        return ended

    # -- steps ----------------------------------------------------------------------------------------------------------

    def plan(self, fill: Callable[[], Any]) -> Any:
        """Arrange queue and running list as the policies want them, let ``fill`` (vLLM's own) make the step, and note what it holds."""
        scheduler, side = self._scheduler, self._side
        begin_s = self._clock.now_s()
        if self._log is not None:
            self._log.wake()
        self._evicted = []
        side.look(scheduler.running, len(scheduler.waiting), begin_s)
        opened = not scheduler.waiting or side.window_opens_s(begin_s) <= begin_s
        if opened:
            self._make_room(begin_s)
        scheduler.running[:] = side.in_order_of_service(scheduler.running, side.short_blocks(scheduler.running, self._free_blocks()))
        ran = {id(request) for request in scheduler.running}
        scheduler.waiting.closed = not opened
        try:
            output = fill()
        finally:
            scheduler.waiting.closed = False
        for request in scheduler.running:
            if id(request) not in ran:
                self._admissions += 1
                side.admitted(request, self._admissions, begin_s)
        if output.total_num_scheduled_tokens:
            used = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1 - self._free_blocks()
            work = self._composition(output)
            planned = Planned(begin_s, self._clock.now_s(), work, self._submitted, self._evicted, used, self._before_commits)
            self._planned.append((output, planned))
            self._submitted, self._before_commits = [], []
        elif self._log is not None:
            self._log.idle()
        return output

    def commit(self, output: Any, take_in: Callable[[], Any]) -> Any:
        """Let ``take_in`` (vLLM's own) take in the tokens of a step; the step is over when it has."""
        scheduler, arrived_s = self._scheduler, self._clock.now_s()
        present = [scheduler.requests[their_id] for their_id in output.num_scheduled_tokens if their_id in scheduler.requests]
        without_token = [request for request in present if not request.num_output_tokens]
        result = take_in()
        now_s = self._clock.now_s()
        for request in without_token:
            if request.num_output_tokens and self._side.knows(request.request_id):
                self._side.seq(request).first_token_s = now_s
        finished = self.see_off(present, "completed", now_s)
        if self._planned and self._planned[0][0] is output:
            _, planned = self._planned.popleft()
            self._before_commits.append(len(self._submitted))
            if self._log is not None:
                self._log.step(planned, arrived_s, finished, more=bool(scheduler.running or len(scheduler.waiting)))
        return result

    def close(self) -> None:
        """The server stops."""
        if self._log is not None:
            self._log.close()

    def _make_room(self, now_s: float) -> None:
        """Evict running requests for urgent ones, where ordering and victim policy say so."""
        scheduler = self._scheduler
        seats = scheduler.max_num_running_reqs - len(scheduler.running)
        for victim in self._side.evict_for_urgent(scheduler.waiting, seats, self._free_blocks(), now_s):
            scheduler.running.remove(victim)
            scheduler._preempt_request(victim, time.monotonic())

    def _composition(self, output: Any) -> Composition:
        """What the step holds; vLLM has counted its tokens as computed already."""
        chunks, tokens, decodes, context = [], [], 0, 0
        for their_id, new in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[their_id]
            seq = self._side.seq(request)
            before = request.num_computed_tokens - new
            if new == 1 and before >= request.num_prompt_tokens:
                decodes += 1
                context += before + 1
            else:
                chunks.append((seq.request_id, new, before))
                if seq.computed == 0 and not request.num_preemptions:
                    seq.cached_tokens = before
            seq.computed = request.num_computed_tokens
            if not request.is_prefill_chunk:
                tokens.append(seq.request_id)
        return Composition(chunks, decodes, context, tokens)

    def _free_blocks(self) -> int:
        return self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _cached_tokens(self, request: Any) -> int:
        """Prompt tokens of ``request``, on its way into the queue, that vLLM's prefix cache holds."""
        if not self._scheduler.cache_config.enable_prefix_caching:
            return 0
        return self._scheduler.kv_cache_manager.get_computed_blocks(request)[1]


def _set_budgets(scheduler: Any, batching: Any) -> None:
    """Give the scheduler the scenario's budgets, within what the server was started with: its buffers are as large as that."""
    for key, ours, option, theirs in (
        ("max_batch_tokens", batching.max_batch_tokens, "--max-num-batched-tokens", scheduler.max_num_scheduled_tokens),
        ("max_batch_seqs", batching.max_batch_seqs, "--max-num-seqs", scheduler.max_num_running_reqs),
    ):
        if ours > theirs:
            raise InputError(f"policy.batching.{key}", f"{ours} exceeds the {theirs} that vLLM was started with", f"start it with {option} {ours}")
    scheduler.max_num_scheduled_tokens = batching.max_batch_tokens
    scheduler.max_num_running_reqs = batching.max_batch_seqs
    if hasattr(scheduler, "max_num_active_reqs"):  # newer releases admit up to this, and keep buffers for the other
        scheduler.max_num_active_reqs = min(scheduler.max_num_active_reqs, batching.max_batch_seqs)
    if batching.max_chunk_tokens is not None:
        scheduler.scheduler_config.long_prefill_token_threshold = batching.max_chunk_tokens


def facts(scheduler: Any, scenario: Scenario, distribution: str, version: str) -> dict[str, Any]:
    """What a reader of the log must know of the engine."""
    config, model = scheduler.vllm_config, scheduler.vllm_config.model_config
    return {
        "vllm_version": version, "distribution": distribution, "python": platform.python_version(), "model": getattr(model, "model", None),
        "measured_on": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": {"device_name": device_name(getattr(getattr(config, "device_config", None), "device_type", "cpu"))},
        "engine_kwargs": {
            "max_num_seqs": scheduler.max_num_running_reqs, "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
            "max_model_len": model.max_model_len, "dtype": str(getattr(model, "dtype", "")), "seed": getattr(model, "seed", 0),
            "tensor_parallel_size": getattr(getattr(config, "parallel_config", None), "tensor_parallel_size", 1),
        },
        "kv_cache": {
            "num_gpu_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks, "block_size": scheduler.block_size,
            "enable_prefix_caching": bool(scheduler.cache_config.enable_prefix_caching),
        },
        "asynchronous": bool(getattr(scheduler.scheduler_config, "async_scheduling", False)),
        "scenario": scenario.resolved(), "seed": scenario.seed,
    }  # fmt: skip


def device_name(kind: str) -> str:
    """The accelerator's name, or the processor's with the threads that compute."""
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor")
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    return f"{name} (CPU, {threads} thread{'s' if threads != '1' else ''})"
