"""The scenario's skeleton, its defaults, its round trip and its errors."""

from __future__ import annotations

import math

import pytest

from serving.errors import InputError
from serving.scenario import from_mapping, json_schema, load, names


def small(**parts: object) -> dict:
    """The least a scenario must say."""
    return {
        "name": "small",
        "llm": "llama-3.1-8b",
        "cluster": {"gpu": "h100-sxm"},
        "workload": {"requests": 10, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "prompt_tokens": 10, "output_tokens": 5},
        **parts,
    }


def problem(*overrides: str) -> InputError:
    with pytest.raises(InputError) as caught:
        load("chat-8b", overrides)
    return caught.value


def test_skeleton_of_the_contract_loads() -> None:
    scenario = load("chat-8b")
    assert scenario.policy.ordering.name == "fcfs"
    assert scenario.policy.routing.options == {"signal_age_s": 0.05}
    assert scenario.policy.batching.max_batch_tokens == 2048
    assert scenario.policy.batching.spec.name == "chunked_prefill"
    assert scenario.policy.batching.window.name == "none"
    assert [row.priority for row in scenario.workload.classes] == [0, 1]


def test_class_takes_the_objectives_it_does_not_state_from_the_default() -> None:
    slo = load("chat-8b").slo
    assert slo.targets("p0") == (0.2, 0.05, math.inf)
    assert slo.targets("p1") == (0.5, 0.05, math.inf)


@pytest.mark.parametrize("name", names())
def test_every_packaged_scenario_loads_and_survives_the_round_trip(name: str) -> None:
    scenario = load(name)
    assert from_mapping(scenario.resolved()).resolved() == scenario.resolved()
    assert scenario.name == name


def test_short_forms_equal_long_forms() -> None:
    short = from_mapping(small(latency="roofline", policy={"batching": "chunked_prefill"}))
    long = from_mapping(small(latency={"name": "roofline"}, policy={"batching": {"name": "chunked_prefill"}}))
    assert short.resolved() == long.resolved()


def test_unknown_batching_keys_are_options_unless_they_are_misspelt_knobs() -> None:
    scenario = load("chat-8b", ["policy.batching.patience={a: null, b: [1]}"])
    assert scenario.policy.batching.options == {"patience": {"a": None, "b": [1]}}
    assert from_mapping(scenario.resolved()).policy.batching.options == scenario.policy.batching.options
    assert "did you mean 'max_batch_tokens'" in problem("policy.batching.max_batch_tokns=3").hint


def test_overrides_reach_lists_short_forms_and_alternatives() -> None:
    scenario = load("chat-8b", ["workload.classes.0.share=0.5", "policy.ordering.preempt=strict", "workload.arrivals.load_factor=0.9"], seed=3)
    assert scenario.workload.classes[0].share == 0.5
    assert (scenario.policy.ordering.name, scenario.policy.ordering.options) == ("fcfs", {"preempt": "strict"})
    assert scenario.workload.arrivals.load_factor == 0.9
    assert scenario.seed == 3


@pytest.mark.parametrize(
    ("override", "where", "hint"),
    [
        ("workload.requets=3", "workload.requets", "requests"),
        ("workload.arrivals.rate=3", "workload.arrivals.rate", "rate_rps"),
        ("workload.arrivals.process=poison", "workload.arrivals.process", "poisson"),
        ("workload.prompt_tokens.medain=3", "workload.prompt_tokens.medain", "median"),
        ("workload.classes.0.shar=1", "workload.classes[0].shar", "share"),
        ("clutser.gpu=a100", "clutser", "cluster"),
        ("slo.classes.pp0={ttft_ms: 3}", "slo.classes.pp0", "p0"),
        ("policy.batching.head_of_line=skp", "policy.batching.head_of_line", "skip"),
    ],
)
def test_unknown_word_names_its_path_and_the_nearest_one(override: str, where: str, hint: str) -> None:
    error = problem(override)
    assert error.where == f"--set {where}"
    assert error.hint == f"did you mean '{hint}'?"


