"""Profiling designed shapes: within the limits, repeated until known, resumable, and readable as a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.clocks import ReportedClock
from engine.measure import Case, measure, relative_half_width
from engine.profile import designed_cases, write_run
from engine.run import Engine
from engine.stub_runner import StubRunner
from serving.errors import InputError
from serving.records import open_run
from serving.scenario import from_mapping

FACTS = {"device": "stub"}


def scenario(**batching):
    return from_mapping({
        "version": 1, "name": "profiled", "seed": 3, "llm": "smollm2-135m", "cluster": {"gpu": "h100-sxm"},
        "kv_cache": {"block_tokens": 4, "blocks": 200},
        "policy": {"batching": {"name": "chunked_prefill", "max_batch_tokens": 64, "max_batch_seqs": 16, **batching}},
        "workload": {"requests": 1, "arrivals": "all_at_once", "prompt_tokens": {"dist": "constant", "value": 4}, "output_tokens": {"dist": "constant", "value": 4}},
    })  # fmt: skip


def engine(noise=0.0, interrupt_at=None):
    rng, count = np.random.default_rng(0), [0]

    def duration_s(batch):
        count[0] += 1
        if count[0] == interrupt_at:
            raise KeyboardInterrupt
        return 0.001 * (1 + len(batch.sequences)) * float(np.exp(rng.normal(0, noise)))

    return Engine(StubRunner(4, duration_s, check=False), 200, 128, 97, "stub")


def run(eng, cases, log, **options):
    arguments = {"seed": 1, "block_tokens": 4, "vocab": 97, "budget_s": 20.0, "target": 0.05} | options
    return measure(eng.runner, ReportedClock(), cases, log, FACTS, **arguments)


def test_the_designed_cases_cover_every_regime_within_the_limits():
    spec = scenario()
    cases = designed_cases(spec, engine())
    assert {case.regime for case in cases} == {"prefill", "decode", "mixed"} and len(set(cases)) == len(cases)
    for case in cases:
        tokens = case.decodes + sum(new for new, _ in case.chunks)
        assert tokens <= 64 and case.decodes + len(case.chunks) <= 16 and case.context <= 128
        assert all(new + before <= 128 for new, before in case.chunks)
    assert max(case.decodes for case in cases) == 16 and max(new for case in cases for new, _ in case.chunks) == 64


def test_cases_are_repeated_until_they_are_known_and_no_longer(tmp_path):
    cases = [Case(((8, 0),)), Case((), 4, 16)]
    quiet = run(engine(), cases, tmp_path / "quiet")
    assert [len(quiet.durations_s(at)) for at in range(2)] == [4, 4]
    noisy = run(engine(noise=0.1), cases, tmp_path / "noisy")
    assert all(len(noisy.durations_s(at)) > 8 and relative_half_width(noisy.durations_s(at)) <= 0.05 for at in range(2))


def test_an_interrupted_profile_goes_on_where_it_was(tmp_path):
    cases, log = [Case((), n, 16) for n in range(1, 7)], tmp_path / "log"
    first = run(engine(interrupt_at=15), cases, log)
    assert first.interrupted and 0 < len(first.results) < 15
    second = run(engine(), cases, log)
    assert not second.interrupted and second.results[: len(first.results)] == first.results and len(second.results) == 24
    assert len(log.read_text().splitlines()) == 25


def test_a_line_that_was_cut_short_is_measured_again(tmp_path):
    cases, log = [Case((), n, 16) for n in range(1, 4)], tmp_path / "log"
    run(engine(interrupt_at=9), cases, log)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-1]) + lines[-1][:7])
    again = run(engine(), cases, log)
    assert len(again.results) == 12 and log.read_text().splitlines()[: len(lines) - 1] == [line.rstrip("\n") for line in lines[:-1]]
    assert run(engine(), cases, log).results == again.results, "the file is whole again"


def test_the_budget_ends_it(tmp_path):
    measured = run(engine(noise=1.0), [Case((), 1, 4)] * 1, tmp_path / "log", budget_s=0.05, target=1e-6)
    assert measured.results and not measured.interrupted


@pytest.mark.parametrize("damage", ["facts", "cases", "text"])
def test_measurements_of_something_else_are_not_mixed_in(tmp_path, damage):
    cases, log = [Case((), 1, 16)], tmp_path / "log"
    run(engine(), cases, log)
    header, *rows = log.read_text().splitlines()
    if damage == "text":
        log.write_text("not json\n")
    else:
        log.write_text("\n".join([json.dumps({**json.loads(header), damage: ["other"]}), *rows]) + "\n")
    with pytest.raises(InputError, match="is no file of measurements" if damage == "text" else f"measurements of other {damage}"):
        run(engine(), cases, log)


def test_what_was_measured_reads_as_a_run(tmp_path):
    spec, eng = scenario(), engine()
    cases = designed_cases(spec, eng)
    measured = run(eng, cases, tmp_path / "log")
    write_run(spec, eng, measured, tmp_path / "out")
    found = open_run(tmp_path / "out")
    assert len(found.steps) == len(found.engine_steps) == len(measured.results) and found.info["device"] == "stub"
    assert found.steps["prefill_tokens"].max() == 64 and (found.steps["duration_s"] > 0).all()
