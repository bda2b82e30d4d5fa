"""Decision parity: whatever the engine's loop decided, the simulator's scheduler decides from the recorded instants."""

from __future__ import annotations

import dataclasses
import os
import zlib

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine's extra is not installed")

from random_runs import SHIPPED, random_scenario, serve, with_more

from serving import policies
from serving.errors import InputError
from serving.kv_pool import KVPool
from serving.records import open_run
from serving.scenario import from_mapping
from validate.parity import parity, read, replay
from validate.rerun import differences

WORKLOADS = int(os.environ.get("TWINSERVE_PARITY_WORKLOADS", "4"))  # a policy; 200 is the figure to reach offline
SIMULATED = [("batching", name) for name in policies.names("batching")]


@pytest.mark.parametrize("focus", SHIPPED, ids=" ".join)
def test_zero_differing_plans_on_random_workloads(focus, tmp_path):
    plans = preemptions = 0
    for number in range(WORKLOADS):
        scenario, rng = random_scenario(zlib.crc32(" ".join(focus).encode()) % 10**6 + number, focus)
        loop, _ = serve(scenario, rng, tmp_path / "run", wall=number % 4 == 3)
        result = parity(tmp_path / "run")
        assert result.differing_plans == 0, (number, result.first_difference)
        plans += result.plans
        preemptions += loop.scheduler.preemptions
    assert plans > 20 * WORKLOADS and (preemptions or WORKLOADS < 25)


@pytest.mark.parametrize("number", range(16))
def test_recorded_durations_give_the_engines_instants_exactly(number, tmp_path):
    scenario, rng = random_scenario(77_000 + number, SIMULATED[number % len(SIMULATED)])
    serve(scenario, rng, tmp_path / "run", aborts=False)
    assert differences(tmp_path / "run", stepwise=True) == []
    assert differences(tmp_path / "run", stepwise=False) == []


@pytest.mark.parametrize("number", range(12))
def test_drafts_adapters_and_streams_replay_too(number, tmp_path):
    scenario, rng = random_scenario(55_000 + number)
    scenario = with_more(scenario, rng)
    accepted = 0
    for aborts in (True, False):
        serve(scenario, rng, tmp_path / "run", aborts=aborts, vocab=3)
        result = parity(tmp_path / "run")
        assert result.differing_plans == 0, result.first_difference
        accepted += sum(got > 1 for row in open_run(tmp_path / "run").plans["accepted"] for got in row)
    assert differences(tmp_path / "run", stepwise=True) == []
    assert differences(tmp_path / "run", stepwise=False) == []
    assert accepted > 5 or scenario.speculation is None


POLICIES = """
import random
import time

class FlippedTie:
    def key(self, request, queue):
        return (request.arrival_s, -request.request_id, request.request_id)

class WallClock:
    def key(self, request, queue):
        return (time.perf_counter_ns() // 64 % 5, request.request_id)

class Chance:
    def choose(self, running, beneficiary):
        return random.choice(list(running)) if beneficiary is None else running.latest(beneficiary.request.priority)
"""


def crowded(**policy):
    """A burst on a small pool: many ties, many preemptions."""
    raw = {
        "version": 1, "name": "crowded", "seed": 5, "llm": "smollm2-135m", "cluster": {"gpu": "h100-sxm"},
        "kv_cache": {"block_tokens": 4, "blocks": 40},
        "policy": {"batching": {"name": "chunked_prefill", "max_batch_tokens": 40, "max_batch_seqs": 12}, **policy},
        "workload": {
            "requests": 60, "arrivals": {"process": "all_at_once"}, "prompt_tokens": {"dist": "uniform", "min": 4, "max": 60},
            "output_tokens": {"dist": "uniform", "min": 5, "max": 30},
            "prefix": {"groups": 4, "tokens": {"dist": "uniform", "min": 8, "max": 30}, "zipf_exponent": 0.5},
        },
    }  # fmt: skip
    return from_mapping(raw)


def served(scenario, out):
    loop, _ = serve(scenario, np.random.default_rng(1), out, aborts=False)
    assert loop.scheduler.preemptions > 10
    return read(open_run(out))


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "mutants.py"
    path.write_text(POLICIES)
    return path


def test_the_crowded_run_itself_is_in_parity(tmp_path):
    assert replay(served(crowded(), tmp_path / "run")).differing_plans == 0