@pytest.mark.parametrize(
    "override",
    [
        "seed=true", "seed=1.5", "seed=-1", "version=2", "kv_cache.blocks=0", "kv_cache=3", "cluster=null", "kv_cache.memory_fraction=1.5",
        "workload.arrivals.rate_rps=0", "workload.arrivals.rate_rps=.inf", "workload.arrivals.rate_rps=.nan", "workload.arrivals.rate_rps=1e999",
        "workload.output_tokens.sigma='3'", "workload.prompt_tokens=true", "workload.classes=3", "workload={}", "workload.requests=null",
        "workload.trace.file=nope.csv", "llm=nope.yaml", "policy.ordering=nope.py:Mine", "policy.ordering=[1]", "policy.ordering={}",
        "workload.classes.5.share=1", "workload.classes.x=1", "workload.0=1", "name.x=1", "a=[1", "=", "a", "a..b=1", "a=&x 1", "a=!!python/none 1",
        "workload.prompt_tokens={dist: uniform, min: 3}", "workload.prompt_tokens={dist: lognormal, median: 3, sigma: 1, min: 9, max: 2}",
        "workload.prompt_tokens={dist: empirical}", "workload.prompt_tokens={dist: empirical, quantiles: [3, 1]}",
        "workload.arrivals={process: poisson, rate_rps: 1, load_factor: 1}", "workload.arrivals={process: piecewise, pieces: []}",
        "workload.arrivals={process: piecewise, pieces: [{rate_rps: 1}, {rate_rps: 2}]}", "workload.classes.1.name=p0",
        "workload.classes=[{name: a, share: 0}]", "workload={requests: 1, arrivals: {process: poisson, load_factor: 1}, prompt_tokens: 1, output_tokens: 1, sessions: {turns: 2}}", "workload.trace={file: data/azure-conversation.yaml, start_s: 5, stop_s: 5}",
    ],
)  # fmt: skip
def test_wrong_values_are_one_input_error(override: str) -> None:
    assert "\n" not in str(problem(override))


def test_error_in_a_file_names_its_line(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("llm: llama-3.1-8b\ncluster:\n  gpu: h100-sxm\n  replcas: 2\nworkload: {trace: t.csv}\n")
    with pytest.raises(InputError) as caught:
        load(path)
    assert caught.value.where == f"{path}:4: cluster.replcas"


def test_missing_scenario_names_the_nearest() -> None:
    with pytest.raises(InputError, match="chat-8b"):
        load("chat-8")


def test_files_are_found_beside_the_scenario_and_packaged_ones_keep_their_short_name(tmp_path) -> None:
    (tmp_path / "lengths.txt").write_text("1\n2\n")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "llm: llama-3.1-8b\ncluster: {gpu: h100-sxm}\nworkload:\n  arrivals: {process: rate_per_minute, table: data/azure-conversation.yaml}\n"
        "  prompt_tokens: {dist: empirical, file: lengths.txt}\n  output_tokens: 5\n"
    )
    scenario = load(path)
    assert scenario.name == "mine"
    assert scenario.workload.prompt_tokens.file == str(tmp_path / "lengths.txt")
    assert scenario.workload.arrivals.table == "data/azure-conversation.yaml"


def test_a_trace_from_the_command_line_comes_before_the_overrides(tmp_path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n")
    loaded = load("chat-8b", ["workload.trace.limit=9"], trace=trace)
    assert (loaded.workload.trace.file, loaded.workload.trace.limit) == (str(trace), 9)
    for missing in (tmp_path / "no.csv", tmp_path):
        with pytest.raises(InputError, match=missing.name):
            load("chat-8b", trace=missing)


def test_policy_specs_say_where_they_were_written() -> None:
    assert load("chat-8b").policy.routing.where.endswith("chat-8b.yaml:14: policy.routing")
    assert load("chat-8b", ["policy.routing=round_robin"]).policy.routing.where == "--set policy.routing"


def test_schema_describes_keys_with_units_and_keeps_internals_out() -> None:
    schema = json_schema()
    assert {"llm", "cluster", "workload"} <= set(schema["required"])
    assert "name" not in schema["required"]
    assert "seconds" in schema["$defs"]["Measure"]["properties"]["warmup_s"]["description"]
    assert "where" not in schema["$defs"]["Batching"]["properties"]
    assert schema["$defs"]["Cluster"]["additionalProperties"] is False
