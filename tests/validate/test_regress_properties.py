"""Scheduler properties: our policies have them, broken ones are caught with the smallest workload that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

import twinserve
from serving import policies
from validate.regress.cases import CASES, serial_steps
from validate.regress.choice import Choice
from validate.regress.properties import HONEST, check_property, files_of, names

BROKEN = Path(__file__).with_name("regress_policies.py")
KINDS = ("ordering", "batching", "window", "preemption", "admission")  # routing has a case of its own: storm-fleet
OPTIONS = {
    "token_bucket": {"tokens_per_s": 4000.0, "burst_tokens": 2000.0},
    "adaptive_burst": {"tokens_per_s": 4000.0, "min_burst_tokens": 2000.0, "max_burst_tokens": 8000.0},
}
PLAIN = ("chunked_prefill", "none", "latest", "fits")  # what the cases have anyway: fcfs stands for all of them
OURS = [(kind, name) for kind in KINDS for name in policies.names(kind) if name not in PLAIN and name != "always"]
QUICK = [case.name for case in CASES] + [HONEST]


def broken(kind: str, name: str) -> list[Choice]:
    return [Choice(kind, f"{BROKEN}:{name}", name)]


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_our_policies_have_every_property(kind, name):
    for each in QUICK:
        found = check_property(each, [Choice(kind, name, name, OPTIONS.get(name, {}))])
        assert found.fault is None, f"{each}: {found.fault}"


@pytest.mark.parametrize("name", [name for name in policies.names("routing") if name != "topology_aware"])
def test_our_routing_policies_serve_a_fleet(name):
    assert not check_property("storm-fleet", [Choice("routing", name, name)]).broken


def test_letting_in_what_can_never_fit_breaks_s1():
    found = check_property("S1", [Choice("admission", "always", "always")])
    assert found.broken and "naming the limit" in found.fault.rule


@pytest.mark.parametrize("preempt", ["strict", "deadline"])
def test_preemption_by_priority_has_every_property(preempt):
    for each in QUICK:
        assert not check_property(each, [Choice("ordering", "priority", "priority", {"preempt": preempt})]).broken


@pytest.mark.parametrize(
    ("name", "kind", "policy", "rule", "requests"),
    [
        ("starvation", "ordering", "Lifo", "must not starve", 110),
        ("storm-fcfs", "ordering", "NoId", "must return a legal decision", 1),
        ("S2", "ordering", "Raises", "must return a legal decision", 1),
        ("S7", "batching", "Leaks", "must leak no KV blocks", 1),
        ("storm-fcfs", "batching", "Greedy", "must stay within max_batch_tokens", 3),
        ("storm-priority", "batching", "Thrashes", "must not livelock", 1),
        ("storm-priority", "preemption", "Equals", "a victim must be strictly less urgent than the newcomer", 6),
        ("storm-priority", "preemption", "Nobody", "must return a legal decision", 8),
        ("S1", "window", "Shuts", "must not livelock", 1),
        ("storm-fleet", "routing", "Elsewhere", "must return a legal decision", 1),
    ],
)
def test_a_broken_rule_is_named_with_policy_and_step_and_shrunk(name, kind, policy, rule, requests):
    found = check_property(name, broken(kind, policy))
    assert found.fault is not None and found.fault.rule == rule
    assert policy in found.policy and kind in found.policy
    assert found.fault.step is not None or policy == "Elsewhere"  # which never comes to a step
    assert 1 <= len(found.rows) <= requests


def test_waiting_for_an_adapter_slot_in_front_of_others_breaks_s12():
    found = check_property("S12", broken("batching", "Stops"))
    assert found.fault is not None and found.fault.rule == "who waits for an adapter slot keeps nobody else waiting"
    names = [row.get("adapter", "") for row in found.rows]
    assert len(names) == 6 and len(set(names)) == 6 - names.count(names[-1]) + 1, f"five adapters for four slots, and one that needs none: {names}"
    assert found.fault.detail.startswith("request 5 was admitted")


def test_the_adapter_policy_of_s12_can_be_replaced():
    assert not check_property("S12", [Choice("adapters", "least_wanted", "least_wanted")]).broken


def test_a_policy_that_lies_is_caught():
    found = check_property(HONEST, broken("batching", "Lies"))
    assert found.broken and "promise" in found.fault.rule
    assert len(found.rows) <= 5


@pytest.mark.parametrize(("policy", "verdict"), [("WallClock", True), ("HashOrder", True), ("Arrival", False)])
def test_clocks_and_hash_seeds_decide_nothing(policy, verdict, monkeypatch):
    monkeypatch.setattr("validate.regress.properties.shrink", lambda rows, fails, **limits: rows)  # each attempt starts a process
    assert check_property("deterministic", broken("ordering", policy)).broken == verdict


def test_a_policy_that_never_returns_is_stopped_and_its_line_named(monkeypatch):
    monkeypatch.setattr("validate.regress.properties.LIMIT_S", 0.5)
    found = check_property("S2", broken("ordering", "Loops"))
    assert found.fault.rule.startswith("must decide in finite time")
    assert "regress_policies.py line" in found.fault.detail
    assert len(found.rows) == 1


def test_the_written_files_replay_the_breach(tmp_path, capsys):
    found = check_property("S2", broken("ordering", "Raises"))
    for path, text in files_of(found, tmp_path):
        path.write_text(text)
    assert twinserve.main(["run", str(tmp_path / "S2.yaml"), "--trace", str(tmp_path / "S2.jsonl")]) == 2
    assert "policy method 'key' failed: KeyError: 'boom'" in capsys.readouterr().err


def test_what_makes_no_sense_for_a_policy_is_skipped():
    found = check_property("S4", broken("batching", "Greedy"))
    assert found.skipped and not found.broken


def test_cases_are_traces_in_order():
    assert names()[: len(CASES)] == [case.name for case in CASES]
    for case in CASES:
        assert serial_steps(case.rows, case.scenario) > 0
        assert [row["arrival_s"] for row in case.rows] == sorted(row["arrival_s"] for row in case.rows)
