"""The comparison of runs: errors and noise by hand, what a gate decides, and what the command prints and returns."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import twinserve
from serving.errors import InputError
from validate.compare import compare
from validate.importers.imported import Imported, Served, write


def run_directory(path, ttft_s, tpot_s, *, count=40):
    """A run of ``count`` requests of 11 tokens, each with the same TTFT and TPOT."""
    served = [Served(i * 0.1, 100, 11, i * 0.1 + ttft_s, i * 0.1 + ttft_s + 10 * tpot_s) for i in range(count)]
    write(Imported("test", path, served=served, gaps_s=[tpot_s] * 10 * count), path)
    return path


@pytest.fixture
def pair(tmp_path):
    return run_directory(tmp_path / "real", 0.200, 0.020), run_directory(tmp_path / "sim", 0.210, 0.019)


def test_errors_are_fractions_of_the_real_value(pair):
    rows = compare([pair[0]], pair[1]).metrics
    assert set(rows) == {"ttft_s", "tpot_s", "itl_s", "e2e_s", "output_tokens_per_s"}
    assert rows["ttft_s"]["mean"].error == pytest.approx(0.05, abs=1e-6)
    assert rows["tpot_s"]["p99"].error == pytest.approx(-0.05, abs=2e-3)
    assert rows["ttft_s"]["mean"].noise is None


def test_noise_is_the_interval_over_repeats(tmp_path):
    real = [run_directory(tmp_path / f"r{i}", ttft, 0.02) for i, ttft in enumerate((0.19, 0.20, 0.21))]
    row = compare(real, run_directory(tmp_path / "sim", 0.2, 0.02)).metrics["ttft_s"]["mean"]
    assert row.real == pytest.approx(0.20) and row.error == pytest.approx(0.0, abs=1e-9)
    assert row.noise == pytest.approx(4.3027 * np.std([0.19, 0.2, 0.21], ddof=1) / np.sqrt(3) / 0.2, rel=1e-3)


def test_the_gate_takes_either_direction_and_not_the_maximum(pair):
    comparison = compare([pair[0]], pair[1])
    assert comparison.exceeding(0.06) == []
    names = comparison.exceeding(0.04)
    assert "ttft_s.mean" in names and "tpot_s.p50" in names and not any(name.endswith(".max") for name in names)
    assert compare([pair[0]], pair[0]).exceeding(0.0) == []


def test_a_zero_on_the_real_side_has_no_error_and_no_gate_passes_it(tmp_path):
    real, simulated = run_directory(tmp_path / "real", 0.0, 0.02), run_directory(tmp_path / "sim", 0.1, 0.02)
    comparison = compare([real], simulated)
    assert comparison.metrics["ttft_s"]["mean"].error is None
    assert "ttft_s.mean" in comparison.exceeding(10.0)
    assert compare([real], real).metrics["ttft_s"]["mean"].error == 0.0


def test_statistics_that_one_side_lacks_are_left_out(data_dir, tmp_path, pair):
    from validate.importers import import_file

    import_file("vllm-bench", data_dir / "client_formats" / "vllm_bench_serve_v0.10_pd_summary.json", tmp_path / "stated")
    comparison = compare([tmp_path / "stated"], pair[1])
    assert set(comparison.metrics["ttft_s"]) == {"mean", "p50", "p99"} and "e2e_s" not in comparison.metrics
    assert any("different numbers of requests" in note for note in comparison.notes)
    import_file("mlperf-loadgen", next((data_dir / "measured").glob("*/*offline.summary.txt")), tmp_path / "offline")
    assert set(compare([tmp_path / "offline"], pair[1]).metrics) == {"e2e_s", "output_tokens_per_s"}


def test_nothing_in_common_is_an_error(tmp_path, pair):
    write(Imported("test", tmp_path / "x", steps=[(0, 0, 0.0, 0.1, 1, 1, 0, 0, 1, 0, 0, 1)]), tmp_path / "steps")
    with pytest.raises(InputError, match="no statistic in common"):
        compare([tmp_path / "steps"], pair[1])


def test_the_command_prints_a_table_and_answers_by_its_exit_code(pair, capsys):
    real, simulated = map(str, pair)
    assert twinserve.main(["compare", real, simulated]) == 0
    table = capsys.readouterr().out
    assert "200.00 ms" in table and "+5.0%" in table and "one real run" in " ".join(table.split())
    assert twinserve.main(["compare", real, simulated, "--gate", "0.04"]) == 1
    assert "outside the gate of 4.0%" in capsys.readouterr().out
    assert twinserve.main(["compare", real, simulated, "--gate", "0.1"]) == 0
    capsys.readouterr()
    assert twinserve.main(["compare", real, real, simulated, "--gate", "0.04", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["metrics"]["ttft_s"]["mean"].keys() == {"real", "simulated", "error", "noise"}
    assert printed["metrics"]["ttft_s"]["mean"]["noise"] == 0.0 and "ttft_s.mean" in printed["exceeded"]


@pytest.mark.parametrize("arguments", [["compare", "/nowhere", "/nowhere2"], ["compare", "one"], ["import", "auto", "/nowhere", "--out", "x"]])
def test_mistakes_exit_with_two(arguments, capsys):
    assert twinserve.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error:")


def test_a_bad_gate_and_a_directory_that_is_no_run(pair, capsys, tmp_path):
    assert twinserve.main(["compare", *map(str, pair), "--gate", "-1"]) == 2
    (tmp_path / "empty").mkdir()
    assert twinserve.main(["compare", str(tmp_path / "empty"), str(pair[1])]) == 2
    assert "no run.yaml" in capsys.readouterr().err


def test_import_by_command(data_dir, tmp_path, capsys):
    path, out = data_dir / "client_formats" / "aiperf_conc4__profile_export.jsonl", tmp_path / "run"
    assert twinserve.main(["import", "auto", str(path), "--out", str(out)]) == 0
    assert "10 requests from aiperf" in capsys.readouterr().out
    assert twinserve.main(["import", "aiperf", str(path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"]["completed"] == 10
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert twinserve.main(["import", "aiperf", str(path), "--out", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_the_room_s_commands_load_nothing_heavy():
    code = "import sys, validate.cli; print([m for m in ('pandas', 'pyarrow', 'scipy', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
