"""Importers: the statistics of a run directory are those of the file, and a file of the wrong kind is told from the right one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from serving.errors import InputError
from serving.records import open_run
from validate.importers import detect, import_file
from validate.importers.source import Source

FORMATS = {
    "aiperf_conc4__profile_export.jsonl": "aiperf",
    "aiperf_conc4__profile_export_aiperf.json": "aiperf",
    "guidellm_0.8_report_v2.json": "guidellm",
    "guidellm_v0.2_benchmarks_stripped.json": "guidellm",
    "mlperf_loadgen_summary_server.txt": "mlperf-loadgen",
    "vllm_bench_serve_v0.10_pd_summary.json": "vllm-bench",
    "vllm_benchmark_serving_v0.6.3_detailed_5req.json": "vllm-bench",
    "llmd_br_v0_2_1_example.yaml": None,
}


def sample(data_dir, name):
    return data_dir / "client_formats" / name


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path


def vllm_result(**changes):
    result = {
        "model_id": "m", "num_prompts": 3, "completed": 2, "duration": 4.0, "request_throughput": 0.5, "output_throughput": 1.5, "total_input_tokens": 30,
        "mean_ttft_ms": 150.0, "median_ttft_ms": 150.0, "p99_ttft_ms": 199.0, "mean_e2el_ms": 400.0, "input_lens": [10, 12, 8], "output_lens": [3, 3, 0],
        "ttfts": [0.1, 0.2, 0.0], "itls": [[0.1, 0.2], [0.1, 0.1], []], "errors": ["", "", "timed out"], "start_times": [7.0, 7.5, 8.0],
    }  # fmt: skip
    return {key: value for key, value in {**result, **changes}.items() if value is not None}


def step_lines(rows):
    header = "duration_ms,prefill_tokens,prefill_seqs,decode_seqs,decode_context_tokens,kv_blocks_used"
    return "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"


@pytest.mark.parametrize(("name", "expected"), FORMATS.items())
def test_each_sample_is_told_from_the_others(data_dir, tmp_path, name, expected):
    assert detect(sample(data_dir, name)) == expected
    for wrong in {"vllm-bench", "aiperf", "guidellm", "vllm-requests", "mlperf-loadgen", "step-log"} - {expected}:
        with pytest.raises(InputError, match=f"it looks like {expected or 'an llm-d benchmark report'}"):
            import_file(wrong, sample(data_dir, name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_vllm_detail_becomes_requests(tmp_path):
    import_file("vllm-bench", write_json(tmp_path / "r.json", vllm_result()), tmp_path / "run")
    run = open_run(tmp_path / "run")
    rows = run.requests
    assert rows["arrival_s"].tolist() == [0.0, 0.5, 1.0]
    assert rows["status"].tolist() == ["completed", "completed", "error"]
    assert rows["finish_s"].tolist()[:2] == pytest.approx([0.4, 0.9])
    assert run.summary["tpot_s"]["mean"] == pytest.approx((0.15 + 0.1) / 2)
    assert run.summary["itl_s"]["mean"] == pytest.approx(0.5 / 4)
    assert run.summary["requests"] == {"arrived": 3, "completed": 2, "rejected": 0, "failed": 1, "preempted": None}
    assert run.summary["output_tokens_per_s"] == 1.5 and run.summary["prompt_tokens_per_s"] == 7.5
    assert np.isnan(rows["scheduled_s"]).all() and run.summary["queue_s"]["mean"] is None
    unknown = ("gpu_busy_fraction", "preemptions", "prefix_cache_hit_rate", "kv_utilisation", "load_factor", "cost_usd", "steps", "slo_attainment")
    assert all(run.summary[key] is None for key in unknown)
    assert str(run.info["device"]).startswith("real")


def test_vllm_summary_keeps_what_it_states(data_dir, tmp_path):
    import_file("vllm-bench", sample(data_dir, "vllm_bench_serve_v0.10_pd_summary.json"), tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert not run.has("requests")
    assert run.summary["ttft_s"]["p99"] == pytest.approx(3.5154284369803395) and run.summary["ttft_s"]["p90"] is None
    assert run.summary["output_tokens_per_s"] == pytest.approx(2663.123, abs=1e-3)


def test_a_detailed_file_cut_short_keeps_the_statistics_of_all(data_dir, tmp_path):
    run = import_file("vllm-bench", sample(data_dir, "vllm_benchmark_serving_v0.6.3_detailed_5req.json"), tmp_path / "run")
    assert run.partial and "5 of 1000 requests" in " ".join(run.notes) and "cannot be replayed" in " ".join(run.notes)
    read = open_run(tmp_path / "run")
    assert read.partial and len(read.requests) == 5
    assert read.summary["ttft_s"]["mean"] == pytest.approx(1.48639374)
    assert read.requests["status"].tolist() == ["completed"] * 4 + ["error"]


def test_aiperf_records_repeat_aiperf_s_own_tpot(data_dir, tmp_path):
    path = sample(data_dir, "aiperf_conc4__profile_export.jsonl")
    import_file("aiperf", path, tmp_path / "run")
    run = open_run(tmp_path / "run")
    metrics = [record["metrics"] for _, record in Source(path).lines()]
    for ours, theirs in (("tpot_s", "inter_token_latency"), ("ttft_s", "time_to_first_token"), ("e2e_s", "request_latency")):
        assert run.summary[ours]["mean"] == pytest.approx(np.mean([m[theirs]["value"] for m in metrics]) / 1e3, rel=1e-6)
    assert run.requests["arrival_s"].min() == 0.0
    gaps = [gap for m in metrics for gap in m["inter_chunk_latency"]["value"]]
    assert run.summary["itl_s"]["mean"] == pytest.approx(np.mean(gaps) / 1e3, rel=1e-6)


def test_aiperf_statistics_and_device(data_dir, tmp_path):
    import_file("aiperf", sample(data_dir, "aiperf_conc4__profile_export_aiperf.json"), tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.summary["tpot_s"]["p90"] == pytest.approx(0.018860093)
    assert run.summary["duration_s"] == pytest.approx(65.7975, abs=1e-3)
    assert "RTX 6000 Ada" in run.info["device"] and run.info["seed"] == 100
    assert run.info["scenario"]["imported"]["concurrency"] == 4


@pytest.mark.parametrize(("name", "select", "includes_ttft"), [("guidellm_v0.2_benchmarks_stripped.json", None, False), ("guidellm_0.8_report_v2.json", 1, True)])
def test_guidellm_s_tpot_is_converted(data_dir, tmp_path, name, select, includes_ttft):
    """Equal output lengths tie the definitions: TPOT x (n - 1) = guidellm's x n, less the TTFT it includes from 0.3 on."""
    import_file("guidellm", sample(data_dir, name), tmp_path / "run", select)
    summary = open_run(tmp_path / "run").summary
    metrics = Source(sample(data_dir, name)).document["benchmarks"][select or 0]["metrics"]
    theirs, tokens = metrics["time_per_output_token_ms"]["successful"]["mean"] / 1e3, metrics["output_token_count"]["successful"]["mean"]
    whole = theirs * tokens - (summary["ttft_s"]["mean"] if includes_ttft else 0.0)
    assert summary["tpot_s"]["mean"] == pytest.approx(whole / (tokens - 1), rel=2e-3)
    assert abs(summary["tpot_s"]["mean"] / theirs - 1) > 0.005
    seconds = metrics["output_token_count"]["successful"]["total_sum"] / summary["output_tokens_per_s"]
    assert seconds == pytest.approx(summary["duration_s"])


