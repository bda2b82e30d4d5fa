"""Every example in docs/workloads.md is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from serving.scenario.arrivals import Arrivals
from serving.scenario.distributions import Distribution
from serving.scenario.yaml_text import parse
from serving.workload.traces import FORMATS

DOCS = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()


@pytest.mark.parametrize(("key", "kind", "least"), [("process", Arrivals, 9), ("dist", Distribution, 9)])
def test_examples_of_processes_and_distributions(key: str, kind: object, least: int) -> None:
    examples = re.findall(rf"`(\{{{key}: [^`]*\}})`", DOCS)
    assert len(examples) >= least
    for example in examples:
        value = parse(example, "docs").value
        if "file" not in value:
            TypeAdapter(kind).validate_python(value)


def test_every_trace_format_is_listed_with_a_row_that_it_reads() -> None:
    for name in FORMATS:
        assert re.search(rf"^\| {name} \|", DOCS, re.MULTILINE), name
    for row in re.findall(r"^\| [a-z-]+ \| JSONL.*`(\{.*\})` \|$", DOCS, re.MULTILINE):
        assert any(each.recognises(row) for each in FORMATS.values()), row
