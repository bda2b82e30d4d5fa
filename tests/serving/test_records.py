"""The run directory: what is written is read back, it appears whole or not at all, and every break has a name."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import numpy as np
import pytest

from serving import records
from serving.errors import InputError
from serving.metrics import Metrics
from serving.records import RunWriter, TableLog, open_run

NAN = float("nan")
STEPS = [(0, 0, 0.5, 0.1, 512, 1, 0, 0, 32, 0, 0, 1), (1, 1, 0.6, 0.2, 0, 0, 8, 4096, 40, 8, 1, 5)]
PLANS = [(0, 0.5, 0.6, [4, 5], [], [(4, 512)], [], [], [], 0, []), (1, 0.6, 0.8, [], [9], [], [4], [], [5], 1, [3, 1])]


def request_columns() -> dict[str, np.ndarray]:
    metrics = Metrics(("p0", "p1"), lambda _: (NAN, NAN, NAN), keep_rows=True)
    metrics.finish((8, 1, 1.0, 100, 16, 5, 1.5, 2.0, 3.0, 1, 0, 0))
    metrics.finish((3, 0, 1.0, 9000, 0, 0, NAN, NAN, 1.0, 0, 1, 1))
    return metrics.columns()


def write(out, *, partial=False, steps=True, plans=True, requests=True):
    with RunWriter(out, steps=steps, plans=plans) as writer:
        for item in STEPS if steps else ():
            writer.steps.append(item)
        for item in PLANS if plans else ():
            writer.plans.append(item)
        writer.publish(
            scenario={"name": "t", "seed": 4}, seed=4, device="simulated h100-sxm", summary={"schema_version": 1, "x": 0.1},
            requests=request_columns() if requests else None, class_names=("p0", "p1"), partial=partial,
        )  # fmt: skip


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_what_is_written_is_read_back(tmp_path):
    write(tmp_path / "deep" / "run", partial=True)
    run = open_run(tmp_path / "deep" / "run")
    assert run.partial and run.info["seed"] == 4 and run.info["scenario"]["name"] == "t" and run.info["device"] == "simulated h100-sxm"
    assert run.summary == {"schema_version": 1, "x": 0.1}
    assert list(run.requests.columns) == list(records.REQUEST_COLUMNS)
    assert run.requests["request_id"].tolist() == [3, 8]
    assert run.requests["class"].tolist() == ["p0", "p1"] and run.requests["status"].tolist() == ["rejected", "completed"]
    assert run.steps.values.tolist() == [list(item) for item in STEPS]
    assert run.plans["chunks"].iloc[0].tolist() == [{"request_id": 4, "new_tokens": 512}]
    assert run.plans["aborted"].iloc[1].tolist() == [9] and run.plans["accepted"].iloc[1].tolist() == [3, 1]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run"]  # no temporary left


def test_equal_input_gives_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == set(records.RUN_FILES) - {"engine_steps.parquet", "stages.parquet"}


def test_a_failed_run_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), RunWriter(tmp_path / "run") as writer:
        writer.steps.append(STEPS[0])
        raise RuntimeError("the simulation broke")
    assert list(tmp_path.iterdir()) == []


def test_a_run_replaces_a_run_and_nothing_else(tmp_path):
    write(tmp_path / "run")
    write(tmp_path / "run", plans=False, partial=True)
    assert open_run(tmp_path / "run").partial and not open_run(tmp_path / "run").has("plans")
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        RunWriter(tmp_path / "run")
    assert contents(tmp_path / "run") == before
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        RunWriter(tmp_path / "file")
    with pytest.raises(InputError, match="can't be written"):
        RunWriter(tmp_path / "file" / "below")


def test_a_long_log_is_flushed_in_row_groups(tmp_path):
    import pyarrow.parquet as pq

    log = TableLog(tmp_path / "steps.parquet", records.STEP_COLUMNS)
    rows = records.FLUSH_ROWS * 2 + 10
    for i in range(rows):
        log.append((i, 0, i * 0.1, 0.1, 0, 0, 8, 100, 7, 8, 0, 1))
        log.flush_if_full()
        assert len(log._rows) < records.FLUSH_ROWS
    log.close()
    file = pq.ParquetFile(tmp_path / "steps.parquet")
    assert file.num_row_groups == 3 and file.metadata.num_rows == rows


@contextmanager
def file_size_limit(limit_bytes: int):
    """Let no file of this process grow beyond the limit: what a full disk feels like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_finished_files(tmp_path):
    noise = np.random.default_rng(0).random(40_000)
    columns = {name: np.zeros(len(noise), dtype=np.int64) for name in request_columns()} | {"arrival_s": noise}
    writer = RunWriter(tmp_path / "run")
    with pytest.raises(InputError, match=r"requests\.parquet: can't be written: .*large.*kept"), file_size_limit(65536), writer:
        writer.publish(scenario={}, seed=1, device="d", summary={"x": 1}, requests=columns, class_names=("a",))
    run = open_run(tmp_path / "run")
    assert run.summary == {"x": 1} and run.has("steps") and not run.has("requests")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: run.rename(run.parent / "gone"), "does not exist"),
        (lambda run: (run / "run.yaml").unlink(), r"no run\.yaml"),
        (lambda run: (run / "run.yaml").write_text("seed: [1"), r"run\.yaml:1: is not YAML"),
        (lambda run: (run / "run.yaml").write_bytes(b"\xff\xfe\x00"), "not text"),
        (lambda run: (run / "run.yaml").write_text("- 1"), "lacks the key 'twinserve'"),
        (lambda run: (run / "summary.json").unlink(), r"summary\.json"),
        (lambda run: (run / "summary.json").write_text('{"a":'), r"summary\.json:1: is not JSON"),
        (lambda run: (run / "summary.json").write_text("[]"), "no object"),
        (lambda run: (run / "requests.parquet").unlink(), r"requests\.parquet: does not exist \(.*--no-records"),
        (lambda run: (run / "steps.parquet").write_bytes(b"PAR1 but not really"), r"steps\.parquet: is not a readable parquet"),
        (lambda run: (run / "plans.parquet").write_bytes((run / "steps.parquet").read_bytes()), "lacks the column 'schedule_s'"),
    ],
)
def test_every_break_is_named(tmp_path, damage, message):
    write(tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(InputError, match=message):
        run = open_run(tmp_path / "run")
        for table in ("summary", "requests", "steps", "plans"):
            getattr(run, table)


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("duration_s", [0.1, None], r"steps\.parquet: row 1: 'duration_s' is empty"),
        ("duration_s", [0.1, float("nan")], r"row 1: 'duration_s' is nan"),
        ("start_s", [float("inf"), 0.1], r"row 0: 'start_s' is inf"),
        ("decode_seqs", [1, -1], r"row 1: 'decode_seqs' is -1"),
        ("decode_seqs", ["1", "2"], r"'decode_seqs' holds string, not int32"),
    ],
)
def test_a_table_with_a_hole_names_row_and_column(tmp_path, column, values, says):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from serving.records import STEP_COLUMNS, Run

    rows = {name: [1, 1] for name in STEP_COLUMNS} | {column: values}
    pq.write_table(pa.table(rows), tmp_path / "steps.parquet")
    with pytest.raises(InputError, match=says):
        Run(tmp_path, {}).steps  # noqa: B018


@pytest.mark.parametrize(
    ("text", "complete", "says"),
    [
        ('{"ttft_s": null}', False, "ttft_s: must be a mapping"),
        ('{"requests": {"arrived": "many"}}', False, r"requests\.arrived: must be a number \(got 'many'\)"),
        ('{"goodput_rps": [1]}', False, "goodput_rps: must be a number"),
        ('{"slo_attainment": {"overall": 1, "by_class": 3}}', False, "by_class: must be a mapping"),
        ("{}", True, "duration_s: is missing"),
    ],
)
def test_a_summary_whose_figures_are_none(tmp_path, text, complete, says):
    import json

    from serving.run_checks import check_summary

    with pytest.raises(InputError, match=says):
        check_summary(json.loads(text), tmp_path / "summary.json", complete=complete)
