"""Sweeps: what is varied, common random numbers, and the same table however it was computed."""

from __future__ import annotations

import csv
import json
import math

import pytest
import yaml
from studies import SMALL, Terminal

import twinserve
from serving.errors import InputError
from serving.scenario import from_mapping
from sim.run import simulate
from sim.study.executors import open_pool
from sim.study.points import Points
from sim.study.sweep import columns_of, flat, points_of, run_sweep, write_tables
from sim.study.tables import write
from sim.study.vary import Dimension, dimension, grid, listed_points, random_points, split_list

BASE = from_mapping({**SMALL, "workload": {**SMALL["workload"], "requests": 60}})
SETTINGS = [{"cluster.replicas": replicas, "workload.arrivals.rate_rps": rate} for replicas in (1, 2) for rate in (5.0, 20.0)]


@pytest.fixture
def small(tmp_path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(BASE.resolved()))
    return str(path)


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = twinserve.main(list(arguments))
    return code, *capsys.readouterr()


def test_the_words_of_vary():
    assert dimension("a.b=1,2.5,null,x", None).values == (1, 2.5, None, "x")
    assert dimension("a=1:4:4", None).values == (1, 2, 3, 4)
    assert dimension("a=0:1:5", 0.5).values == (0, 0.25, 0.5, 0.75, 1)
    assert dimension("a=log:64:4096:7", 2048).values == (64, 128, 256, 512, 1024, 2048, 4096)
    assert dimension("a=log:10:100:3", 12).values == (10, 32, 100), "where a whole number stands, steps are rounded"
    assert dimension("a=5:1:3", None).values == (5, 3, 1)
    assert dimension("a={dist: constant, value: 3},7", None).values == ({"dist": "constant", "value": 3}, 7)
    assert dimension("a=2,2,2", None).values == (2,)
    assert split_list("[1,2],'a,b',c") == ["[1,2]", "'a,b'", "c"]


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=1,,2", "a=log:0:5:3", "a=5:1", "a=1:2:0", "a={x"])
def test_bad_words_name_the_path(text):
    with pytest.raises(InputError, match="--vary"):
        dimension(text, None)


def test_a_grid_takes_the_last_dimension_fastest():
    assert grid([Dimension("a", (1, 2)), Dimension("b", ("x", "y"))]) == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")]
    with pytest.raises(InputError, match="number of steps"):
        grid([dimension("a=1:2", None)])
    with pytest.raises(InputError, match="more than"):
        grid([Dimension(name, tuple(range(1000))) for name in "abc"])


def test_random_points_visit_every_part_of_a_range():
    dimensions = [dimension("a=0:10", None), dimension("b=log:1:1000", None), dimension("c=x,y", None)]
    drawn = random_points(dimensions, 20, seed=1, whole={"a": False, "b": True, "c": False})
    assert sorted(int(point["a"] * 2) for point in drawn) == list(range(20))
    assert sorted(math.log10(point["b"]) for point in drawn)[10] > 1.4, "half of a log range lies above its geometric middle"
    assert all(isinstance(point["b"], int) for point in drawn) and [point["c"] for point in drawn].count("x") == 10
    assert drawn == random_points(dimensions, 20, seed=1, whole={"a": False, "b": True, "c": False})


def test_listed_points(tmp_path):
    (tmp_path / "a.csv").write_text("cluster.replicas,llm\n2,qwen3-8b\n3,qwen3-4b\n")
    (tmp_path / "a.yaml").write_text("- {cluster.replicas: 2, llm: qwen3-8b}\n- {cluster.replicas: 3, llm: qwen3-4b}\n")
    assert listed_points(tmp_path / "a.csv") == listed_points(tmp_path / "a.yaml") == [
        {"cluster.replicas": 2, "llm": "qwen3-8b"}, {"cluster.replicas": 3, "llm": "qwen3-4b"}
    ]  # fmt: skip
    (tmp_path / "b.csv").write_text("a,b\n1\n")
    with pytest.raises(InputError, match=r"b\.csv:2"):
        listed_points(tmp_path / "b.csv")


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("cluster.replica=1,2", "--vary cluster.replica: unknown key (did you mean 'replicas'?)"),
        ("clustr.replicas=1,2", "--vary clustr.replicas: unknown key (did you mean 'cluster'?)"),
        ("cluster.gpu=h100-smx", "did you mean 'h100-sxm'?"),
        ("cluster.replicas=1.5,2", "--vary cluster.replicas: must be a whole number"),
        ("workload.arrivals.proces=poisson", "did you mean 'process'?"),
        ("plan.top=1,2", "--vary plan.top: unknown key"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(capsys, small, tmp_path, vary, message):
    code, out, err = call(capsys, "sweep", small, "--vary", vary, "--jobs", "1", "--out", str(tmp_path / "out"))
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""


def test_a_row_is_the_run_it_names_under_common_random_numbers():
    with Points(None) as store, open_pool(jobs=1) as use:
        done = run_sweep(points_of(BASE, SETTINGS, 2), use, store)
    assert [row["seed"] for row in done.rows] == [5, 6] * 4
    alone = simulate(from_mapping({**BASE.resolved(), "seed": 6, "cluster": {"gpu": "l40s", "replicas": 2}}, ["workload.arrivals.rate_rps=20.0"])).summary
    last = {name: value for name, value in done.rows[-1].items() if name in flat(alone)}
    assert last == flat(alone)
    by_seed = {seed: {row["prompt_tokens_per_s"] * row["duration_s"] for row in done.rows if row["seed"] == seed} for seed in (5, 6)}
    assert all(max(tokens) - min(tokens) < 1e-6 * max(tokens) for tokens in by_seed.values()) and len(by_seed) == 2


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_narrow_terminal_leaves_figures_out_rather_than_cut_them(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = Terminal()
    header = ["rate_rps", "ordering", "seed", "TTFT p99 ms", "goodput /s", "output tok/s", "in SLO %", "load", "$/M out"]
    body = [["8", "shortest_job", "1", "86.1", "6.80", "1,566", "100", "0.16", "1.05"], ["40", "fcfs", "2", "121", "17.1", "3,933", "100", "0.78", "0.42"]]
    write(shown, ["a sweep"], header, body, words=3)
    lines = shown.lines()
    assert max(map(len, lines)) <= columns and not any("\u2026" in line for line in lines)
    left_out = " ".join(lines).partition("no room for ")[2]
    kept = [index for index, title in enumerate(header) if title not in left_out]
    assert [line.split() for line in lines if "shortest_job" in line] == [[body[0][index] for index in kept]]
    assert (len(kept) == len(header)) == (columns > 60) and kept == list(range(len(kept))), left_out


def test_interrupted_and_resumed_equals_uninterrupted_byte_for_byte(tmp_path):
    points = points_of(BASE, SETTINGS, 1)

    def tables(folder, stop_after):
        def progress(done, _):
            if done == stop_after:
                raise KeyboardInterrupt

        with Points(folder, ("sweep.csv", "sweep.parquet", "sweep.json")) as store, open_pool(jobs=1) as use:
            write_tables(run_sweep(points, use, store, progress), folder, {})
        return [(folder / name).read_bytes() for name in ("sweep.csv", "sweep.parquet", "points.jsonl")]

    whole = tables(tmp_path / "a", None)
    with pytest.raises(KeyboardInterrupt):
        tables(tmp_path / "b", 2)
    with open(tmp_path / "b" / "points.jsonl", "a") as file:
        file.write('{"key": "torn')
    assert tables(tmp_path / "b", None) == whole
    before = (tmp_path / "b" / "points.jsonl").read_bytes()
    assert tables(tmp_path / "b", None) == whole and (tmp_path / "b" / "points.jsonl").read_bytes() == before


def test_two_processes_make_the_table_of_one(capsys, small, tmp_path):
    arguments = ("sweep", small, "--vary", "cluster.replicas=1,2", "--vary", "workload.arrivals.rate_rps=5,20", "--seeds", "2")
    one, two = (call(capsys, *arguments, "--jobs", jobs, "--out", str(tmp_path / jobs)) for jobs in "12")
    assert one[0] == two[0] == 0 and one[1] == two[1] and one[1].isascii()
    assert (tmp_path / "1" / "sweep.csv").read_bytes() == (tmp_path / "2" / "sweep.csv").read_bytes()
    rows = list(csv.DictReader((tmp_path / "1" / "sweep.csv").read_text().splitlines()))
    assert len(rows) == 8 and rows[0]["cluster.replicas"] == "1" and float(rows[0]["ttft_s.p99"]) > 0
    from validate.report.study import read_sweep, varied

    assert varied(read_sweep(tmp_path / "1")) == ["cluster.replicas", "workload.arrivals.rate_rps", "seed"]


def test_what_does_not_fit_is_a_row(capsys, small):
    code, out, err = call(capsys, "sweep", small, "--vary", "llm=llama-3.1-8b,llama-3.1-70b", "--jobs", "1", "--json")
    fits, does_not = json.loads(out)["points"]
    assert code == 0 and fits["not_run"] is None and "does not fit" in does_not["not_run"] and err == ""
    code, out, err = call(capsys, "sweep", small, "--vary", "llm=llama-3.1-70b", "--jobs", "1")
    assert code == 2 and "none of 1 points could run" in err and out == ""


def test_columns_have_one_type_each():
    from sim.study.sweep import Sweep

    rows = [{"a": 1, "b": None, "not_run": None}, {"a": 2.5, "b": {"x": 1}, "not_run": None}, {"a": None, "b": "t", "not_run": "why"}]
    assert columns_of(Sweep(["a", "b"], rows)) == {"a": [1.0, 2.5, None], "b": [None, '{"x": 1}', "t"], "not_run": [None, None, "why"]}
