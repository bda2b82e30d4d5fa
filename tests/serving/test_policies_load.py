"""Policies by name, by module and by file; and what a mistake in naming one says."""

from __future__ import annotations

import sys

import pytest

from serving.errors import InputError
from serving.policies import kinds, load, names

MINE = """
class Slack:
    def __init__(self, *, slack_s: float = 1.0, strict: bool = False) -> None:
        self.slack_s = slack_s

    def key(self, request, queue):
        return (request.arrival_s + self.slack_s, request.request_id)


class NoKey:
    pass


class Picky:
    def __init__(self, *, size: int) -> None:
        if size < 1:
            raise ValueError("size must be positive")

    def key(self, request, queue):
        return (request.request_id,)
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_every_shipped_policy_loads_by_its_name():
    needed = {
        "token_bucket": {"tokens_per_s": 10.0, "burst_tokens": 10.0},
        "adaptive_burst": {"tokens_per_s": 10.0, "min_burst_tokens": 10.0, "max_burst_tokens": 20.0},
    }
    assert {"admission", "batching", "ordering", "preemption", "routing", "window"} <= set(kinds())
    for kind in kinds():
        assert names(kind)
        for name in names(kind):
            assert load(kind, name, needed.get(name, {})) is not None


def test_from_a_file(mine):
    policy = load("ordering", f"{mine}:Slack", {"slack_s": 2.5})
    assert policy.slack_s == 2.5


def test_from_a_module(mine, monkeypatch):
    monkeypatch.syspath_prepend(mine.parent)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert type(load("ordering", "mine:Slack")).__name__ == "Slack"


def test_two_files_of_one_name_do_not_mix(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"class P:\n    value = {value}\n    def key(self, request, queue):\n        return ()\n")
    assert [load("ordering", f"{tmp_path / folder}/mine.py:P").value for folder in ("a", "b")] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "name", "options", "where", "says"),
    [
        ("ordering", "fifo", {}, "policy.ordering", "did you mean 'fcfs'|choose from"),
        ("ordering", "priorty", {}, "policy.ordering", "did you mean 'priority'"),
        ("ordering", "priority", {"preemt": "strict"}, "policy.ordering.preemt", "did you mean 'preempt'"),
        ("ordering", "priority", {"preempt": "strickt"}, "policy.ordering.preempt", "did you mean 'strict'"),
        ("ordering", "fcfs", {"depth": 3}, "policy.ordering.depth", "no such option"),
        ("admission", "token_bucket", {"burst_tokens": 5}, "policy.admission.tokens_per_s", "needs this option"),
        ("admission", "token_bucket", {"burst_tokens": 5, "tokens_per_s": 0}, "policy.admission.tokens_per_s", "positive"),
        ("window", "fixed", {"size": 0}, "policy.window.size", "at least 1"),
        ("window", "qos_adaptive", {"start": 3, "smallest": 4}, "policy.window.start", "smallest <= start"),
        ("window", "rtt_adaptive", {"shortest_s": 2.0}, "policy.window.shortest_s", "shortest_s <= longest_s"),
        ("batching", "chunked_prefill", {"head_of_line": "skipp"}, "policy.batching.head_of_line", "did you mean 'skip'"),
        ("routing", "prefix_affinity", {"load_weight": -1}, "policy.routing.load_weight", "negative"),
        ("ordering", "shortest_job", {"ageing_tokens_per_s": "fast"}, "policy.ordering.ageing_tokens_per_s", "takes a number here, not 'fast'"),
        ("ordering", "nowhere.at.all:Slack", {}, "policy.ordering", "cannot be imported"),
        ("ordering", "no/such/file.py:Slack", {}, "policy.ordering", "no policy file"),
    ],
)
def test_a_mistake_names_its_dotted_path_and_the_nearest_choice(kind, name, options, where, says):
    with pytest.raises(InputError, match=says) as error:
        load(kind, name, options)
    assert error.value.where == where


def test_mistakes_in_a_file_of_ones_own(mine, tmp_path):
    with pytest.raises(InputError, match=r"has no class 'Slak' .did you mean 'Slack'"):
        load("ordering", f"{mine}:Slak")
    with pytest.raises(InputError, match="no ordering policy: it has no method 'key'"):
        load("ordering", f"{mine}:NoKey")
    with pytest.raises(InputError, match=r"no such option .did you mean 'slack_s'"):
        load("ordering", f"{mine}:Slack", {"slack": 1})
    with pytest.raises(InputError, match="needs this option"):
        load("ordering", f"{mine}:Picky")
    with pytest.raises(InputError, match="does not accept its options: size must be positive"):
        load("ordering", f"{mine}:Picky", {"size": 0})
    (tmp_path / "broken.py").write_text("def (:\n")
    with pytest.raises(InputError, match="cannot be imported: SyntaxError"):
        load("ordering", f"{tmp_path / 'broken.py'}:P")


def test_where_may_be_anything():
    with pytest.raises(InputError) as error:
        load("ordering", "priority", {"slack": 1}, where="pools.prefill.policy.ordering")
    assert error.value.where == "pools.prefill.policy.ordering.slack"
