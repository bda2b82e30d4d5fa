"""The command as a person meets it: exit codes, one-line errors, quiet pipes, and a help that doesn't keep one waiting."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import twinserve
from serving.records import open_run

ROOT = Path(__file__).resolve().parent.parent
HELP_CPU_S = 0.5
TINY = """
name: tiny
llm: llama-3.1-8b
cluster: {gpu: h100-sxm}
workload:
  requests: 10
  arrivals: {process: poisson, rate_rps: 5.0}
  prompt_tokens: 200
  output_tokens: 20
"""


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = twinserve.main(list(arguments))
    return code, *capsys.readouterr()


def in_shell(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "twinserve.py"), *arguments], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def tiny(tmp_path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def test_help_and_version_come_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = in_shell("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and all(name in done.stdout for name in twinserve.COMMANDS)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_CPU_S
    assert in_shell("--version").stdout.startswith("twinserve 0.")


@pytest.mark.parametrize("command", twinserve.COMMANDS)
def test_every_command_has_a_help(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0 and f"Usage: twinserve {command}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rn"], "Did you mean 'run'?"),
        (["run"], "Missing argument"),
        (["run", "--sed", "1", "x.yaml"], "--seed"),
        (["run", "no-such.yaml"], "error: no-such.yaml: "),
        (["list", "gpu"], "did you mean 'gpus'?"),
        (["run", "chat-8b", "--audit", "2"], "error: --audit: 2 is no fraction"),
        (["run", "chat-8b", "--set", "cluster.replica=3"], "did you mean 'replicas'?"),
        (["run", "chat-8b", "--out", "/dev/null"], "is a file"),
    ],
)
def test_wrong_input_is_exit_2_and_one_clear_message(capsys, arguments, message):
    code, out, err = call(capsys, *arguments)
    assert code == twinserve.WRONG_INPUT and message in err and out == ""
    assert "Traceback" not in err
    if err.startswith("error:"):
        assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["gpus", "llms", "topologies", "policies", "scenarios", "latency-models"])
def test_lists(capsys, kind):
    code, out, _ = call(capsys, "list", kind)
    assert code == 0 and out.splitlines() == sorted(out.splitlines())


def test_the_schema_is_json(capsys):
    code, out, _ = call(capsys, "schema")
    assert code == 0 and json.loads(out)["title"] == "twinserve scenario"


def test_a_reader_that_goes_away_is_no_error():
    command = f"'{sys.executable}' '{ROOT / 'twinserve.py'}' schema | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.returncode == twinserve.BROKEN_PIPE


def test_a_run_prints_its_table_and_leaves_its_directory(capsys, tiny, tmp_path):
    code, out, err = call(capsys, "run", tiny, "--out", str(tmp_path / "run"))
    assert code == 0 and err == "" and out.isascii()
    assert "10 of 10 requests completed" in out and "Bottleneck: " in out
    code, out, _ = call(capsys, "run", tiny, "--json")
    assert code == 0 and out == (tmp_path / "run" / "summary.json").read_text()


def test_equal_input_prints_equal_bytes(capsys, tiny):
    first, again, other = (call(capsys, "run", tiny, "--json", "--no-records", "--seed", seed)[1] for seed in ("3", "3", "4"))
    assert first == again != other


def test_a_run_that_cannot_start_leaves_nothing(capsys, tiny, tmp_path):
    code, _, err = call(capsys, "run", tiny, "--set", "cluster.gpu=h100-smx", "--out", str(tmp_path / "run"))
    assert code == 2 and "did you mean 'h100-sxm'?" in err and not (tmp_path / "run").exists()


def test_ctrl_c_leaves_a_readable_partial_run(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, str(ROOT / "twinserve.py"), "run", "chat-8b", "--set", "workload.requests=10000000", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.glob(".run.*/steps.parquet")) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        time.sleep(1.0)  # into the run
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == twinserve.INTERRUPTED
    assert "marked partial" in stderr and "requests completed" in stdout
    run = open_run(out)
    assert run.partial and 0 < run.summary["requests"]["completed"] < 10_000_000
    assert len(run.requests) == run.summary["requests"]["completed"] and [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("body", "says"),
    [("raise ZeroDivisionError('boom\\nagain')", "ZeroDivisionError: boom again"), ("raise SystemExit(0)", "SystemExit: 0"), ("return self.key(a, b)", "RecursionError")],
)
def test_a_policy_file_that_raises_is_named_with_its_line(capsys, tiny, tmp_path, body, says):
    policy = tmp_path / "mine.py"
    policy.write_text(f"class Mine:\n    static = True\n\n    def key(self, a, b):\n        {body}\n")
    code, out, err = call(capsys, "run", tiny, "--set", f"policy.ordering={policy}:Mine")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "mine.py:5: policy method 'key' failed: " in err and says in err


def test_text_is_printed_whatever_the_terminal_can_show(tmp_path):
    import os

    path = tmp_path / "odd.yaml"
    path.write_text(TINY.replace("name: tiny", 'name: "t\u00efny \u2192"'), encoding="utf-8")
    done = in_shell("run", str(path), "--no-records", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stderr == "" and "t\\xefny" in done.stdout


def test_closed_output_is_no_crash(tiny):
    command = f"'{sys.executable}' '{ROOT / 'twinserve.py'}' run '{tiny}' --no-records >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "{tiny}", "--out", "y" * 300], "File name too long"),
        (["run", "{tiny}", "--set", "workload.arrivals.rate_rps=1e-300"], "272 years"),
        (["run", "speculative", "--set", "speculation.policy.tokens=1.5"], "takes a whole number here, not 1.5"),
        (["memory", "--llm", "llama-3.1-8b", "--gpu", "h100-sxm", "--gpu-gib", "1e308"], "at most"),
        (["sweep", "{tiny}", "--vary", "workload.arrivals.rate_rps=1:1e400:3"], "too large"),
    ],
)
def test_values_no_machine_can_take(capsys, tiny, arguments, message):
    code, out, err = call(capsys, *(word.format(tiny=tiny) for word in arguments))
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
