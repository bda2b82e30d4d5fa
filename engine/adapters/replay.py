"""A client that replays a scenario's requests against an OpenAI-compatible server: arrivals at their times, lengths pinned, prompts of random tokens.

``python -m engine.adapters.replay SCENARIO --url http://127.0.0.1:8000 --model NAME``. The same seed makes the same requests as in the
simulator and in our own engine. Needs httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from engine.prompts import Prompts
from serving.errors import InputError
from serving.request import Arrival
from serving.scenario import Scenario, load
from serving.workload import follows_answers, open_arrivals

WAIT_S = 900.0  # for the slowest answer
IN_ORDER_S = 0.5  # how long a request waits for the one ahead of it to be accepted


def requests_of(scenario: Scenario, max_model_len: int) -> list[Arrival]:
    """The scenario's requests. Raises InputError for clients that wait for answers: those have no arrival times of their own."""
    if follows_answers(scenario.workload):
        raise InputError("workload", "only open arrivals are replayed", "no closed loop, no sessions")
    cache = scenario.kv_cache
    return list(
        open_arrivals(
            scenario.workload, seed=scenario.seed, block_tokens=cache.block_tokens, max_model_len=max_model_len,
            prefix_caching=cache.prefix_caching, slo=scenario.slo,
        )
    )  # fmt: skip


def body_of(arrival: Arrival, prompts: Prompts, model: str) -> dict[str, Any]:
    """The completion request of ``arrival``."""
    return {
        "model": model, "prompt": prompts.tokens(arrival.request), "max_tokens": arrival.output_tokens, "min_tokens": arrival.output_tokens,
        "ignore_eos": True, "temperature": 0.0, "stream": True, "priority": arrival.request.priority,
    }  # fmt: skip


async def replay(arrivals: list[Arrival], prompts: Prompts, url: str, model: str) -> list[str]:
    """Send every request at its time, in order: none before the one ahead of it is accepted. Returns what went wrong, a sentence each."""
    import httpx

    bodies = [body_of(arrival, prompts, model) for arrival in arrivals]
    problems: list[str] = []
    begin_s = time.monotonic()

    accepted = [asyncio.Event() for _ in arrivals]

    async def one(client: httpx.AsyncClient, place: int, arrival: Arrival, body: dict[str, Any]) -> None:
        await asyncio.sleep(begin_s + arrival.request.arrival_s - time.monotonic())
        if place:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(accepted[place - 1].wait(), IN_ORDER_S)
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                accepted[place].set()
                text = "".join([line async for line in answer.aiter_lines()][-1:]) if answer.is_success else (await answer.aread()).decode()
        except httpx.HTTPError as error:
            problems.append(f"request {arrival.request.request_id}: {type(error).__name__}: {error}")
            return
        finally:
            accepted[place].set()
        if not answer.is_success:
            problems.append(f"request {arrival.request.request_id}: {answer.status_code} {text[:200]}")

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    async with httpx.AsyncClient(timeout=httpx.Timeout(WAIT_S), limits=limits, trust_env=False) as client:
        await asyncio.gather(*(one(client, place, *pair) for place, pair in enumerate(zip(arrivals, bodies))))
    return problems


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Replay a scenario against an OpenAI-compatible server.")
    parser.add_argument("scenario")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    scenario = load(Path(arguments.scenario), arguments.overrides, arguments.seed)
    arrivals = requests_of(scenario, arguments.max_model_len)
    prompts = Prompts(scenario.seed, arguments.vocab, scenario.kv_cache.block_tokens)
    problems = asyncio.run(replay(arrivals, prompts, arguments.url, arguments.model))
    print(json.dumps({"sent": len(arrivals), "problems": problems}))
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
