"""Length distributions: moments, ranges, data files and the joint table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from serving.errors import InputError
from serving.rng import stream
from serving.scenario import data_file
from serving.scenario.distributions import Distribution
from serving.workload.lengths import largest_tokens, one_by_one, seconds, tokens
from serving.workload.numbers_file import read_numbers
from serving.workload.table import read_lengths, read_rates
from serving.workload.tabulate import main, tabulate

ADAPTER = TypeAdapter(Distribution)


def draw(spec: object, n: int = 40_000, *, whole: bool = True) -> np.ndarray:
    make = tokens if whole else seconds
    return make(ADAPTER.validate_python(spec), stream(9, "test"))(n)


@pytest.mark.parametrize(
    ("spec", "mean", "std"),
    [
        (17, 17.0, 0.0),
        ({"dist": "uniform", "min": 10, "max": 19}, 14.5, math.sqrt(99 / 12)),
        ({"dist": "uniform", "mean": 512, "spread": 0.25}, 512.0, math.sqrt((257**2 - 1) / 12)),
        ({"dist": "normal", "mean": 500, "std": 50}, 500.0, 50.0),
        ({"dist": "lognormal", "median": 200, "sigma": 0.5}, 200 * math.exp(0.125), 200 * math.exp(0.125) * math.sqrt(math.exp(0.25) - 1)),
        ({"dist": "exponential", "mean": 300}, 300.0, 300.0),
        ({"dist": "gamma", "mean": 300, "cv": 0.5}, 300.0, 150.0),
        ({"dist": "zipf", "exponent": 0.0, "min": 1, "max": 9}, 5.0, math.sqrt(80 / 12)),
        ({"dist": "empirical", "values": [10, 30]}, 20.0, 10.0),
        ({"dist": "empirical", "quantiles": [0, 1000]}, 500.0, 1000 / math.sqrt(12)),
    ],
)
def test_moments(spec: object, mean: float, std: float) -> None:
    values = draw(spec)
    assert values.dtype == np.int64
    assert values.mean() == pytest.approx(mean, abs=4 * std / 200 + 0.5)
    assert values.std() == pytest.approx(std, rel=0.05, abs=0.5)


def test_zipf_probabilities() -> None:
    counts = np.bincount(draw({"dist": "zipf", "exponent": 1.5, "max": 4}))[1:]
    expected = np.arange(1, 5) ** -1.5
    assert counts / counts.sum() == pytest.approx(expected / expected.sum(), abs=0.01)


@pytest.mark.parametrize(
    "spec",
    [
        {"dist": "normal", "mean": 50, "std": 500, "min": 20, "max": 90},
        {"dist": "lognormal", "median": 50, "sigma": 10.0, "min": 20, "max": 90},
        {"dist": "exponential", "mean": 50, "min": 20, "max": 90},
        {"dist": "gamma", "mean": 50, "cv": 100.0, "min": 20, "max": 90},
        {"dist": "empirical", "values": [0, 1e9], "min": 20, "max": 90},
        {"dist": "uniform", "min": 20, "max": 90},
        {"dist": "zipf", "exponent": 3.0, "min": 20, "max": 90},
    ],
)
def test_min_and_max_hold_and_the_largest_is_known(spec: dict) -> None:
    values = draw(spec)
    assert values.min() >= 20
    assert values.max() <= 90
    assert largest_tokens(ADAPTER.validate_python(spec)) == 90


def test_a_length_is_at_least_one_token_and_a_time_may_be_zero() -> None:
    assert draw(0).min() == 1
    assert draw({"dist": "normal", "mean": 1, "std": 100}).min() == 1
    assert draw(0, whole=False).max() == 0.0
    assert draw({"dist": "normal", "mean": 1, "std": 100}, whole=False).min() == 0.0
    assert largest_tokens(ADAPTER.validate_python({"dist": "exponential", "mean": 3})) is None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_draws_do_not_depend_on_how_they_are_cut(cuts: list[int]) -> None:
    for spec in ({"dist": "lognormal", "median": 80, "sigma": 1.0}, {"dist": "gamma", "mean": 80, "cv": 2.0}, {"dist": "uniform", "min": 3, "max": 99}):
        make = tokens(ADAPTER.validate_python(spec), stream(3, "cut"))
        pieces = np.concatenate([make(n) for n in cuts])
        assert pieces.tolist() == tokens(ADAPTER.validate_python(spec), stream(3, "cut"))(sum(cuts)).tolist()


def test_one_by_one_gives_plain_numbers() -> None:
    values = one_by_one(tokens(ADAPTER.validate_python({"dist": "uniform", "min": 3, "max": 9}), stream(1, "x")))
    assert {type(next(values)) for _ in range(5000)} == {int}


def test_numbers_from_files_and_their_errors(tmp_path) -> None:
    plain, table = tmp_path / "n.txt", tmp_path / "t.csv"
    plain.write_text("3\n4\n\n5\n")
    table.write_text("id,tokens\n1,30\n2,40\n")
    assert read_numbers(plain).tolist() == [3, 4, 5]
    assert read_numbers(table, "tokens").tolist() == [30, 40]
    with pytest.raises(InputError, match=r"t.csv:1: .*'tokens'"):
        read_numbers(table, "token")
    for text in ("", "3\nx\n", "3\nnan\n", "3\n1e99\n"):
        plain.write_text(text)
        with pytest.raises(InputError, match=r"n\.txt"):
            read_numbers(plain)


def test_committed_table_keeps_the_dependence_of_output_on_prompt() -> None:
    table = read_lengths(data_file("data/azure-conversation.yaml"))
    prompt, output = table.draw(stream(1, "table"), 60_000)
    assert output.max() <= table.largest_output
    short, long = output[prompt < 300].mean(), output[(prompt > 1000) & (prompt < 1500)].mean()
    assert short != pytest.approx(long, rel=0.1)
    assert sum(read_rates(data_file("data/azure-conversation.yaml"))) == 19_366


def test_committed_table_agrees_with_the_trace_it_stands_for(data_dir) -> None:
    path = data_dir / "traces" / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
    again = tabulate(path)
    table = read_lengths(data_file("data/azure-conversation.yaml"))
    assert again["prompt_tokens"] == table.prompt.tolist()
    assert [row["quantiles"] for row in again["output_tokens"]] == table.output.tolist()
    assert tuple(again["rate_per_minute"]) == read_rates(data_file("data/azure-conversation.yaml"))
    raw = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2))
    prompt, output = table.draw(stream(2, "table"), 200_000)
    assert prompt.mean() == pytest.approx(raw[:, 0].mean(), rel=0.01)
    assert output.mean() == pytest.approx(raw[:, 1].mean(), rel=0.01)
    assert np.corrcoef(prompt, output)[0, 1] == pytest.approx(np.corrcoef(raw.T)[0, 1], abs=0.02)
    for level in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(prompt, level) == pytest.approx(np.quantile(raw[:, 0], level), rel=0.02)


def test_tabulate_prints_a_table_that_reads_back(tmp_path, capsys) -> None:
    trace, out = tmp_path / "t.csv", tmp_path / "t.yaml"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i * 7},{i % 50 + 1},{i % 9 + 1}\n" for i in range(500)))
    assert main([str(trace), "--source", "here", "--licence", "CC0-1.0"]) == 0
    out.write_text(capsys.readouterr().out)
    assert read_lengths(out).prompt[-1] == 50
    assert sum(read_rates(out)) == 500
    assert main([str(tmp_path / "no.csv"), "--source", "x", "--licence", "y"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "", "3", "[1]", "prompt_tokens: [1]", "prompt_tokens: [2, 1]\noutput_tokens: [{prompt_up_to: 2, quantiles: [1, 2]}]",
        "prompt_tokens: [1, 2]", "prompt_tokens: [1, 2]\noutput_tokens: []", "prompt_tokens: [1, x]\noutput_tokens: [{prompt_up_to: 2, quantiles: [1, 2]}]",
        "prompt_tokens: [1, 2]\noutput_tokens: [{quantiles: [1, 2]}]", "prompt_tokens: [1, 2]\noutput_tokens: [{prompt_up_to: 2, quantiles: [2, 1]}]",
        "prompt_tokens: [1, 2]\noutput_tokens: [{prompt_up_to: 2, quantiles: [1, 2]}, {prompt_up_to: 1, quantiles: [1, 2]}]",
        "prompt_tokens: [1, 2]\noutput_tokens: [{prompt_up_to: 2, quantiles: [1, 2]}, {prompt_up_to: 3, quantiles: [1, 2, 3]}]",
    ],
)  # fmt: skip
def test_broken_tables_are_input_errors(tmp_path, text: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"t\.yaml"):
        read_lengths(path)
    path.write_text("rate_per_minute: [0, 0]")
    with pytest.raises(InputError, match="rate_per_minute"):
        read_rates(path)
