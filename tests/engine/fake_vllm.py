"""The shape of vLLM 0.32's scheduler, as far as the adapter touches it: same names, same order of service, same rules of preemption.

Written from its observed behaviour: running requests are served from the front and evicted from the back; after an eviction nobody is
admitted in that step; a request waits in ``waiting``, which is asked for its truth before it is asked for its head.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections import deque
from types import SimpleNamespace

VERSION = "0.32.0"


class SchedulingPolicy(enum.Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class FakeRequest:
    def __init__(self, request_id: str, prompt: int, output: int, *, arrival_time: float, priority: int = 0) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = request_id, prompt, output
        self.arrival_time, self.priority = arrival_time, priority
        self.num_computed_tokens = self.num_output_tokens = self.num_preemptions = 0
        self.is_prefill_chunk = False
        self.status = "waiting"

    def is_finished(self) -> bool:
        return self.status.startswith("finished")


class BlockPool:
    def __init__(self, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.free = num_gpu_blocks - 1

    def get_num_free_blocks(self) -> int:
        return self.free


class KVCacheManager:
    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_pool = BlockPool(blocks)
        self.block_size = block_size
        self.held: dict[str, int] = {}
        self.cached: dict[str, int] = {}

    def get_computed_blocks(self, request):
        return None, self.cached.get(request.request_id, 0), 0

    def allocate(self, request, tokens: int) -> bool:
        need = -(-(request.num_computed_tokens + tokens) // self.block_size) - self.held.get(request.request_id, 0)
        if need > self.block_pool.free:
            return False
        self.block_pool.free -= need
        self.held[request.request_id] = self.held.get(request.request_id, 0) + need
        return True

    def release(self, request) -> None:
        self.block_pool.free += self.held.pop(request.request_id, 0)


class AsyncScheduler:
    def __init__(self, config: SimpleNamespace, blocks: int, block_size: int) -> None:
        self.vllm_config, self.block_size = config, block_size
        self.scheduler_config, self.cache_config = config.scheduler_config, config.cache_config
        self.max_num_running_reqs, self.max_num_scheduled_tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        self.max_num_active_reqs = self.max_num_running_reqs
        self.kv_cache_manager = KVCacheManager(blocks, block_size)
        self.policy = SchedulingPolicy.PRIORITY
        self.waiting = deque()
        self.running: list[FakeRequest] = []
        self.requests: dict[str, FakeRequest] = {}
        self.stopped = False

    def add_request(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(self, request_ids, finished_status) -> None:
        for their_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            request = self.requests.pop(their_id)
            if request in self.running:
                self.running.remove(request)
            else:
                self.waiting.remove_requests([request])
            self.kv_cache_manager.release(request)
            request.status = finished_status

    def _preempt_request(self, request: FakeRequest, timestamp: float, drop_stale_output: bool = False) -> None:
        self.kv_cache_manager.release(request)
        request.status, request.num_computed_tokens = "preempted", 0
        request.num_preemptions += 1
        self.waiting.prepend_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        tokens_left, scheduled, preempted, at = self.max_num_scheduled_tokens, {}, [], 0
        while at < len(self.running) and tokens_left:
            request = self.running[at]
            new = min(request.num_prompt_tokens + request.num_output_tokens - request.num_computed_tokens, tokens_left)
            while not self.kv_cache_manager.allocate(request, new):
                victim = self.running.pop()
                self._preempt_request(victim, 0.0)
                preempted.append(victim)
                if victim is request:
                    break
            if preempted and preempted[-1] is request:
                break
            scheduled[request.request_id] = new
            tokens_left -= new
            at += 1
        while not preempted and tokens_left and self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.peek_request()
            known = request.num_prompt_tokens + request.num_output_tokens
            if -(-known // self.block_size) > self.kv_cache_manager.block_pool.free:
                break
            self.waiting.pop_request()
            new = min(known, tokens_left)
            self.kv_cache_manager.allocate(request, new)
            request.status = "running"
            self.running.append(request)
            scheduled[request.request_id] = new
            tokens_left -= new
        for their_id, new in scheduled.items():
            request = self.requests[their_id]
            request.num_computed_tokens += new
            request.is_prefill_chunk = request.num_computed_tokens < request.num_prompt_tokens + request.num_output_tokens
        return SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))

    def update_from_output(self, scheduler_output, model_runner_output) -> dict:
        for their_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(their_id)
            if request is None or request.is_prefill_chunk or request.status != "running":
                continue
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.max_tokens:
                self.running.remove(request)
                self.kv_cache_manager.release(request)
                del self.requests[their_id]
                request.status = "finished_length"
        return {}

    def shutdown(self) -> None:
        self.stopped = True


def config(scenario: str, log: str | None = None, *, seqs: int = 8, tokens: int = 64, extra: dict | None = None) -> SimpleNamespace:
    """A configuration that asks for ``scenario``'s policies."""
    settings = {"scenario": scenario, **({"log": log} if log else {}), **(extra or {})}
    return SimpleNamespace(
        additional_config={"twinserve": settings},
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens, long_prefill_token_threshold=0, async_scheduling=False),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        model_config=SimpleNamespace(max_model_len=256, model="fake", dtype="torch.bfloat16", seed=0),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def install(monkeypatch, version: str = VERSION, scheduler: type = AsyncScheduler):
    """Make ``import vllm…`` find this shape, at ``version``, and import the adapter afresh."""
    inner = types.ModuleType("vllm.v1.core.sched.async_scheduler")
    inner.AsyncScheduler = scheduler
    path = ""
    for part in inner.__name__.split("."):
        path = f"{path}.{part}".lstrip(".")
        monkeypatch.setitem(sys.modules, path, inner if path == inner.__name__ else types.ModuleType(path))

    def found(name: str) -> str:
        if name != "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    try:
        return importlib.import_module("engine.adapters.vllm")
    finally:
        sys.modules.pop("engine.adapters.vllm", None)  # the next test's vLLM is another
