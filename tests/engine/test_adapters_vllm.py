"""Our policies inside a scheduler of vLLM's shape: what they decide there, what is logged, and what is refused."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from fake_vllm import VERSION, AsyncScheduler, FakeRequest, config, install

from engine.adapters.ordered_queue import OrderedQueue
from engine.adapters.vllm_run import Warp, read_log, with_arrivals_as_seen, write_run, write_trace
from serving.errors import InputError
from serving.records import open_run
from validate.importers import import_file
from validate.parity import parity

BASE = """
version: 1
name: inside
seed: 3
llm: llama-3.1-8b
max_model_len: 256
cluster: {{gpu: h100-sxm}}
kv_cache: {{block_tokens: 8, blocks: {blocks}, prefix_caching: false}}
policy:
  ordering: {ordering}
  batching: {{name: {batching_name}, max_batch_tokens: {budget}, max_batch_seqs: {seqs}{batching}}}
  preemption: {preemption}
workload:
  requests: 40
  arrivals: {{process: poisson, rate_rps: 50.0}}
  prompt_tokens: {{dist: uniform, min: 5, max: 60}}
  output_tokens: {{dist: uniform, min: 2, max: 20}}
  classes: [{{name: urgent, share: 0.5, priority: 0}}, {{name: other, share: 0.5, priority: 1}}]
"""

DEFAULTS = {"ordering": "fcfs", "batching_name": "chunked_prefill", "batching": "", "preemption": "latest", "budget": 64, "seqs": 8}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Build a scheduler for a policy: ``build(ordering=..., blocks=...)``."""

    def make(*, blocks=200, log=False, scheduler=AsyncScheduler, started_with=None, **keys):
        file = tmp_path / "scenario.yaml"
        settings = {"tokens": keys.get("budget", 64), **(started_with or {})}
        file.write_text(BASE.format(**DEFAULTS | keys, blocks=blocks), encoding="utf-8")
        module = install(monkeypatch, scheduler=scheduler)
        chosen = config(str(file), str(tmp_path / "log") if log else None, **settings)
        return module.PolicyScheduler(chosen, blocks, 8)

    return make


def request(name: str, prompt: int, output: int = 5, *, priority: int = 0) -> FakeRequest:
    return FakeRequest(name, prompt, output, arrival_time=time.time(), priority=priority)


def step(scheduler) -> dict[str, int]:
    output = scheduler.schedule()
    scheduler.update_from_output(output, None)
    return output.num_scheduled_tokens


def test_the_policy_orders_the_queue(build):
    scheduler = build(ordering="{name: shortest_job, ageing_tokens_per_s: 0}", seqs=1)
    for name, prompt in (("long", 50), ("short", 5), ("middle", 20)):
        scheduler.add_request(request(name, prompt, output=1))
    assert [list(step(scheduler)) for _ in range(3)] == [["short"], ["middle"], ["long"]]


def test_under_fcfs_a_preempted_request_keeps_its_place(build):
    scheduler = build(blocks=10, seqs=3)
    for name in "abc":
        scheduler.add_request(request(name, 15, output=20))
    while not any(one.num_preemptions for one in scheduler.requests.values()):
        step(scheduler)
    scheduler.add_request(request("d", 5))
    assert [one.request_id for one in scheduler.waiting][-1] == "d"


def test_a_strict_priority_evicts_and_gets_in_at_once(build):
    scheduler = build(ordering="{name: priority, preempt: strict}", preemption="lowest_priority", seqs=2)
    for name in ("old", "new"):
        scheduler.add_request(request(name, 10, output=30, priority=1))
    step(scheduler)
    scheduler.add_request(request("urgent", 10, priority=0))
    assert set(step(scheduler)) == {"old", "urgent"}
    assert scheduler.requests["new"].num_preemptions == 1
    scheduler.add_request(request("equal", 10, priority=0))
    step(scheduler)
    assert scheduler.requests["urgent"].num_preemptions == 0, "equal priorities never evict each other"


def test_nobody_gives_way_to_one_who_would_not_fit_all_the_same(build):
    scheduler = build(ordering="{name: priority, preempt: strict}", preemption="lowest_priority", blocks=12)
    scheduler.add_request(request("urgent", 40, output=30, priority=0))
    scheduler.add_request(request("other", 10, output=30, priority=1))
    step(scheduler)
    scheduler.add_request(request("huge", 60, priority=0))
    assert set(step(scheduler)) == {"urgent", "other"}


@pytest.mark.parametrize(("preemption", "evicted"), [("latest", "b"), ("least_progress", "b"), ("lowest_priority", "a")])
def test_the_victim_policy_names_who_is_evicted_when_blocks_run_short(build, preemption, evicted):
    scheduler = build(preemption=preemption, blocks=11, seqs=4)
    scheduler.add_request(request("a", 30, output=40, priority=1))
    scheduler.add_request(request("b", 20, output=40, priority=0))
    for _ in range(40):
        step(scheduler)
        gone = [one.request_id for one in scheduler.requests.values() if one.num_preemptions]
        if gone:
            break
    assert gone == [evicted]


