"""The terminal's table says what the numbers say, in the width it has, in ASCII when piped; the bottleneck is the right one."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from serving.scenario import Slo
from sim.bottleneck import Fleet, bottleneck, load_words, use
from sim.tables import print_run

FLEET = Fleet(
    llm="llama-3.1-8b", gpu="h100-sxm", replicas=2, tensor_parallel=1, gpus_per_replica=1, max_batch_seqs=256, closed_loop=False,
    active_parameters=8_030_000_000, attention_flops_per_token_pair=4 * 32 * 4096, gpu_weight_bytes=16.06e9, gpu_kv_bytes_per_token=131_072, gpu_flops=989e12,
    gpu_memory_bytes_per_s=3.35e12, kv_tokens=400_000,
)  # fmt: skip

SLO = Slo.model_validate({"default": {"ttft_ms": 500, "tpot_ms": 50}, "classes": {"p0": {"ttft_ms": 200}}})


def latencies(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": mean * 0.9, "p90": mean * 2, "p95": mean * 3, "p99": mean * 4, "max": mean * 5}


def summary(**changes) -> dict:
    base = {
        "schema_version": 1, "scenario": "chat-8b", "seed": 7, "duration_s": 1000.0,
        "requests": {"arrived": 20_000, "completed": 19_990, "rejected": 10, "failed": 0, "preempted": 0},
        "ttft_s": latencies(0.2), "tpot_s": latencies(0.02), "itl_s": latencies(0.021), "e2e_s": latencies(4.0), "queue_s": latencies(0.01),
        "prompt_tokens_per_s": 20_000.0, "output_tokens_per_s": 4000.0, "requests_per_s": 20.0, "goodput_rps": 19.0,
        "slo_attainment": {"overall": 0.995, "by_class": {"p0": 0.97, "p1": 1.0}}, "preemptions": 0, "prefix_cache_hit_rate": 0.0,
        "kv_utilisation": {"mean": 0.3, "max": 0.6}, "gpu_busy_fraction": 0.9, "load_factor": 0.93, "steps": 100_000, "events": 5,
        "cost_usd": 1.0, "usd_per_million_output_tokens": 0.31,
    }  # fmt: skip
    return base | changes


def printed(width=None, **changes) -> str:
    out = io.StringIO()
    print_run(summary(**changes), FLEET, SLO, out, width)
    return out.getvalue()


def test_all_that_a_planner_asks_for_is_there_in_ascii_and_80_columns():
    text = printed()
    assert text.isascii() and max(map(len, text.splitlines())) <= 80 and "\x1b" not in text
    for phrase in (
        "llama-3.1-8b on 2 x h100-sxm, seed 7", "19,990 of 20,000 requests", "10 rejected", "Time to first token (ms)", "800", "Goodput", "0.93",
        "near saturation", "$0.31", "60.0% at the fullest", "97.00%", "MISSED", "met", "TTFT <= 200 ms, TPOT <= 50 ms", "Bottleneck: ",
    ):  # fmt: skip
        assert phrase in text


def test_an_empty_run_prints_dashes():
    nothing = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    text = printed(
        ttft_s=nothing, tpot_s=nothing, itl_s=nothing, e2e_s=nothing, queue_s=nothing, requests_per_s=None, goodput_rps=None, cost_usd=None,
        prompt_tokens_per_s=None, output_tokens_per_s=None, usd_per_million_output_tokens=None, load_factor=None, gpu_busy_fraction=None,
        kv_utilisation={"mean": None, "max": 0.0}, requests={"arrived": 0, "completed": 0, "rejected": 0, "failed": 0, "preempted": 0},
        slo_attainment={"overall": None, "by_class": {"p0": None, "p1": None}}, prefix_cache_hit_rate=None,
    )  # fmt: skip
    assert "no request completed" in text and "None" not in text


def test_names_are_text_and_never_markup():
    text = printed(scenario="[red]odd[/nothing]", slo_attainment={"overall": 1.0, "by_class": {"[/]": 1.0}})
    assert "[red]odd[/nothing]" in text and "[/]" in text


def test_long_waits_are_told_in_seconds():
    assert "In the queue (s)" in printed(queue_s=latencies(30.0))


@pytest.mark.parametrize(
    ("changes", "fleet", "name"),
    [
        ({"prompt_tokens_per_s": 80_000.0, "steps": 60_000}, FLEET, "compute"),
        ({"prompt_tokens_per_s": 2_000.0, "output_tokens_per_s": 9_000.0, "steps": 250_000}, FLEET, "memory bandwidth"),
        ({"preemptions": 50, "kv_utilisation": {"mean": 0.9, "max": 1.0}}, FLEET, "KV capacity"),
        ({"queue_s": latencies(2.0), "kv_utilisation": {"mean": 0.9, "max": 0.99}}, FLEET, "KV capacity"),
        ({"queue_s": latencies(2.0)}, replace(FLEET, max_batch_seqs=20), "queueing"),
        ({}, replace(FLEET, closed_loop=True), "the clients"),
        ({"gpu_busy_fraction": 0.2}, FLEET, "none"),
        ({"load_factor": 0.2}, FLEET, "none at this load, 20% of what the fleet can serve; memory bandwidth"),
        ({"load_factor": 0.2, "queue_s": latencies(2.0)}, FLEET, "memory bandwidth"),
    ],
)
def test_the_bottleneck_is_named_from_the_numbers(changes, fleet, name):
    sentence = bottleneck(summary(**changes), fleet, SLO)
    assert sentence.startswith(f"Bottleneck: {name}") and sentence.endswith(".")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"itl_s": latencies(0.02) | {"p50": 0.02, "p99": 0.2}, "ttft_s": latencies(0.02)}, "compute of prompts"),
        ({"ttft_s": latencies(0.2), "queue_s": latencies(0.15)}, "queueing in bursts"),
        ({"ttft_s": latencies(0.02), "itl_s": latencies(0.02) | {"p99": 0.03}}, "none at this load"),
    ],
)
def test_objectives_missed_with_room_to_spare_have_a_reason(changes, name):
    missed = summary(load_factor=0.4, slo_attainment={"overall": 0.9, "by_class": {"p0": 0.9}}, **changes)
    assert bottleneck(missed, FLEET, SLO).startswith(f"Bottleneck: {name}")
    assert bottleneck(missed | {"slo_attainment": {"overall": 1.0, "by_class": {"p0": 1.0}}}, FLEET, SLO).startswith("Bottleneck: none")


def test_use_by_hand():
    # One GPU-second of steps in every 1/0.9 s and replica: 24,000 tokens/s over 2 replicas busy 90 % of the time.
    used = use(summary(), FLEET)
    flops_per_s = 2 * 8.03e9 * 24_000 + 4 * 32 * 4096 * 20_000 * 500
    assert used.compute == pytest.approx(flops_per_s / (2 * 0.9) / 989e12)
    step_bytes = 16.06e9 + 0.3 / 0.9 * 400_000 * 131_072
    assert used.bandwidth == pytest.approx(100_000 * step_bytes / 1800 / 3.35e12)
    assert used.running == pytest.approx(20 * 3.99 / 2)


@pytest.mark.parametrize(("rho", "word"), [(None, "closed loop"), (0.3, "room"), (0.8, "bursts"), (0.95, "near saturation"), (1.2, "OVERLOADED")])
def test_words_for_the_load_factor(rho, word):
    assert word in load_words(rho)