def test_a_flipped_tie_is_caught(tmp_path, policy_file):
    recorded = served(crowded(ordering=f"{policy_file}:FlippedTie"), tmp_path / "run")
    assert replay(recorded).differing_plans == 0
    result = replay(dataclasses.replace(recorded, scenario=crowded()))
    assert result.first_difference["step"] == 0 and result.first_difference["field"] == "chunks"


@pytest.mark.parametrize(("kind", "name"), [("ordering", "WallClock"), ("preemption", "Chance")])
def test_a_policy_that_depends_on_more_than_its_view_is_caught(tmp_path, policy_file, kind, name):
    result = parity_of_run(crowded(**{kind: f"{policy_file}:{name}"}), tmp_path)
    assert result.differing_plans > 0 and result.first_difference is not None


def parity_of_run(scenario, folder):
    served(scenario, folder / "run")
    return parity(folder / "run")


def test_a_pool_that_is_one_block_off_is_caught(tmp_path):
    recorded = served(crowded(), tmp_path / "run")
    cache = recorded.scenario.kv_cache
    smaller = recorded.scenario.model_copy(update={"kv_cache": cache.model_copy(update={"blocks": cache.blocks - 1})})
    assert replay(dataclasses.replace(recorded, scenario=smaller)).differing_plans > 0


def one_token_more(pool, tokens):
    return -(-(tokens + 1) // pool.block_tokens)


def newest_first(pool, count):
    """Evict what was released last."""
    pool._idle = type(pool._idle)(reversed(pool._idle.items()))
    evict(pool, count)
    pool._idle = type(pool._idle)(reversed(pool._idle.items()))


evict = KVPool._evict


@pytest.mark.parametrize(("method", "mutant"), [("blocks_for", one_token_more), ("_evict", newest_first)])
def test_a_pool_that_counts_or_evicts_wrongly_is_caught(tmp_path, monkeypatch, method, mutant):
    recorded = served(crowded(), tmp_path / "run")
    monkeypatch.setattr(KVPool, method, mutant)
    assert replay(recorded).differing_plans > 0


def test_what_was_refused_must_be_refused_again(tmp_path):
    recorded = served(crowded(admission={"name": "fits", "max_queue": 40}), tmp_path / "run")
    assert replay(recorded).differing_plans == 0
    result = replay(dataclasses.replace(recorded, scenario=crowded()))
    assert result.first_difference["field"] == "admission"


@pytest.mark.parametrize("damage", ["blocks", "requests", "plans"])
def test_a_run_that_cannot_be_replayed_is_refused_by_name(tmp_path, damage):
    serve(crowded(), np.random.default_rng(1), tmp_path / "run", aborts=False)
    run = open_run(tmp_path / "run")
    if damage == "blocks":
        run.info["scenario"]["kv_cache"].pop("blocks")
    elif damage == "requests":
        run.info["scenario"]["workload"]["requests"] = 7
    else:
        (tmp_path / "run" / "plans.parquet").unlink()
    with pytest.raises(InputError, match={"blocks": "kv_cache.blocks", "requests": "is not in the scenario's workload", "plans": "plans.parquet"}[damage]):
        read(run)


def test_a_refusal_in_answer_to_the_very_last_step_comes_after_its_commit(tmp_path):
    """A circuit breaker opens with the last commit and refuses what a user sends at that instant: no plan follows that could say so."""
    raw = crowded(admission={"name": "burn_rate", "budget": 0.01, "burn": 1.0, "least": 1, "sheds_from": 0}).resolved()
    raw["slo"] = {"default": {"ttft_ms": 0.001}}
    raw["workload"] |= {"requests": 2, "arrivals": {"process": "closed_loop", "users": 1}}
    serve(from_mapping(raw), np.random.default_rng(1), tmp_path / "run", aborts=False)
    table = open_run(tmp_path / "run").requests
    assert table["status"].tolist() == ["completed", "rejected"] and table["arrival_s"][1] == table["finish_s"][0]
    assert parity(tmp_path / "run").differing_plans == 0


def test_turns_whose_arrival_counts_from_the_start_of_their_session_are_in_parity(tmp_path):
    raw = crowded().resolved()
    del raw["workload"]["prefix"]
    raw["workload"]["arrivals"] = {"process": "poisson", "rate_rps": 40.0}
    raw["workload"]["reasoning"] = {name: {"dist": "uniform", "min": 1, "max": 4} for name in ("rounds", "tokens", "verify_tokens")}
    serve(from_mapping(raw), np.random.default_rng(1), tmp_path / "run", aborts=False)
    assert parity(tmp_path / "run").differing_plans == 0