def test_a_closed_window_admits_nobody_but_counts_who_waits(build):
    scheduler = build(batching=", window: {name: fixed, window_s: 0.4, size: 3}")
    scheduler.add_request(request("a", 5))
    assert step(scheduler) == {} and len(scheduler.waiting) == 1
    scheduler.add_request(request("b", 5))
    scheduler.add_request(request("c", 5))
    assert set(step(scheduler)) == {"a", "b", "c"}, "three wait: it opens at once"
    scheduler.add_request(request("d", 5))
    assert "d" not in step(scheduler)
    time.sleep(0.45)
    assert "d" in step(scheduler)


def test_the_budgets_are_the_scenarios(build):
    scheduler = build(seqs=2, started_with={"tokens": 100})
    for name in "abc":
        scheduler.add_request(request(name, 60))
    assert step(scheduler) == {"a": 60, "b": 4}
    assert step(scheduler) == {"a": 1, "b": 56}


def test_policies_that_learn_are_told_of_outcomes(build, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    told = []\n    def open_s(self, batch):\n        return batch.now_s\n    def observe(self, outcome):\n        self.told.append(outcome)\n"
    )
    scheduler = build(batching=f", window: '{tmp_path / 'mine.py'}:Mine'")
    scheduler.add_request(request("a", 5, output=3, priority=1))
    scheduler.add_request(request("b", 5, output=9))
    while "a" in scheduler.requests:
        step(scheduler)
    scheduler.finish_requests("b", "finished_aborted")
    told = scheduler._twinserve._side.policies.window.told
    assert [(one.class_name, one.status, one.generated_tokens) for one in told] == [("other", "completed", 3), ("urgent", "aborted", 3)]
    assert told[0].arrival_s <= told[0].scheduled_s <= told[0].first_token_s <= told[0].finish_s


def test_cache_affinity_asks_vllms_prefix_cache(build):
    scheduler = build(ordering="cache_affinity", seqs=1)
    scheduler.cache_config.enable_prefix_caching = True
    scheduler.kv_cache_manager.cached["warm"] = 16
    for name in ("cold", "warm"):
        scheduler.add_request(request(name, 20))
    assert [one.request_id for one in scheduler.waiting] == ["warm", "cold"]


# -- the log --------------------------------------------------------------------------------------------------------------


def serve_all(scheduler, count: int, seed: int = 0) -> None:
    """Feed the scenario's own requests a few at a time, as a client would."""
    from serving.scenario import load
    from serving.workload import open_arrivals

    scenario = load(scheduler.vllm_config.additional_config["twinserve"]["scenario"])
    arrivals = list(open_arrivals(scenario.workload, seed=scenario.seed, block_tokens=8, max_model_len=256, prefix_caching=False, slo=scenario.slo))
    assert len(arrivals) == count
    rng = np.random.default_rng(seed)
    while arrivals or scheduler.requests:
        for _ in range(min(len(arrivals), int(rng.integers(0, 3)))):
            one = arrivals.pop(0)
            scheduler.add_request(FakeRequest(
                f"r{one.request.request_id}", one.request.prompt_tokens, one.output_tokens, arrival_time=time.time(), priority=one.request.priority
            ))  # fmt: skip
        step(scheduler)
    scheduler.shutdown()


@pytest.mark.parametrize("ordering", ["fcfs", "priority", "{name: shortest_job, ageing_tokens_per_s: 0}"])
def test_a_log_becomes_a_run_whose_every_decision_our_scheduler_makes_again(build, tmp_path, ordering):
    """A pool that preempts, a scheduler of vLLM's rules under our policies, and parity with the simulator's scheduler.

    The budget cuts no prompt: for a cut prompt that lacks blocks the two have different rules (docs/vllm.md).
    """
    scheduler = build(ordering=ordering, blocks=26, seqs=6, budget=512, log=True)
    serve_all(scheduler, 40)
    log = read_log(tmp_path / "log")
    assert sum(one["preempted"] for one in log.steps) > 0 and len(log.requests) == 40
    write_run(with_arrivals_as_seen(log), tmp_path / "run")
    found = parity(tmp_path / "run")
    assert found.plans == len(log.steps) and not found.differing_plans, found.first_difference


