"""Fleets behind HTTP: pools, autoscaling, faults and releases go on as in an offline simulation, and tokens come at the same instants."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")

from asgi import Call

from serving.clients import OpenLoop
from serving.errors import InputError
from serving.http.app import build_app
from serving.http.backend import Generation
from serving.request import Arrival, Request
from serving.scenario import Scenario, from_mapping, load
from sim.attach import attach
from sim.fleet import build_fleet, new_metrics, resolve_fleet
from sim.live import LOST, SimBackend

GPU = {"gpu": "h100-sxm"}
POOLS = {
    "gpu": "h200-sxm", "topology": "dgx-h200", "pools": [{"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 2, "max_batch_seqs": 8}],
}  # fmt: skip
QUICK_START = {"schedule_s": 0.5, "compile_s": 0.1, "graph_capture_s": 0.1, "warmup_s": 0.1}
GROWS = {**GPU, "autoscaling": {
    "policy": {"name": "queue_depth", "tokens_per_replica": 400.0, "hold_s": 5.0}, "minimum": 1, "maximum": 3, "interval_s": 1.0, "cold_start": QUICK_START,
}}  # fmt: skip


def losing(replica: int, at_s: float, **more: object) -> dict:
    """Faults that lose one replica for a moment."""
    return {"events": [{"kind": "replica_loss", "at_s": at_s, "for_s": 0.2, "replica": replica}], "cold_start": QUICK_START, **more}


def scenario(**parts: object) -> Scenario:
    work = {"requests": 10, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "prompt_tokens": 100, "output_tokens": 40}
    return from_mapping(
        {"version": 1, "name": "live", "llm": "llama-3.1-8b", "max_model_len": 8192, "cluster": GPU, "workload": work, **parts}
    )


class Hands:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def arrivals_of(count: int, mean_gap_s: float, output: int = 90) -> list[Arrival]:
    rng, made, at_s = np.random.default_rng(3), [], 0.0
    for request_id in range(count):
        at_s += float(rng.exponential(mean_gap_s))
        made.append(
            Arrival(Request(request_id, at_s, int(rng.integers(20, 400)), 1 + int(rng.integers(1, output)), class_name="default"), 10_000)
        )
    return made


CASES = {
    "roomy": {},
    "tight pool that preempts": {"kv_cache": {"blocks": 120}, "policy": {"batching": {"max_batch_tokens": 256, "max_batch_seqs": 32}}, "max_model_len": 1000},
    "two replicas": {"cluster": {**GPU, "replicas": 2}},
    "a step ahead": {"policy": {"batching": {"max_in_flight": 2}}},
    "a window": {"policy": {"batching": {"window": {"name": "fixed", "window_s": 0.05, "size": 4}}}},
    "pools": {"cluster": POOLS},
    "pools, the decode side answers": {"cluster": {**POOLS, "first_token": "decode"}},
    "pools short of pages": {"cluster": POOLS, "kv_cache": {"blocks": 80, "prefix_caching": False}, "max_model_len": 1000},
    "a fleet that grows": {"cluster": GROWS, "policy": {"batching": {"max_batch_seqs": 4}}},
    "a slow GPU and a stall": {"cluster": {**GPU, "replicas": 2}, "faults": {"events": [
        {"kind": "slow_gpu", "at_s": 0.1, "for_s": 0.4, "replica": 0, "factor": 3.0}, {"kind": "host_stall", "at_s": 0.3, "for_s": 0.1, "replica": 1},
    ]}},
    "a replica lost": {"cluster": {**GPU, "replicas": 2}, "faults": losing(0, 0.4), "kv_cache": {"prefix_caching": False}},
    "a prefill replica lost": {"cluster": POOLS, "faults": losing(0, 0.4), "kv_cache": {"prefix_caching": False}},
    "a decode replica lost": {"cluster": POOLS, "faults": losing(2, 0.4), "kv_cache": {"prefix_caching": False}},
    "drafts": {"speculation": {"policy": {"name": "fixed", "tokens": 4}, "acceptance": 0.7}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_live_tokens_come_at_the_instants_of_the_offline_simulation(case):
    """The fast simulation, which takes runs of steps, against the live one: first and last token of every request, to the bit."""
    spec, arrivals = scenario(**CASES[case]), arrivals_of(40, 0.02)
    parts, metrics = resolve_fleet(spec), new_metrics(spec, keep_rows=True)
    fleet = build_fleet(spec, parts, metrics)
    attach(fleet, spec, parts, metrics)
    OpenLoop(fleet, iter(arrivals))
    fleet.env.run()
    fleet.drain()
    offline = metrics.columns()

    clock, stamps = Hands(), defaultdict(list)
    backend = SimBackend(spec, clock=clock)
    deliver = backend.streams.deliver

    def delivered(end_s: float, tokens: dict) -> None:
        for request_id, new in tokens.items():
            stamps[request_id] += [end_s] * len(new)
        deliver(end_s, tokens)

    backend.streams.deliver = delivered
    for request, _ in arrivals:
        while clock.now_s + 0.0137 < request.arrival_s:  # look in now and then, at no special instants
            clock.now_s += 0.0137
            backend.advance()
        clock.now_s = request.arrival_s
        backend.advance()
        content = [request.request_id * 1000 + position for position in range(request.prompt_tokens)]
        backend.submit(Generation(content, request.max_output_tokens, ignore_eos=True))
    clock.now_s += 1000.0
    backend.advance()

    assert backend.streams.live == 0 and not backend._here and not backend._repeating
    assert [len(stamps[each]) for each in range(40)] == offline["output_tokens"].tolist()
    assert [stamps[each][-1] for each in range(40)] == offline["finish_s"].tolist()
    firsts = np.array([stamps[each][0] for each in range(40)])
    if "lost" in case:
        assert (firsts <= offline["first_token_s"]).all(), "what was said before the loss is not said again"
        assert (firsts < offline["first_token_s"]).any() == ("prefill" not in case)
    else:
        assert firsts.tolist() == offline["first_token_s"].tolist()
    assert offline["preemptions"].sum() > 0 or "preempts" not in case
    assert all(np.all(np.diff(each) > 0) for each in stamps.values()) or case == "drafts"
    for replica in backend.cluster.replicas:
        replica.scheduler.check()


@pytest.mark.parametrize(
    "case", ["pools", "pools, the decode side answers", "pools short of pages", "a decode replica lost", "a prefill replica lost"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_whoever_hangs_up_between_pools_gives_everything_back(case, seed):
    """Clients go away at random instants: in a queue, while pages wait or cross, while they decode."""
    clock, rng = Hands(), np.random.default_rng(seed)
    backend = SimBackend(scenario(**CASES[case]), clock=clock)
    told = []
    depart = backend.streams.depart
    backend.streams.depart = lambda departure: (told.append(departure.request_id), depart(departure))
    for index in range(120):
        clock.now_s += float(rng.exponential(0.01))
        backend.advance()
        opened = backend.submit(
            Generation([index * 1000 + position for position in range(int(rng.integers(20, 400)))], 60, ignore_eos=True)
        )
        for request_id in rng.choice(opened.request_id + 1, 2).tolist():
            backend.abort(request_id)
            backend.advance()
    clock.now_s += 100.0
    backend.advance()
    assert sorted(told) == list(range(120)) and not backend._here and backend.cluster.in_flight == 0
    for replica in backend.cluster.replicas:
        replica.scheduler.check()
        assert replica.scheduler.pool.free == replica.scheduler.pool.total and not replica.scheduler.landing.parked
    signals = [cluster.signals for cluster in (backend.cluster.prefill, backend.cluster.decode)]
    for cluster, seen in zip((backend.cluster.prefill, backend.cluster.decode), signals):
        seen.read(cluster.replicas)
        assert [int(each) for each in seen.outstanding_tokens] == [0, 0], "the router counts nobody who has left"


def scene(backend: SimBackend, act) -> None:
    async def play() -> None:
        app = build_app(backend, drain_s=0.0)
        async with app.router.lifespan_context(app):
            await act(app)

    asyncio.run(play())


def ask(app, prompt: int, tokens: int, salt: int = 0, **more: object) -> Call:
    body = {"prompt": [salt * 1000 + position for position in range(prompt)], "max_tokens": tokens, "ignore_eos": True, **more}
    return Call(app, "/v1/completions", body)


def states(backend: SimBackend) -> list[str]:
    return [state.state for state in backend.stats()]


def test_a_client_notices_a_lost_replica_by_a_pause_only():
    backend = SimBackend(scenario(cluster={**GPU, "replicas": 2}, faults=losing(0, 1.0)), speed=10.0)

    async def act(app) -> None:
        calls = [ask(app, 50, 400, salt, stream=True) for salt in range(4)]
        for call in calls:
            await call.until(1)
        while "lost" not in states(backend):
            await asyncio.sleep(0.005)
        assert all(call.status == 200 for call in calls)
        for call in calls:
            assert (await call.finished()).text() == " token" * 400
        while states(backend)[0] != "ready":
            await asyncio.sleep(0.005)

    scene(backend, act)


def test_a_request_that_is_not_retried_fails_with_its_replica():
    backend = SimBackend(scenario(faults=losing(0, 1.0, lost_requests="fail")), speed=10.0)

    async def act(app) -> None:
        streaming, whole = ask(app, 50, 4000, 1, stream=True), ask(app, 50, 4000, 2)
        assert (await whole.finished()).status == 500 and LOST in whole.json()["error"]["message"]
        assert LOST in (await streaming.finished()).events()[-2]["error"]["message"]

    scene(backend, act)


def test_who_waits_for_a_replica_to_come_back_may_go_away_and_the_others_are_served():
    clock = Hands()
    backend = SimBackend(scenario(faults=losing(0, 1.0)), clock=clock)
    clock.now_s = 1.1
    backend.advance()
    opened = [backend.submit(Generation([index] * 20, 5, ignore_eos=True)) for index in range(3)]
    backend.advance()
    assert backend.cluster.held == 3
    backend.abort(opened[1].request_id)
    backend.advance()
    assert backend.cluster.held == 2 and opened[1].end.status == "aborted"
    clock.now_s = 100.0
    backend.advance()
    assert [stream.count for stream in opened] == [5, 0, 5] and backend.streams.live == 0


def test_adapters_are_served_by_name_within_their_slots():
    clock = Hands()
    spec = scenario(adapters={"slots": 1, "rank": 8})
    raw = spec.resolved()
    raw["workload"]["adapters"] = {"names": ["A", "B"]}
    backend = SimBackend(from_mapping(raw), clock=clock)
    assert backend.adapters == ("A", "B") and SimBackend(spec, clock=clock).adapters == ()
    opened = [backend.submit(Generation([5] * 40, 5, ignore_eos=True, adapter=name)) for name in ("A", "B", "", "A")]
    clock.now_s = 100.0
    backend.advance()
    assert [stream.count for stream in opened] == [5] * 4
    assert opened[1].end.scheduled_s >= opened[0].end.time_s > opened[2].end.scheduled_s  # B waits for the slot, others pass it
    assert backend.cluster.replicas[0].scheduler.policies.adapters.loads == 2


def test_a_fleet_grows_under_load_and_shrinks_when_nobody_comes():
    backend = SimBackend(scenario(cluster=GROWS, policy={"batching": {"max_batch_seqs": 2}}), speed=20.0)

    async def act(app) -> None:
        assert states(backend) == ["ready", "off", "off"]
        calls = [ask(app, 50, 300, salt) for salt in range(20)]
        seen = set()
        while states(backend).count("ready") < 2:
            seen.update(states(backend))
            await asyncio.sleep(0.001)
        calls += [ask(app, 50, 3, salt) for salt in range(20, 30)]
        assert {(await call.finished()).status for call in calls} == {200} and "starting" in seen
        assert sum(state.prefix_queries > 0 for state in backend.stats()) > 1, "a replica that was bought has served"
        text = backend.streams.telemetry.render(backend.stats).decode()
        assert text.count("twinserve:replica_state{") == 3 and 'engine="0",model_name="llama-3.1-8b",pool="",state="ready"' in text
        while states(backend).count("ready") > 1:
            await asyncio.sleep(0.005)
        assert (await ask(app, 50, 3).finished()).status == 200

    scene(backend, act)


def test_pools_have_their_names_in_the_metrics():
    backend = SimBackend(scenario(cluster=POOLS), speed=20.0)

    async def act(app) -> None:
        assert (await ask(app, 300, 20).finished()).status == 200
        served = {(state.pool, bool(state.prefix_queries)) for state in backend.stats()}
        assert served == {("prefill", True), ("prefill", False), ("decode", False)}

    scene(backend, act)


def test_a_release_goes_on_behind_the_server():
    stages = {
        "candidate": {},
        "warmup_s": 1,
        "verification": {"share": 0.5, "probe_s": 4, "smoke_s": 4, "comparison_s": 4},
        "stages": [],
        "least": 1,
    }
    backend = SimBackend(scenario(cluster={**GPU, "replicas": 2}, rollout=stages), speed=40.0)

    async def act(app) -> None:
        assert [state.pool for state in backend.stats()] == ["baseline"] * 2 + ["candidate"] * 2
        assert states(backend) == ["ready", "ready", "off", "off"]
        salt = 0
        while backend._release.outcome == "unfinished":
            salt += 1
            assert (await ask(app, 20, 5, salt % 100).finished()).status == 200
        assert backend._release.outcome == "promoted" and states(backend) == ["off", "off", "ready", "ready"]

    scene(backend, act)


def test_a_client_is_told_when_to_come_back_in_its_own_seconds():
    bucket = {"admission": {"name": "token_bucket", "tokens_per_s": 10.0, "burst_tokens": 100.0}}
    clock = Hands()
    backend = SimBackend(scenario(policy=bucket), speed=2.0, clock=clock)

    async def act(app) -> None:
        assert backend.submit(Generation(list(range(80)), 2)).end is None
        refused = await ask(app, 75, 2).finished()
        # 55 of 75 tokens are missing, which takes 5.5 simulated seconds: 2.75 for the client
        assert refused.status == 429 and refused.headers["retry-after"] == "3" and refused.json()["error"]["code"] == "token_bucket"
        never = await ask(app, 101, 2).finished()
        assert never.status == 429 and "retry-after" not in never.headers and "would not pass later" in never.json()["error"]["message"]

    scene(backend, act)


def test_the_breaker_tells_when_it_closes_and_a_full_queue_says_nothing():
    clock = Hands()
    backend = SimBackend(scenario(policy={"admission": {"name": "fits", "max_queue": 1}, "batching": {"max_batch_seqs": 1}}), clock=clock)
    streams = [backend.submit(Generation([index] * 20, 50, ignore_eos=True)) for index in range(3)]
    backend.advance()
    assert [stream.end and (stream.end.detail, stream.end.retry_after_s) for stream in streams][-1] == ("max_queue", None)
    breaker = {"name": "burn_rate", "budget": 0.1, "burn": 1.0, "open_s": 30.0, "least": 1, "sheds_from": 0}
    backend = SimBackend(scenario(policy={"admission": breaker}, slo={"default": {"ttft_ms": 0.001}}), clock=clock)
    backend.submit(Generation([1] * 20, 2, ignore_eos=True))
    clock.now_s = 10.0
    backend.advance()
    shed = backend.submit(Generation([2] * 20, 2))
    backend.advance()
    assert shed.end.detail == "burn_rate" and 20.0 < shed.end.retry_after_s < 30.0 and math.isfinite(shed.end.retry_after_s)


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_scenario_is_served_or_says_why_not(file):
    spec = load(str(file))
    if spec.sites or spec.front:
        with pytest.raises(InputError, match="cannot be served live"):
            SimBackend(spec)
        return
    clock = Hands()
    backend = SimBackend(spec, clock=clock)
    streams = []
    for index in range(12):
        clock.now_s += 0.05
        backend.advance()
        streams.append(backend.submit(Generation([index * 100 + position for position in range(50)], 20, ignore_eos=True)))
    backend.abort(streams[-2].request_id)
    clock.now_s += 300.0
    backend.advance()
    assert backend.streams.live == 0 and not backend._here
    answered = [stream for index, stream in enumerate(streams) if index != 10]
    assert {(stream.end.status, stream.count) for stream in answered} == {("length", 20)}
