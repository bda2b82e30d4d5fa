"""A user's policy that answers nonsense is named, with what it answered; the product's own are not checked and not slowed down."""

from __future__ import annotations

import math
import textwrap

import pytest

import twinserve
from serving.errors import IllegalAnswerError, InputError
from serving.policies import load, names
from serving.request import Request

REQUEST = Request(7, 0.0, 100, 10)


def policy(folder, kind, method, body, arguments="*given"):
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(f"""
        import math
        class Mine:
            def {method}(self, {arguments}):
                return {body}
        """))
    return load(kind, f"{file}:Mine")


@pytest.mark.parametrize(
    ("kind", "method", "arguments", "body", "message"),
    [
        ("ordering", "key", (REQUEST, None), "None", "must be a tuple that ends in the request's id, here 7"),
        ("ordering", "key", (REQUEST, None), "(1, 8)", "ends in the request's id, here 7"),
        ("ordering", "key", (REQUEST, None), "(math.nan, 7)", "no NaN"),
        ("ordering", "key", (REQUEST, None), "([], 7)", "numbers"),
        ("window", "open_s", (None,), "math.nan", "time in seconds"),
        ("window", "open_s", (None,), "'soon'", "time in seconds"),
        ("preemption", "choose", (None, None), "None", "it must name a running sequence"),
        ("preemption", "choose", (None, object()), "7", "a running sequence or None"),
        ("admission", "admit", (REQUEST, None), "True", "None, to accept"),
        ("routing", "route", (REQUEST, None), "-1", "a whole number, not below 0"),
        ("routing", "route", (REQUEST, None), "True", "a whole number"),
        ("site", "serve_at", (REQUEST, None), "0.5", "a whole number"),
        ("speculation", "draft_tokens", (3,), "None", "a whole number"),
    ],
)
def test_nonsense_is_named(tmp_path, kind, method, arguments, body, message):
    mine = policy(tmp_path, kind, method, body)
    with pytest.raises(IllegalAnswerError, match=rf"{kind} policy Mine: {method}\(\) answered .*{message}"):
        getattr(mine, method)(*arguments)


@pytest.mark.parametrize(
    ("kind", "method", "arguments", "body"),
    [
        ("ordering", "key", (REQUEST, None), "(math.inf, 'a', 7)"),
        ("window", "open_s", (None,), "math.inf"),
        ("preemption", "choose", (None, object()), "None"),
        ("admission", "admit", (REQUEST, None), "'full'"),
        ("routing", "route", (REQUEST, None), "3"),
    ],
)
def test_sense_passes_as_it_is(tmp_path, kind, method, arguments, body):
    assert getattr(policy(tmp_path, kind, method, body), method)(*arguments) == eval(body, {"math": math})


def test_keys_that_cannot_be_compared_are_noticed_at_the_second(tmp_path):
    mine = policy(tmp_path, "ordering", "key", "(1 if given[0].request_id % 2 else 'a', given[0].request_id)")
    mine.key(REQUEST, None)
    with pytest.raises(IllegalAnswerError, match="keys must be comparable"):
        mine.key(REQUEST._replace(request_id=8), None)


def test_a_method_that_does_not_take_what_it_is_given_is_refused_before_the_run(tmp_path):
    with pytest.raises(InputError, match=r"Mine\.key must take \(self, request, queue\)"):
        policy(tmp_path, "ordering", "key", "(1, 7)", arguments="request")


def test_shipped_policies_carry_no_check():
    for name in names("ordering"):
        assert "key" not in vars(load("ordering", name))


def test_the_command_says_it_in_one_line(tmp_path, capsys):
    policy(tmp_path, "routing", "route", "5")
    code = twinserve.main(["run", "quickstart", "--set", "workload.requests=3", "--set", "cluster.replicas=2", "--set", f"policy.routing={tmp_path}/mine.py:Mine"])
    assert code == 2
    assert capsys.readouterr().err.splitlines() == ["error: routing policy Mine chose replica 5 of 2"]
