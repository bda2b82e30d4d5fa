"""The situations in which a scheduler's properties are checked: scenarios with a workload each, and what must be seen in them.

S1 to S12 are reports from the field, as deterministic cases. Everything that ``watch`` checks holds in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serving.request import Request
from serving.rng import stream
from validate.regress.shrink import Row
from validate.regress.watch import Watch

Verify = Callable[[Watch], str | None]  # what is wrong, or None
Judge = Callable[[Watch, Sequence[Row]], str | None]
_SLOTS = 4
_ADAPTERS = (*[""] * 3, "A1", "A3", "A2", "A4", *["A5"] * 4, "", "", "A1", "A2", "A3")  # of the requests of S12
_WINDOW_GRACE_S = 1.0  # a batching window holds requests back: so much is tolerated


@dataclass(frozen=True, slots=True)
class Case:
    """One property: ``scenario`` without its workload, ``rows`` of a plain-jsonl trace, ``rule`` in words.

    After a run ``verify`` looks at what came of these very rows, and ``judge`` at what came of any part of them.
    """

    name: str
    rule: str
    scenario: dict[str, Any]
    rows: tuple[Row, ...]
    verify: Verify | None = None
    needs: str = ""  # a batching option without which the property makes no sense
    judge: Judge | None = None


def _scenario(blocks: int, *, seqs: int = 16, tokens: int = 2048, ordering: Any = "fcfs", replicas: int = 1, **batching: Any) -> dict[str, Any]:
    return {
        "version": 1, "llm": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm", "replicas": replicas}, "kv_cache": {"blocks": blocks},
        "policy": {"ordering": ordering, "batching": {"name": "chunked_prefill", "max_batch_tokens": tokens, "max_batch_seqs": seqs, **batching}},
    }  # fmt: skip


def _row(arrival_s: float, prompt: int, output: int, **more: Any) -> Row:
    return {"arrival_s": arrival_s, "prompt_tokens": prompt, "output_tokens": output, **more}


def _late(watch: Watch, request_id: int, steps: int, since_s: float = -math.inf) -> str | None:
    """Say so when a request was not admitted within ``steps`` of being seen, or of ``since_s`` from which it could be."""
    seen = watch.requests.get(request_id)
    if seen is None:
        status = watch.statuses.get(request_id, "left without an answer")
        return None if status.startswith("rejected") else f"request {request_id} never queued: {status}"
    grace_s = 0.0 if type(watch.policies.window).__name__ == "None_" else _WINDOW_GRACE_S
    waited = seen.admitted_step - seen.seen_step
    if seen.admitted_step >= 0 and (waited <= steps or seen.admitted_s - max(seen.arrival_s, since_s) <= grace_s):
        return None
    return f"request {request_id} " + (f"was admitted {waited} steps after it came" if seen.admitted_step >= 0 else "was never admitted")


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem), None)


def _s1(watch: Watch) -> str | None:
    status = watch.statuses.get(0, "no answer")
    if not status.startswith("rejected"):
        return f"request 0 of 100,000 tokens cannot fit 76,640 and was not refused at once: {status}"
    return _first(*(_late(watch, each, 2) for each in (1, 2, 3)))


def _s2(watch: Watch) -> str | None:
    if watch.preemptions > 1:
        return f"the only request was preempted {watch.preemptions} times"
    return None if watch.statuses.get(0) in ("stop", "length", "kv_capacity") else f"it ended as {watch.statuses.get(0)}"


def _s4(watch: Watch) -> str | None:
    late = _late(watch, 2, 2)
    if late:
        return f"{late} though it fits: hidden behind a head that does not"
    return f"{watch.steps} steps for 122" if watch.steps > 150 else None


def _s7(watch: Watch) -> str | None:
    evicts_from = getattr(watch.policies.ordering, "evicts_from_s", None)
    if evicts_from is None or 5 not in watch.requests:
        return None  # it promises no eviction
    from_s = evicts_from(Request(5, watch.requests[5].arrival_s, 64, 40, priority=0))
    return None if from_s > watch.requests[5].arrival_s else _late(watch, 5, 1)


def _s9(watch: Watch) -> str | None:
    long = watch.requests.get(0)
    steps = 0 if long is None else long.left_step - long.seen_step
    slow = f"the long prompt took {steps} steps instead of 44" if steps > 1.1 * 44 else None
    return _first(_late(watch, 1, 3), slow)


def _s12(watch: Watch, rows: Sequence[Row]) -> str | None:
    """Whoever waits, waits for a slot: so many adapters may wait as there are more of them than slots, and nobody without one."""
    late = {index: words for index in range(len(rows)) if (words := _late(watch, index, 2))}
    waiting = sorted({rows[index].get("adapter", "") for index in late})
    spare = max(0, len({row["adapter"] for row in rows if row.get("adapter")}) - _SLOTS)
    if "" in waiting or len(waiting) > spare:
        index = next(index for index in reversed(late) if waiting[0] == rows[index].get("adapter", ""))
        return f"{late[index]} though it needs no slot" if "" in waiting else f"{late[index]}: {len(waiting)} adapters wait, {spare} must"
    return None


def _mixed(seed: int, count: int, rate_rps: float, *, prompt: tuple[int, int], output: tuple[int, int], priorities: int) -> tuple[Row, ...]:
    """Random requests, a third of which begin with one of three shared prefixes."""
    rng = stream(seed, "regress.storm")
    rows, at_s = [], 0.0
    for index in range(count):
        at_s += float(rng.exponential(1 / rate_rps)) if rng.random() < 0.8 else 0.0
        tokens = int(rng.integers(*prompt))
        row = _row(round(at_s, 6), tokens, int(rng.integers(*output)), priority=int(rng.integers(0, priorities)))
        if tokens >= 32 and rng.random() < 0.33:
            family = int(rng.integers(0, 3))
            full = tokens // 16
            shared = int(rng.integers(1, full + 1))
            row |= {"hash_ids": [1000 * family + i if i < shared else 100_000 + 1000 * index + i for i in range(full)], "hash_tokens": 16}
        rows.append(row)
    return tuple(rows)


def _overload() -> tuple[Row, ...]:
    return tuple(_row(round(0.04 * i, 6), 1500 if i % 10 == 3 else 100, 60) for i in range(240))


def _affinity() -> tuple[Row, ...]:
    """Requests of 50 blocks of which 48 are cached, 1 in 20 with nothing cached, faster than they are served."""
    rows = []
    for i in range(200):
        cold = i % 20 == 7
        ids = [(10_000 + 100 * i if cold or block >= 48 else 0) + block for block in range(50)]
        rows.append(_row(round(0.02 * i, 6), 800, 40, hash_ids=ids, hash_tokens=16))
    return tuple(rows)


STRICT = {"name": "priority", "preempt": "strict"}


def _storms() -> Sequence[Case]:
    tight = {"prompt": (1, 400), "output": (1, 120), "priorities": 3}
    rule = "a tight pool, bursts, priorities and shared prefixes: all rules of a plan, no block leaked, nobody forgotten"
    return (
        Case("storm-fcfs", rule, _scenario(70, seqs=12, tokens=256), _mixed(1, 120, 40.0, **tight)),
        Case("storm-priority", rule, _scenario(60, seqs=8, tokens=256, ordering=STRICT, head_of_line="skip", max_bypasses=4),
             _mixed(2, 120, 40.0, **tight)),
        Case("storm-fleet", rule, _scenario(70, seqs=12, tokens=256, replicas=3), _mixed(3, 120, 90.0, **tight)),
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    Case("S1", "what can never fit is refused at once, naming the limit, and holds nobody up", _scenario(4791),
         (_row(0.0, 100_000, 8), *(_row(0.0, 200, 8) for _ in range(3))), _s1),
    Case("S2", "a request that reaches the wall of the pool ends; it does not preempt itself for ever", _scenario(64),
         (_row(0.0, 1000, 24, max_output_tokens=24),), _s2),
    Case("S4", "a head that does not fit hides nothing that does", _scenario(270, head_of_line="skip"),
         (_row(0.0, 3995, 80), _row(0.2, 1600, 34), _row(0.25, 160, 10)), _s4, "head_of_line"),
    Case("S7", "with strict preemption the more urgent is in within a step; equals never evict each other", _scenario(400, seqs=4, ordering=STRICT),
         (*(_row(0.0, 64, 300, priority=1) for _ in range(4)), _row(0.5, 64, 40, priority=1), _row(0.6, 64, 40, priority=0)), _s7),
    Case("S9", "a chunk limit keeps a very long prompt from blocking a short one", _scenario(8000, tokens=4096, max_chunk_tokens=3247),
         (_row(0.0, 120_104, 8), _row(1.0, 101, 8)), _s9),
    Case("S11", "affinity to the cache starves nobody", _scenario(2000, seqs=4, ordering={"name": "cache_affinity", "max_passes": 32}), _affinity()),
    Case("S12", "who waits for an adapter slot keeps nobody else waiting", {**_scenario(400), "adapters": {"slots": _SLOTS}},
         tuple(_row(0.0, 20, 60, **({"adapter": name} if name else {})) for name in _ADAPTERS), judge=_s12),
    Case("starvation", "under overload nobody is passed without end", _scenario(3000, seqs=4), _overload()),
    *_storms(),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def serial_steps(rows: Sequence[Row], scenario: dict[str, Any]) -> int:
    """Steps of serving one request after the other."""
    batching = scenario["policy"]["batching"]
    chunk = batching.get("max_chunk_tokens") or batching["max_batch_tokens"]
    return sum(math.ceil(row["prompt_tokens"] / chunk) + row["output_tokens"] for row in rows)
