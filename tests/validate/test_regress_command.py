"""`twinserve regress` from end to end: exit codes, what it prints and writes, what it says of mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

import twinserve
from serving import scenario
from serving.errors import InputError
from validate.regress import choice
from validate.regress.suite import DEFAULT, load_suite
from validate.regress.workers import Lost, Workers

POLICIES = Path(__file__).with_name("regress_policies.py")
SMALL = """
version: 1
name: {name}
seed: 3
llm: llama-3.1-8b
cluster: {{gpu: h100-sxm}}
policy: {{batching: {{name: chunked_prefill, max_batch_tokens: 1024, max_batch_seqs: 8}}}}
workload:
  requests: {requests}
  arrivals: {{process: poisson, load_factor: 0.6}}
  prompt_tokens: {{dist: lognormal, median: 300, sigma: 0.6, max: {longest}}}
  output_tokens: {{dist: lognormal, median: 30, sigma: 0.5, max: 100}}
  classes: [{{name: p0, share: 0.3, priority: 0}}, {{name: p1, share: 0.7, priority: 1}}]
slo: {{attainment: 0.9, default: {{ttft_ms: 500, tpot_ms: 50}}}}
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A folder with two small scenarios, of which only the second has long prompts; the working directory is empty."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "short.yaml").write_text(SMALL.format(name="short", requests=120, longest=800))
    (folder / "long.yaml").write_text(SMALL.format(name="long", requests=120, longest=4000))
    monkeypatch.chdir(tmp_path)
    return folder


def regress(suite: Path, baseline: str, candidate: str, *more: str) -> int:
    return twinserve.main(
        ["regress", "--baseline", baseline, "--candidate", candidate, str(suite), "--replications", "4", "--jobs", "1", *more]
    )


def test_an_equal_policy_passes_with_equal_bytes(suite, capsys):
    printed = []
    for _ in range(2):
        assert regress(suite, "ordering=fcfs", f"ordering={POLICIES}:Arrival", "--json") == 0
        printed.append(capsys.readouterr().out)
    found = json.loads(printed[0])
    assert printed[0] == printed[1]
    assert found["regressed"] is False and found["suite"] == str(suite)
    assert {row["verdict"] for row in found["metrics"]} == {"unchanged"} and {row["verdict"] for row in found["properties"]} == {"passed"}
    assert {"ttft_p99_s", "goodput_rps", "slo_attainment.p0"} <= {row["metric"] for row in found["metrics"]}
    assert not Path("regress-traces").exists()


def test_a_worse_policy_fails_everywhere_it_should_be_read(suite, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (suite / "long.yaml").unlink()
    assert regress(suite, "window=none", f"window={POLICIES}:Slow", "--junit", "out/junit.xml", "--markdown", "out/summary.md") == 1
    printed = capsys.readouterr().out
    assert "\nREGRESSED: " in printed and " worse in 1 scenario\n" in printed and "::error title=short%3A TTFT p50 is worse::" in printed
    table, _rest = printed.split("REGRESSED")
    assert "FAIL" in table and " times [" not in table and " times  [" in table, "a change many times over is told as such"
    assert "is worse" not in table and "same" in table
    tree = ElementTree.parse("out/junit.xml").getroot()
    suites = {each.get("name"): each for each in tree}
    failures = [case.get("name") for case in suites["short"] if case.find("failure") is not None]
    assert "TTFT p50" in failures and int(suites["short"].get("failures")) == len(failures)
    assert {case.get("name") for case in suites["properties"]} >= {"S1", "S7", "honest"}
    assert Path("out/summary.md").read_text().startswith("## ❌ Regressed: `window=")


@pytest.mark.parametrize("columns", [80, 150])
def test_no_figure_is_cut_off_whatever_the_width(suite, capsys, monkeypatch, columns):
    monkeypatch.setattr("validate.regress.run.check_properties", lambda workers, choices: [])
    monkeypatch.setattr("validate.regress.terminal._WIDTH", columns)
    assert regress(suite, "window=none", f"window={POLICIES}:Slow") == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and not any("\u2026" in line for line in lines)
    assert any(line.split()[-1:] == ["FAIL"] for line in lines) and any("98% interval" in line for line in lines) == (columns > 80)


def test_a_policy_that_raises_fails_by_name_and_the_suite_goes_on(suite, capsys):
    assert regress(suite, "ordering=fcfs", f"ordering={POLICIES}:Raises", "--json", "--traces", "broken") == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["scenario"], row["side"], row["rule"]) for row in found["failures"]] == [
        ("long", "candidate", "must return a legal decision")
    ]
    assert "regress_policies.py line" in found["failures"][0]["detail"] and "Raises" in found["failures"][0]["policy"]
    assert {row["scenario"] for row in found["metrics"]} == {"short"}
    broken = next(row for row in found["properties"] if row["name"] == "S2")
    assert (broken["verdict"], broken["requests"], broken["baseline_too"]) == ("broken", 1, False)
    replay, trace = map(Path, broken["files"])
    assert scenario.load(replay).policy.ordering.name.endswith(":Raises")
    assert [json.loads(line)["prompt_tokens"] >= 900 for line in trace.read_text().splitlines()] == [True]


