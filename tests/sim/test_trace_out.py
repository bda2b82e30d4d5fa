"""The timeline obeys the trace-event format, loses nothing of the run, and is written in bounded memory."""

from __future__ import annotations

import gzip
import json
import math
import tracemalloc
from collections import defaultdict
from itertools import pairwise

import pytest

from serving.errors import InputError
from sim.trace_out import write_run_trace, write_trace

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"}, "b": {"name", "cat", "id", "ts", "pid"}, "e": {"name", "cat", "id", "ts", "pid"},
    "C": {"name", "ts", "pid", "args"}, "i": {"name", "ts", "pid", "s"}, "M": {"name", "pid", "args"},
}  # fmt: skip


def steps(count: int, *, replica: int = 0, overlap_s: float = 0.0) -> dict:
    start = [i * 0.01 for i in range(count)]
    return {
        "replica": [replica] * count, "start_s": start, "duration_s": [0.01 + overlap_s] * count, "prefill_tokens": [512 * (i % 4 == 0) for i in range(count)],
        "prefill_seqs": [int(i % 4 == 0) for i in range(count)], "decode_seqs": [i % 7 for i in range(count)], "decode_context_tokens": [100 * i for i in range(count)],
        "kv_blocks_used": [10 + i // 5 for i in range(count)], "graph": [8] * count, "preempted": [0] * count, "steps": [1] * count,
    }  # fmt: skip


def requests(count: int, **changes) -> dict:
    columns = {
        "request_id": list(range(count)), "class": ['p0 "fast"'] * count, "arrival_s": [0.1 * i for i in range(count)], "prompt_tokens": [512] * count,
        "cached_tokens": [0] * count, "output_tokens": [32] * count, "scheduled_s": [0.1 * i + 0.02 for i in range(count)],
        "first_token_s": [0.1 * i + 0.05 for i in range(count)], "finish_s": [0.1 * i + 0.4 for i in range(count)], "replica": [0] * count,
        "status": ["completed"] * count,
    }  # fmt: skip
    return {**columns, **changes}


def check(document: dict) -> list[dict]:
    """Assert the rules of the format on every event, nesting and balance included; return the events."""
    events, open_slices, tracks = document["traceEvents"], defaultdict(list), defaultdict(list)
    for event in events:
        assert set(event) >= REQUIRED[event["ph"]] | {"ph"}, event
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0 and math.isfinite(event["ts"])
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "b":
            open_slices[event["cat"], event["id"]].append(event)
        if event["ph"] == "e":
            begun = open_slices[event["cat"], event["id"]].pop()  # the innermost slice ends first
            assert begun["name"] == event["name"] and event["ts"] >= begun["ts"]
            assert all(outer["ts"] <= begun["ts"] for outer in open_slices[event["cat"], event["id"]])
    assert not any(open_slices.values())
    for slices in tracks.values():
        slices.sort()
        assert all(end <= start + 0.0015 for (_, end), (start, _) in pairwise(slices))
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert named == {event["pid"] for event in events}
    return events


def test_every_step_and_request_is_there(tmp_path):
    path = tmp_path / "t.json"
    count = write_trace(path, [steps(50), steps(30, replica=1)], [requests(20)], label="x")
    events = check(json.loads(path.read_text()))
    assert len(events) == count
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 80 and sum(event["dur"] for event in slices) == pytest.approx(80 * 0.01e6)
    phases = [event["name"] for event in events if event["ph"] == "b"]
    assert phases.count("queue") == phases.count("prefill") == phases.count("decode") == 20
    assert {event["name"] for event in slices} == {"decode", "mixed", "prefill"}


def test_plans_in_flight_get_tracks_of_their_own(tmp_path):
    write_trace(tmp_path / "t.json", [steps(20, overlap_s=0.006)], [])
    events = check(json.loads((tmp_path / "t.json").read_text()))
    assert {event["tid"] for event in events if event["ph"] == "X"} == {1, 2}


def test_requests_that_never_ran_are_instants(tmp_path):
    nan = [math.nan] * 3
    write_trace(tmp_path / "t.json", [], [requests(3, scheduled_s=nan, first_token_s=nan, replica=[-1] * 3, status=["rejected"] * 3)])
    events = check(json.loads((tmp_path / "t.json").read_text()))
    assert [event["name"] for event in events if event["ph"] == "i"] == [f"request {i} rejected" for i in range(3)]
    write_trace(tmp_path / "u.json", [], [requests(1, first_token_s=[math.nan], status=["aborted"])])
    assert not any(event["name"] == "decode" for event in check(json.loads((tmp_path / "u.json").read_text())))


def test_overlapping_transfers(tmp_path):
    moves = [{"source": 0, "target": 1, "start_s": 0.1 * i, "duration_s": 0.25, "bytes": 70e6} for i in range(3)]
    write_trace(tmp_path / "t.json", [], [], transfers=moves)
    events = check(json.loads((tmp_path / "t.json").read_text()))
    assert len([event for event in events if event.get("cat") == "transfer"]) == 6


def test_gzip_is_the_same_text_and_the_same_bytes_again(tmp_path):
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        write_trace(tmp_path / name, [steps(40)], [requests(5)])
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.json").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()


def test_nothing_at_all_is_a_valid_trace(tmp_path):
    assert write_trace(tmp_path / "t.json", [], []) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []


def test_memory_does_not_grow_with_the_run(tmp_path):
    def peak(batches: int) -> int:
        tracemalloc.start()
        write_trace(tmp_path / "t.json", (steps(2000) for _ in range(batches)), iter(()))
        reached = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return reached

    assert peak(16) < 1.3 * peak(4)


def test_a_full_disk_is_the_users_to_know(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(tmp_path / "file" / "t.json", [], [])


def test_a_recorded_run(tmp_path):
    from serving.scenario import load
    from sim.run import simulate

    simulate(load("chat-8b", ["workload.requests=60", "cluster.replicas=2"]), out=tmp_path / "run")
    write_run_trace(tmp_path / "run", tmp_path / "t.json.gz")
    events = check(json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())))
    assert len([event for event in events if event["ph"] == "b" and event["name"].startswith("request")]) == 60
    with pytest.raises(InputError, match="does not exist"):
        write_run_trace(tmp_path / "none", tmp_path / "t.json")


def test_the_command_writes_it_with_and_without_a_run_directory(tmp_path, capsys):
    import twinserve

    short = ["run", "chat-8b", "--set", "workload.requests=20"]
    assert twinserve.main([*short, "--trace-out", str(tmp_path / "a.json")]) == 0
    assert twinserve.main([*short, "--out", str(tmp_path / "run"), "--trace-out", str(tmp_path / "b.json")]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert len(check(json.loads((tmp_path / "a.json").read_text()))) > 100
    assert twinserve.main([*short, "--no-records", "--trace-out", str(tmp_path / "c.json")]) == 2
    assert "--trace-out" in capsys.readouterr().err