def test_guidellm_records_become_requests_and_several_benchmarks_need_a_choice(data_dir, tmp_path):
    document = Source(sample(data_dir, "guidellm_0.8_report_v2.json")).document
    with pytest.raises(InputError, match=r"holds 2 benchmarks \(choose one with --select: 0: constant rate 2.0, 1: constant rate 4.0\)"):
        import_file("guidellm", sample(data_dir, "guidellm_0.8_report_v2.json"), tmp_path / "run")
    with pytest.raises(InputError, match="--select: 5 is not one of the 2"):
        import_file("guidellm", sample(data_dir, "guidellm_0.8_report_v2.json"), tmp_path / "run", 5)
    record = {"prompt_tokens": 9, "output_tokens": 11, "time_to_first_token_ms": 20.0, "inter_token_latency_ms": 3.0}
    records = [{**record, "info": {"timings": {"request_start": 100.0 + i}}} for i in range(2)]
    document["benchmarks"][0]["requests"] = {"successful": records, "errored": [], "incomplete": [{"request_start_time": 102.0}]}
    import_file("guidellm", write_json(tmp_path / "g.json", document), tmp_path / "run", 0)
    run = open_run(tmp_path / "run")
    assert run.requests["status"].tolist() == ["completed", "completed", "aborted"]
    assert run.summary["tpot_s"]["mean"] == pytest.approx(0.003) and run.summary["e2e_s"]["mean"] == pytest.approx(0.05)


def test_vllm_requests_join_the_clocks_at_request_zero(data_dir, tmp_path):
    folder = data_dir / "measured" / "vllm_0.19_llama-3.1-8b_rtx4090"
    import_file("vllm-requests", folder / "requests.jsonl", tmp_path / "run")
    run = open_run(tmp_path / "run")
    stated = run.info["scenario"]["imported"]["stated"]["ttft_from_queued_s"]
    assert stated["mean"] == pytest.approx(65.4566, abs=1e-3) and stated["p50"] == pytest.approx(60.1109, abs=1e-3)  # the folder's summary.txt
    assert run.summary["tpot_s"]["mean"] == pytest.approx(0.0324466, abs=1e-6)
    assert 0 <= run.summary["ttft_s"]["mean"] - stated["mean"] < 0.05  # requests wait up to a step to be queued
    assert run.requests["arrival_s"][0] == 0.0 and run.requests["output_tokens"].sum() == run.summary["output_tokens_per_s"] * run.summary["duration_s"]
    assert run.summary["kv_utilisation"]["max"] == 1.0
    facts = run.info["scenario"]["imported"]
    assert facts["num_gpu_blocks"] == 2588 and facts["engine"] == "vllm 0.19.0" and "4090" in run.info["device"]