def test_a_policy_that_loops_is_stopped(suite, capsys, monkeypatch):
    monkeypatch.setattr("validate.regress.run.check_properties", lambda workers, choices: [])
    assert regress(suite, "ordering=fcfs", f"ordering={POLICIES}:Loops", "--json", "--time-limit", "1") == 1
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert [(row["scenario"], row["rule"]) for row in failures] == [("long", "must decide in finite time: no end within 1 s")]
    assert "in key" in failures[0]["detail"]


def test_a_broken_baseline_is_wrong_input(suite, capsys, monkeypatch):
    monkeypatch.setattr("validate.regress.run.check_properties", lambda workers, choices: [])
    assert regress(suite, f"ordering={POLICIES}:Raises", "ordering=fcfs") == 2
    captured = capsys.readouterr()
    assert "no regression" in captured.out and "fails in scenario long" in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ordering=fcfs", "ordering=shortest_jib"], "did you mean 'shortest_job'?"),
        (["orderin=fcfs", "ordering=fcfs"], "did you mean 'ordering'?"),
        (["ordering=fcfs", "batching=chunked_prefill"], "says nothing of batching"),
        (["ordering=fcfs", "fcfs"], "is not KIND=POLICY"),
        (["ordering=fcfs", "ordering=nowhere.py:Policy"], "there is no policy file"),
        (["ordering=fcfs", 'ordering={"preempt": "strict"}'], "needs the key 'name'"),
        (["ordering=fcfs", "ordering={bad"], "is no JSON"),
        (["ordering=fcfs", "ordering=some.module:Policy@v1"], "only a file can be taken from a git revision"),
        (["autoscaling=utilisation", "autoscaling=utilisation"], "no scenario of"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(suite, capsys, arguments, words):
    assert regress(suite, *arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_mistakes_in_the_suite(tmp_path):
    with pytest.raises(InputError, match="neither"):
        load_suite("defualt")
    with pytest.raises(InputError, match="no scenario"):
        load_suite(str(tmp_path))
    for file in ("a.yaml", "b.yaml"):
        (tmp_path / file).write_text(SMALL.format(name="same", requests=10, longest=100))
    with pytest.raises(InputError, match="two scenarios"):
        load_suite(str(tmp_path))


def test_the_default_suite_loads_and_its_seeds_differ():
    suite = load_suite("default")
    seeds = {member.seed(index) for member in suite.members for index in range(24)}
    assert len(suite.members) >= 5 and len(seeds) == 24 * len(suite.members)


def test_a_file_at_a_git_revision(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=repository, check=True, capture_output=True)

    git("init", "-q")
    file = repository / "mine.py"
    file.write_text("class Mine:\n    def key(self, request, queue):\n        return (request.request_id,)\n")
    git("add", "mine.py")
    git("commit", "-q", "-m", "first")
    file.write_text("class Mine:\n    pass\n")
    old = choice.parse(f"ordering={file}:Mine@HEAD", "--baseline", tmp_path)
    assert Path(old.name.rpartition(":")[0]).read_text().count("def key") == 1 and old.shown.endswith("@HEAD")
    assert choice.parse(f"ordering={file}:Mine", "--candidate", tmp_path).name == f"{file}:Mine"
    for revision, words in (("nowhere", "git has no mine.py"), ("--help", "is no git revision"), ("", "is no git revision")):
        with pytest.raises(InputError, match=words):
            choice.parse(f"ordering={file}:Mine@{revision}", "--baseline", tmp_path)


def test_a_policy_takes_the_place_of_the_scenarios_and_budgets_stay():
    raw = scenario.load(DEFAULT / "long-prompts.yaml").resolved()
    changed = choice.apply(
        raw, [choice.Choice("batching", "whole_prompt", "whole_prompt"), choice.Choice("window", "fixed", "fixed", {"size": 3})]
    )
    loaded = scenario.from_mapping(changed)
    batching = loaded.policy.batching
    assert (batching.name, batching.max_batch_tokens, batching.max_chunk_tokens, batching.head_of_line) == (
        "whole_prompt",
        4096,
        2048,
        "skip",
    )
    assert (batching.window.name, batching.window.options) == ("fixed", {"size": 3})
    assert choice.apply(raw, [choice.Choice("autoscaling", "utilisation", "utilisation")])["policy"] == raw["policy"]


def sleeps_for_ever() -> None:
    while True:
        time.sleep(1)


def mistaken() -> None:
    raise InputError("place", "problem", "hint")


def test_workers_survive_what_is_done_to_them():
    with Workers(2, 3.0) as workers:
        answers = dict(workers.run([(os.getpid, ()), (os._exit, (3,)), (sleeps_for_ever, ()), (os.getpid, ())]))
        assert isinstance(answers[0], int) and isinstance(answers[3], int)
        assert answers[1] == Lost("its process died with exit code 3")
        assert "no answer within 3 s" in answers[2].reason
        with pytest.raises(InputError, match="place: problem"):
            list(workers.run([(mistaken, ())]))
