"""Whatever stands in a scenario, the only error is InputError, on one line, with a place."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.errors import InputError
from serving.scenario import Scenario, from_mapping, load
from serving.workload import conversations, follows_answers, open_arrivals

SEEDS = [load(name).resolved() for name in ("chat-8b", "bursts", "chat-sessions", "benchmark-8b-closed-loop", "quickstart")]
WORDS = st.sampled_from(
    ["", "x", "fcfs", "poisson", "data/azure-conversation.yaml", "a\nb", "../..", "\x00", "no.py:X", "p0", "uniform", "lognormal", "closed_loop"]
)
KEYS = st.sampled_from(
    ["name", "dist", "process", "rate_rps", "load_factor", "requests", "trace", "file", "max", "min", "mean", "classes", "share", "table", "", "x"]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.integers(-(10**30), 10**30), st.floats(-1e3, 1e3), st.sampled_from([1e308, 5e-324]), WORDS
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=5)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """All paths in a nested value, the root included."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += places(child, (*path, key))
    return found


DOTTED = [".".join(map(str, path)) for path in places(SEEDS[0]) if path]


@st.composite
def mutated(draw: st.DrawFn) -> dict:
    raw = copy.deepcopy(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([each for each in places(raw) if each]))
        holder = raw
        for part in path[:-1]:
            holder = holder[part]
        change = draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "replace":
            holder[path[-1]] = draw(VALUES)
        elif change == "remove":
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[draw(KEYS)] = draw(VALUES)
    return raw


def check(error: InputError) -> None:
    assert error.where
    assert error.problem


def begin(scenario: Scenario) -> None:
    """Draw the first few requests of a valid scenario."""
    arguments = {"seed": 1, "block_tokens": scenario.kv_cache.block_tokens, "max_model_len": 9999, "prefix_caching": scenario.kv_cache.prefix_caching}
    make = conversations if follows_answers(scenario.workload) else open_arrivals
    for _, _ in zip(range(5), make(scenario.workload, saturation_rps=10.0, slo=scenario.slo, **arguments)):
        pass


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(mutated())
def test_mutated_scenarios(raw: dict) -> None:
    try:
        scenario = from_mapping(raw)
        again = scenario.resolved()
        assert from_mapping(again).resolved() == again
        if scenario.workload.prefix is None or scenario.workload.prefix.groups < 1000:
            begin(scenario)
    except InputError as error:
        check(error)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=200), st.text(alphabet="abc:[]{}-,&*!|>'\"#%@?\n \t01.", max_size=80)), st.booleans())
def test_arbitrary_text(tmp_path_factory, text: str, appended: bool) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f.yaml"
    base = "llm: x\ncluster: {gpu: y}\nworkload: {requests: 1, arrivals: all_at_once, prompt_tokens: 1, output_tokens: 1}\n"
    path.write_text((base if appended else "") + text, encoding="utf-8", errors="surrogatepass")
    try:
        load(path)
    except InputError as error:
        check(error)
        assert "\n" not in error.where


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f.yaml"
    path.write_bytes(content)
    try:
        load(path)
    except InputError as error:
        check(error)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=40), st.builds("{}={}".format, st.sampled_from(DOTTED), st.text(max_size=20))), max_size=3))
def test_arbitrary_overrides(overrides: list[str]) -> None:
    try:
        load("chat-8b", overrides)
    except InputError as error:
        check(error)