def test_a_run_directory_tells_what_happened(build, tmp_path):
    scheduler = build(log=True)
    serve_all(scheduler, 40)
    log = read_log(tmp_path / "log")
    write_run(log, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.summary["requests"]["completed"] == 40 and run.info["versions"]["vllm"] == VERSION and run.info["versions"]["dtype"] == "bfloat16"
    requests, steps = run.requests, run.steps
    assert (requests["arrival_s"] <= requests["scheduled_s"]).all() and (requests["scheduled_s"] <= requests["first_token_s"]).all()
    assert int(requests["output_tokens"].sum()) == int(run.engine_steps["logits_rows"].sum())
    assert int(steps["prefill_tokens"].sum()) == int(requests["prompt_tokens"].sum())
    ends = (steps["start_s"] + steps["duration_s"]).to_numpy()
    assert (steps["start_s"].to_numpy()[1:] >= ends[:-1] - 1e-9).all()
    assert steps["kv_blocks_used"].max() <= 199 and steps["decode_seqs"].max() > 1


def test_the_other_importers_read_the_log_too(build, tmp_path):
    scheduler = build(log=True)
    serve_all(scheduler, 40)
    steps = import_file("step-log", tmp_path / "log" / "steps.jsonl", tmp_path / "a")
    requests = import_file("vllm-requests", tmp_path / "log" / "requests.jsonl", tmp_path / "b")
    assert len(steps.steps) == len(read_log(tmp_path / "log").steps) and len(requests.served) == 40


def test_the_processor_clock_moves_instants_with_their_steps(build, tmp_path):
    steps = [{"start_s": 1.0, "duration_s": 2.0}, {"start_s": 3.0, "duration_s": 4.0}, {"start_s": 8.0, "duration_s": 1.0}]
    warp = Warp(steps, [1.0, 1.0, 1.0])
    assert [warp(at) for at in (0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 7.5, 8.0, 9.0, 11.0)] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 7.0]
    assert np.isnan(warp(None)) and Warp(steps, [1.0, 1.0, 1.0], 2.0)(9.0) == 3.5
    scheduler = build(log=True)
    serve_all(scheduler, 40)
    log = read_log(tmp_path / "log")
    write_trace(log, tmp_path / "trace.jsonl", clock="processor")
    times = [json.loads(line)["arrival_s"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert times == sorted(times) and len(times) == 40


def test_a_log_cut_short_is_read_and_a_broken_one_is_refused(build, tmp_path):
    scheduler = build(log=True)
    serve_all(scheduler, 40)
    file = tmp_path / "log" / "steps.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-30])
    assert len(read_log(tmp_path / "log").steps) == len(whole.splitlines()) - 1
    file.write_text("{\n" + whole)
    with pytest.raises(InputError, match=r"steps.jsonl:1: is not JSON"):
        read_log(tmp_path / "log")
    file.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path / "log")


def test_a_second_log_does_not_overwrite_the_first(build):
    build(log=True).shutdown()
    with pytest.raises(InputError, match="holds a log already"):
        build(log=True)


# -- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.18.1", "0.33.0", "1.0", "nonsense"])
def test_a_release_outside_the_supported_range_is_refused_by_name(monkeypatch, version):
    with pytest.raises(InputError, match=rf"release {version} is not supported.*0\.32"):
        install(monkeypatch, version)


def test_without_vllm_the_adapter_says_so(monkeypatch):
    import importlib

    monkeypatch.setattr(importlib.metadata, "version", lambda name: (_ for _ in ()).throw(importlib.metadata.PackageNotFoundError(name)))
    with pytest.raises(InputError, match="vllm: is not installed"):
        importlib.import_module("engine.adapters.vllm")


def test_a_scheduler_that_lacks_an_attribute_is_refused_by_its_name(build):
    class Other(AsyncScheduler):
        def __init__(self, *args):
            super().__init__(*args)
            del self.kv_cache_manager.block_pool

    with pytest.raises(InputError, match=r"has no kv_cache_manager\.block_pool\.get_num_free_blocks, kv_cache_manager\.block_pool\.num_gpu_blocks"):
        build(scheduler=Other)


def test_no_name_of_ours_shadows_one_of_vllms(monkeypatch):
    """A release may grow a method with a name that the subclass uses for itself: the subclass adds none but overrides."""
    module = install(monkeypatch)
    added = {name for name in vars(module.PolicyScheduler) if not name.startswith("__")}
    assert added <= set(vars(AsyncScheduler))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batching_name": "prefill_first"}, "'prefill_first' cannot be given to another engine"),
        ({"batching": ", head_of_line: skip"}, "head_of_line: vLLM never passes"),
        ({"seqs": 20}, "max_batch_seqs: 20 exceeds the 8"),
        ({"started_with": {"tokens": 32}}, "max_batch_tokens: 64 exceeds the 32 .*--max-num-batched-tokens 64"),
        ({"started_with": {"extra": {"logs": "x"}}}, r"twinserve\.logs: there is no such setting .*did you mean 'log'"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_server_starts(build, keys, message):
    with pytest.raises(InputError, match=message):
        build(**keys)


def test_without_settings_the_server_says_what_to_give(monkeypatch):
    module = install(monkeypatch)
    bare = config("x")
    bare.additional_config = {}
    with pytest.raises(InputError, match=r"--additional-config twinserve\.scenario"):
        module.PolicyScheduler(bare, 10, 8)


def test_the_queue_finds_and_removes_by_key():
    queue = OrderedQueue(lambda one: (one.priority, one.request_id))
    first, second, third = request("a", 5, priority=1), request("b", 5), request("c", 5)
    for one in (first, second, third):
        queue.add_request(one)
    assert [one.request_id for one in queue] == ["b", "c", "a"] and len(queue) == 3 and queue
    queue.remove_request(third)
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove_request(third)
    queue.remove_requests([first, third])
    queue.closed = True
    assert not queue and len(queue) == 1 and queue.peek_request() is second and queue.pop_request() is second