def test_loadgen_nanoseconds_become_seconds(data_dir, tmp_path):
    folder = data_dir / "measured" / "vllm_0.9.2_llama-3.1-70b-fp8_8xh200_mlperf"
    (server,) = folder.glob("*server.summary.txt")
    import_file("mlperf-loadgen", server, tmp_path / "server")
    summary = open_run(tmp_path / "server").summary
    assert (summary["ttft_s"]["p50"], summary["ttft_s"]["p99"]) == pytest.approx((0.2695555, 0.5343488), rel=1e-6)
    assert (summary["tpot_s"]["p50"], summary["output_tokens_per_s"]) == pytest.approx((0.1129155, 26903.40), rel=1e-6)
    (offline,) = folder.glob("*offline.summary.txt")
    import_file("mlperf-loadgen", offline, tmp_path / "offline")
    summary = open_run(tmp_path / "offline").summary
    assert summary["output_tokens_per_s"] == 30893.1 and summary["e2e_s"]["mean"] == pytest.approx(376.754322) and summary["ttft_s"]["mean"] is None


def test_a_step_log_becomes_steps(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(step_lines([(12.5, 512, 1, 0, 0, 32), (7.5, 0, 0, 1, 513, 33)]))
    run = import_file("step-log", path, tmp_path / "run")
    steps = open_run(tmp_path / "run").steps
    assert steps["start_s"].tolist() == [0.0, 0.0125] and steps["duration_s"].sum() == pytest.approx(0.02)
    assert steps["decode_context_tokens"].tolist() == [0, 513] and steps["steps"].tolist() == [1, 1]
    assert "laid end to end" in run.notes[0] and "graph" in run.notes[1]
    lines = [{"start_s": 0.0, "duration_s": 0.01, "prefill_tokens": 4, "prefill_seqs": 1, "decode_seqs": 0, "decode_context_tokens": 0}]
    (tmp_path / "steps.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    import_file("step-log", tmp_path / "steps.jsonl", tmp_path / "run2")
    assert len(open_run(tmp_path / "run2").steps) == 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"duration": None}, "lacks the key 'duration'"),
    ({"completed": "many"}, "'completed' is 'many', not a number"),
    ({"request_throughput": math.nan}, "'request_throughput' is nan"),
    ({"mean_ttft_ms": -3}, "'mean_ttft_ms' is -3"),
    ({"ttfts": [0.1, 0.2]}, r"input_lens, output_lens, ttfts, itls have \[2, 3\] entries"),
    ({"ttfts": [0.1, -0.2, 0.0]}, "request 1: time runs backwards"),
])  # fmt: skip
def test_broken_results_are_one_line(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        import_file("vllm-bench", write_json(tmp_path / "r.json", vllm_result(**changes)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_broken_lines_are_named(data_dir, tmp_path):
    source = data_dir / "measured" / "vllm_0.19_llama-3.1-8b_rtx4090" / "requests.jsonl"
    lines = source.read_text().splitlines()
    (tmp_path / "requests.jsonl").write_text("\n".join([lines[0], lines[1][:40]]))
    with pytest.raises(InputError, match=r"requests.jsonl:2: is not JSON.*cut short"):
        import_file("vllm-requests", tmp_path / "requests.jsonl", tmp_path / "run")
    (tmp_path / "requests.jsonl").write_text("\n".join([lines[0], lines[1].replace("first_token_ts", "first")]))
    with pytest.raises(InputError, match=r"requests.jsonl:2: lacks the key 'first_token_ts'"):
        import_file("vllm-requests", tmp_path / "requests.jsonl", tmp_path / "run")
    (tmp_path / "s.csv").write_text(step_lines([(12.5, 512, 1, 0, 0, 32), (7.5, 0, 0, "x", 513, 33)]))
    with pytest.raises(InputError, match=r"s.csv:3: 'decode_seqs' is 'x', not a number"):
        import_file("step-log", tmp_path / "s.csv", tmp_path / "run")


@pytest.mark.parametrize(("content", "message"), [
    (b"", "it is empty"), (b"\xff\xfe\x00", "is no text file"), (b"{]", "it looks like none of"), (b"[1, 2]", "it looks like none of"),
    (b'{"timestamp": 0, "input_length": 3, "output_length": 4}', "request trace"),
])  # fmt: skip
def test_files_of_no_kind(tmp_path, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(InputError, match=message):
        import_file("aiperf", tmp_path / "f", tmp_path / "run")
    with pytest.raises(InputError, match=r"no import format 'aiprf'.*did you mean 'aiperf'"):
        import_file("aiprf", tmp_path / "f", tmp_path / "run")
    with pytest.raises(InputError, match="cannot be read"):
        detect(tmp_path / "absent")


def test_every_imported_run_has_a_report(data_dir, tmp_path):
    pytest.importorskip("plotly")
    import twinserve

    shown = 0
    for file in sorted((data_dir / "client_formats").iterdir()):
        if twinserve.main(["import", "auto", str(file), "--out", str(tmp_path / "run")]) == 0:
            assert twinserve.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0, file.name
            shown += 1
    assert shown >= 5
