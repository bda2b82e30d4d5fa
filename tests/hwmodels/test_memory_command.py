"""``twinserve memory``: the keys of the contract, a table, and mistakes named by their flag."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from hwmodels.cli import JSON_KEYS, register, tables
from serving.errors import InputError

ARGUMENTS = ["--llm", "qwen3-32b", "--gpu", "h100-sxm", "--block-tokens", "128", "--weights-gib", "61.03", "--activation-gib", "5.64",
             "--non-torch-gib", "0.14"]  # fmt: skip


def run(*arguments):
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_the_keys_of_the_contract():
    shown = json.loads(run(*ARGUMENTS, "--max-model-len", "16000", "--json"))
    assert tuple(shown) == JSON_KEYS
    assert shown["kv_gib"] == pytest.approx(4.45, abs=0.01)
    assert (shown["fits"], shown["binding_limit"]) == (True, None)


def test_what_does_not_fit_says_why():
    shown = json.loads(run(*ARGUMENTS, "--max-model-len", "32000", "--json"))
    assert not shown["fits"]
    assert shown["binding_limit"].startswith("max_model_len: a sequence of 32000 tokens")
    assert "does not fit - max_model_len" in run(*ARGUMENTS, "--max-model-len", "32000")


def test_the_table_names_every_term():
    shown = run("--llm", "llama-3.1-8b", "--gpu", "h100-sxm")
    assert all(term in shown for term in ("Weights", "Activation peak", "Beside torch", "KV cache", "KV blocks", "128 KiB a token", "fits"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--llm", "llama-3.1-8b", "--gpu", "h100"], "--gpu: there is no GPU named 'h100'"),
        (["--llm", "lama-3.1-8b", "--gpu", "l4"], r"--llm: there is no language model named 'lama-3.1-8b' .*did you mean 'llama-3.1-8b'"),
        (["--llm", "llama-3.1-8b", "--gpu", "l4", "--tp", "3"], "--tp: 3 does not divide"),
        (["--llm", "llama-3.1-8b", "--gpu", "l4", "--memory-fraction", "2"], "--memory-fraction: must lie in"),
        (["--llm", "llama-3.1-8b", "--gpu", "l4", "--kv-dtype", "fp9"], "--kv-dtype: unknown dtype 'fp9'"),
        (["--llm", "llama-3.1-8b", "--gpu", "l4", "--weights-gib", "-1"], "--weights-gib: must be a number of GiB"),
    ],
)
def test_mistakes_name_their_flag(arguments, message):
    with pytest.raises(InputError, match=message):
        run(*arguments)


@pytest.mark.parametrize("kind", ["gpus", "llms", "latency-models"])
def test_tables_are_rectangular(kind):
    header, rows = tables()[kind]
    listed = list(rows())
    assert listed
    assert {len(row) for row in listed} == {len(header)}
