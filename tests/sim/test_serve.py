"""The simulator behind HTTP: the times of its tokens are those of a simulation, whoever asks and whoever hangs up."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")

import httpx
from asgi import Call

import twinserve
from serving.http.app import build_app
from serving.scenario import Scenario, from_mapping
from sim.live import SimBackend

ROOT = Path(__file__).resolve().parents[2]


def scenario(**parts) -> Scenario:
    """One GPU and lengths of 40 tokens; ``parts`` replace or extend it."""
    plain = {
        "version": 1, "name": "live", "llm": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm"},
        "workload": {"requests": 10, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "prompt_tokens": 100, "output_tokens": 40},
    }  # fmt: skip
    return from_mapping({**plain, **parts})


def scene(backend: SimBackend, act, **limits) -> None:
    """Run ``act(app)`` while simulated time goes by."""

    async def play() -> None:
        app = build_app(backend, drain_s=0.0, **limits)
        async with app.router.lifespan_context(app):
            await act(app)

    asyncio.run(play())


def tokens(count: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(count)]


def test_fifty_streams_at_once_get_all_their_tokens_in_order():
    backend = SimBackend(scenario(), speed=20.0)

    async def act(app) -> None:
        body = {"max_tokens": 30, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        calls = [Call(app, "/v1/completions", {**body, "prompt": tokens(50 + index, index)}) for index in range(50)]
        for index, call in enumerate(calls):
            *chunks, usage, done = (await call.finished()).events()
            assert call.text() == " token" * 30 and len(chunks) == 30 and done == "[DONE]"
            assert usage["usage"] == {"prompt_tokens": 50 + index, "completion_tokens": 30, "total_tokens": 80 + index}
        assert backend.streams.live == 0 and backend.streams.telemetry.generated == 1500
        backend.cluster.replicas[0].scheduler.check()

    scene(backend, act)


def test_no_answer_comes_before_its_time():
    backend = SimBackend(scenario(), speed=4.0)

    async def act(app) -> None:
        began = time.monotonic()
        await Call(app, "/v1/completions", {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}).finished()
        assert (time.monotonic() - began) * 4.0 >= backend.cluster.replicas[0].last_end_s - 0.01

    scene(backend, act)


def test_clients_that_hang_up_give_their_blocks_back():
    backend = SimBackend(scenario(kv_cache={"blocks": 200}), speed=5.0)

    async def act(app) -> None:
        body = {"max_tokens": 900, "ignore_eos": True}
        calls = [Call(app, "/v1/completions", {**body, "prompt": tokens(300, index), "stream": index % 2 == 0}) for index in range(12)]
        await calls[0].until(3)
        pool = backend.cluster.replicas[0].scheduler.pool
        assert pool.free < pool.total
        for call in calls:
            call.hang_up()
        await asyncio.gather(*(call.finished() for call in calls))
        answer = await Call(app, "/v1/completions", {"prompt": "who is left", "max_tokens": 2, "ignore_eos": True}).finished()
        assert answer.status == 200
        assert pool.free == pool.total and not backend._here
        backend.cluster.replicas[0].scheduler.check()

    scene(backend, act)


def test_an_admission_policy_is_back_pressure():
    backend = SimBackend(scenario(policy={"admission": {"name": "fits", "max_queue": 2}, "batching": {"max_batch_seqs": 1}}), speed=20.0)

    async def act(app) -> None:
        calls = [Call(app, "/v1/completions", {"prompt": tokens(40, index), "max_tokens": 20, "ignore_eos": True}) for index in range(6)]
        await asyncio.gather(*(call.finished() for call in calls))
        refused = [call for call in calls if call.status == 429]
        assert refused and all(call.headers["retry-after"] and call.json()["error"]["code"] == "max_queue" for call in refused)
        assert {call.status for call in calls} == {200, 429} and not backend._here

    scene(backend, act)


def test_a_prompt_beyond_the_pool_is_refused_and_the_rest_is_served():
    backend = SimBackend(scenario(kv_cache={"blocks": 11}, max_model_len=150), speed=50.0)

    async def act(app) -> None:
        assert (await Call(app, "/v1/completions", {"prompt": tokens(151)}).finished()).status == 400
        assert (await Call(app, "/v1/completions", {"prompt": tokens(100), "max_tokens": 50, "ignore_eos": True}).finished()).status == 200

    scene(backend, act)


def test_answers_have_the_scenarios_lengths_unless_their_end_is_ignored():
    classes = [{"name": "short", "priority": 0, "output_tokens": 3}, {"name": "long", "priority": 5, "output_tokens": 9}]
    work = {"requests": 1, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "prompt_tokens": 100, "classes": classes}
    backend = SimBackend(scenario(workload=work), speed=100.0)

    async def ask(app, **body) -> tuple[int, str]:
        call = await Call(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **body}).finished()
        return call.json()["usage"]["completion_tokens"], call.json()["choices"][0]["finish_reason"]

    async def act(app) -> None:
        assert await ask(app) == (3, "stop")
        assert await ask(app, priority=5) == (9, "stop")
        assert await ask(app, priority=5, max_tokens=4) == (4, "length")
        assert await ask(app, max_completion_tokens=7, ignore_eos=True) == (7, "length")

    scene(backend, act)


def test_equal_prompts_hit_the_prefix_cache():
    backend = SimBackend(scenario(), speed=100.0)

    async def act(app) -> None:
        for _ in range(2):
            await Call(app, "/v1/completions", {"prompt": "the same words every time " * 20, "max_tokens": 2, "ignore_eos": True}).finished()
        state = backend.stats()[0]
        assert state.prefix_hits > 0.4 * state.prefix_queries

    scene(backend, act)


def test_when_a_policy_raises_its_requests_fail_and_the_server_stays_up(tmp_path):
    policy = tmp_path / "moody.py"
    policy.write_text(
        "class Moody:\n    def key(self, request, queue):\n        if request.prompt_tokens == 13:\n            raise KeyError('thirteen')\n"
        "        return (request.request_id,)\n    def evicts_from_s(self, request):\n        return float('inf')\n"
    )
    backend = SimBackend(scenario(policy={"ordering": f"{policy}:Moody"}), speed=20.0)

    async def act(app) -> None:
        body = {"max_tokens": 500, "ignore_eos": True, "stream": True}
        running = Call(app, "/v1/completions", {**body, "prompt": tokens(20)})
        await running.until(2)
        failed = await Call(app, "/v1/completions", {**body, "prompt": tokens(13)}).finished()
        await running.finished()
        assert failed.status == 500 and "thirteen" in failed.json()["error"]["message"]
        assert "thirteen" in running.events()[-2]["error"]["message"]
        again = await Call(app, "/v1/completions", {**body, "max_tokens": 5, "prompt": tokens(20)}).finished()
        assert again.status == 200 and again.text() == " token" * 5

    scene(backend, act)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["edge-to-centre"], "sites"), (["quickstart", "--set", "stages=[{name: safety, service_s: 0.01}]"], "stages"), (["quickstart", "--speed", "0"], "--speed"),
        (["quickstart", "--port", "70000"], "--port"), (["quickstart", "--drain-s", "-1"], "--drain-s"), (["no-such-scenario"], "no-such-scenario"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_told_in_a_line(capsys, arguments, word):
    assert twinserve.main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1


@pytest.fixture
def server():
    """``twinserve serve`` as a process on a port of its own: (base address, process)."""
    command = [sys.executable, str(ROOT / "twinserve.py"), "serve", "quickstart", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            yield re.search(r"http://\S+", line)[0], process
        finally:
            process.kill()


def test_over_a_real_socket_tokens_come_one_by_one_and_a_signal_ends_it_properly(server):
    address, process = server
    body = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as response:
        came = [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]
    assert len(came) == 12
    # A step takes 7 ms: tokens held back by the network's buffers would all come at once.
    assert came[-1] - came[0] > 0.05 and np.count_nonzero(np.diff(came) > 0.002) > 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


def test_a_load_generator_from_elsewhere_measures_what_was_simulated(server, tmp_path):
    generator = shutil.which("servebench", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if generator is None:
        pytest.skip("the extra 'load' is not installed")
    address, _ = server
    command = [
        generator, "run", "--url", f"{address}/v1", "--model", "llama-3.1-8b", "--concurrency", "8", "--num-requests", "24", "--input-len", "64",
        "--output-len", "24", "--seed", "1", "--warmup", "1", "--out", str(tmp_path / "run.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 ok, 0 failed" in done.stdout
    scraped = httpx.get(f"{address}/metrics", timeout=30).text
    total = {name: float(value) for name, value in re.findall(r"^twinserve:(\w+)\{[^}]*\} (\S+)$", scraped, re.MULTILINE)}
    assert total["generation_tokens_total"] == 25 * 24
    simulated_s = total["inter_token_latency_seconds_sum"] / total["inter_token_latency_seconds_count"]
    level = json.loads((tmp_path / "run.json").read_text())["levels"][0]
    measured_s = np.mean([(request["e2e"] - request["ttft"]) / (request["output_tokens"] - 1) for request in level["requests"]])
    assert measured_s > 0.9 * simulated_s  # never faster than simulated; how much slower is up to the machine
