"""Derive the committed table of a trace: ``python -m serving.workload.tabulate TRACE --source URL --licence NAME > table.yaml``.

The table stands for the trace where the trace itself cannot be shipped. It keeps the rate of every minute, the distribution
of prompt lengths, and the distribution of output lengths given the prompt length; it drops order, and bursts within a minute.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import numpy as np

from serving.errors import InputError
from serving.scenario.workload import Trace
from serving.workload.replay import rows

PROMPT_LEVELS = 2000  # fine, because the longest prompts are rare and long: coarser steps would stretch the tail
OUTPUT_LEVELS = 100
GROUPS = 20


def tabulate(path: Path) -> dict:
    """Return the table of a trace, in the form that ``table`` reads. Raises InputError."""
    if not path.is_file():
        raise InputError(str(path), "no such file")
    trace = list(rows(Trace(file=str(path)), {}))
    if trace[0].arrival_s is None:
        raise InputError(str(path), "the trace has no arrival times, so it has no rate per minute")
    prompt = np.array([row.prompt_tokens for row in trace])
    output = np.array([row.output_tokens for row in trace])
    minutes = (np.array([row.arrival_s for row in trace]) // 60.0).astype(np.int64)
    # Equal numbers of requests per group, as far as ties allow; a group holds the prompts up to its edge.
    edges = np.unique(np.quantile(prompt, np.arange(1, GROUPS + 1) / GROUPS, method="inverted_cdf"))
    group = np.searchsorted(edges, prompt)
    return {
        "requests": len(trace),
        "rate_per_minute": np.bincount(minutes).tolist(),
        "prompt_tokens": _quantiles(prompt, PROMPT_LEVELS),
        "output_tokens": [
            {"prompt_up_to": int(edge), "quantiles": _quantiles(output[group == number], OUTPUT_LEVELS)} for number, edge in enumerate(edges)
        ],
    }


def _quantiles(values: np.ndarray, levels: int) -> list[int]:
    return np.rint(np.quantile(values, np.linspace(0.0, 1.0, levels + 1))).astype(int).tolist()


def to_yaml(table: dict, header: dict[str, str]) -> str:
    """Return the text of a table file: the header's keys, then the numbers in wrapped lists."""
    lines = [f"{key}: {value}" for key, value in header.items()] + [f"requests: {table['requests']}"]
    for key in ("rate_per_minute", "prompt_tokens"):
        lines += [f"{key}:", _wrapped(table[key], "  ")]
    lines.append("output_tokens:")
    for row in table["output_tokens"]:
        lines += [f"  - prompt_up_to: {row['prompt_up_to']}", "    quantiles:", _wrapped(row["quantiles"], "      ")]
    return "\n".join(lines) + "\n"


def _wrapped(numbers: list[int], indent: str) -> str:
    return textwrap.fill("[" + ", ".join(map(str, numbers)) + "]", 138, initial_indent=indent, subsequent_indent=indent + " ")


def main(arguments: list[str] | None = None) -> int:
    """Print the table of a trace; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m serving.workload.tabulate", description="Derive the table of a trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--source", required=True, help="where the trace comes from")
    parser.add_argument("--licence", required=True, help="the trace's licence")
    options = parser.parse_args(arguments)
    try:
        table = tabulate(options.trace)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.write(to_yaml(table, {"trace": options.trace.name, "source": options.source, "licence": options.licence}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
