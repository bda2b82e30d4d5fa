"""Tables of measured servers, MLPerf and routing ladders: what is read, what is simulated, what a fit may see, what is refused."""

from __future__ import annotations

import csv
import dataclasses
import shutil

import numpy as np
import pytest

from hwmodels.latency import build
from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.plan import StepShape
from serving.scenario import from_mapping
from sim.fleet import resolve_fleet
from validate.accuracy import accuracy
from validate.measured import closed_loop, mlperf, openorca, routing_ladder, served, served_table
from validate.measured.datasheet import floor_s, least_ratio
from validate.measured.host_time import WithHostTime
from validate.measured.row import row
from validate.measured.served import Setup

SAMPLE = "aiconfigurator_sample"


@pytest.fixture(scope="module")
def path(data_dir):
    (found,) = served.find(data_dir / "measured" / SAMPLE)
    return found


@pytest.fixture(scope="module")
def table(path):
    return served.read(path)


def of(table, **wanted):
    return next(each for each in table if all(getattr(each, name) == value for name, value in wanted.items()))


def test_the_table_holds_all_rows_but_the_seven_named_ones(table):
    assert len(table) == 618
    assert not [each for each in table if each.quantisation == "fp8" and (each.prompt_tokens, each.output_tokens) == (4000, 1000)]


def test_every_source_of_latency_has_its_rows(table):
    bf16, fp8 = of(table, engine="vllm", llm="qwen3-32b"), of(table, engine="trtllm", llm="qwen3-32b")
    assert served.price(bf16.deployment).words == "table (operator sample h100_sxm)"
    assert served.price(fp8.deployment).words.startswith(("silicon (aiconfigurator-core 0.12", "roofline"))
    assert served.price(dataclasses.replace(bf16.deployment, profile=None)).words.startswith(("silicon", "roofline"))


@pytest.mark.parametrize("engine, llm", [("vllm", "qwen3-32b"), ("sglang", "qwen3-32b"), ("trtllm", "llama-3.1-8b")])
def test_no_step_of_the_operator_sample_beats_the_datasheet(table, engine, llm):
    for server in {each.deployment: each for each in table if each.engine == engine and each.llm == llm and not each.quantisation}.values():
        priced = served.price(server.deployment)
        assert least_ratio(priced.model, priced.llm, priced.gpu, server.tensor_parallel, server.weight_dtype) >= 1.0


def test_the_datasheet_floor_by_hand():
    """One token: the layers' weights stream once; a long chunk: two flops a weight and token."""
    llm, gpu = load_llm("llama-3.1-8b"), load_gpu("h100-sxm")
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    decode = floor_s(llm, gpu, 1, None, "bf16", StepShape((), 1, 1000, 1))
    assert decode == pytest.approx((2 * weights + 1000 * 131072) / gpu.memory_bytes_per_s)
    chunk = floor_s(llm, gpu, 2, None, "bf16", StepShape(((4096, 0),), 0, 0, 1))
    assert chunk == pytest.approx((2 * weights * 4096 + 4 * 32 * 4096 * 4096 * 4097 / 2) / gpu.flops["bf16"] / 2)


def test_host_time_is_added_alike_step_by_step_and_in_runs():
    inner = build("roofline", {}, llm=load_llm("qwen3-0.6b"), gpu=load_gpu("h100-sxm"))
    model = WithHostTime(inner, 0.25e-3, 10e-6)
    expected = [model.step_s(StepShape((), 8, 4000 + 8 * i, 8)) for i in range(100)]
    assert model.run_s(StepShape((), 8, 4000, 8), 100) == expected
    assert expected[0] == pytest.approx(inner.step_s(StepShape((), 8, 4000, 8)) + 0.25e-3 + 8 * 10e-6)
    mixed = StepShape(((512, 0), (512, 0)), 8, 4000, 10)
    assert model.step_s(mixed) == pytest.approx(inner.step_s(mixed) + 0.25e-3 + 10 * 10e-6)


def test_servers_are_launched_as_their_sources_document(table):
    vllm = of(table, engine="vllm", llm="qwen3-32b", prompt_tokens=1024).launch
    assert (vllm.batching, vllm.max_batch_tokens, vllm.plans_in_flight, vllm.kv_dtype, vllm.spread) == ("chunked_prefill", 1024 + 1500 + 128, 1, "bf16", 0.0)
    inferencex = of(table, engine="vllm", llm="llama-3.1-70b", users=16).launch
    assert (inferencex.max_batch_tokens, inferencex.max_batch_seqs, inferencex.plans_in_flight, inferencex.kv_dtype) == (8192, 16, 2, "fp8")
    assert inferencex.spread == 0.2
    trtllm = of(table, engine="trtllm", llm="qwen3-32b", prompt_tokens=4096).launch
    assert (trtllm.batching, trtllm.max_batch_tokens, trtllm.plans_in_flight, trtllm.kv_dtype) == ("whole_prompt", 4096 + 1500 + 128, 2, "fp8")
    old, new = (of(table, engine="sglang", version=version).launch for version in ("0.5.1.post1", "0.5.6.post2"))
    assert (old.batching, new.batching) == ("prefill_first", "whole_prompt") and new.max_batch_seqs == 160
    assert (old.max_batch_tokens, new.max_batch_tokens) == (1024 + 1500, 1000 + 1500)


def test_a_setup_replaces_what_is_documented(table):
    server = of(table, engine="trtllm", llm="llama-3.1-8b", users=16)
    documented = closed_loop.scenario_of(server, Setup())
    changed = closed_loop.scenario_of(server, Setup(spread=0.1, max_batch_tokens=8192, slots_short=1))
    assert documented["policy"]["batching"] == {"name": "whole_prompt", "max_batch_tokens": 1024 + 1500 + 128, "max_batch_seqs": 128, "max_in_flight": 2}
    assert changed["policy"]["batching"] == documented["policy"]["batching"] | {"max_batch_tokens": 8192, "max_batch_seqs": 15}
    assert documented["workload"]["prompt_tokens"] == {"dist": "constant", "value": 1024}
    assert changed["workload"]["prompt_tokens"] == {"dist": "uniform", "min": 922, "max": 1024}


def test_with_a_slot_too_few_one_user_waits_for_a_whole_answer(table):
    server = of(table, engine="trtllm", llm="llama-3.1-8b", users=8, prompt_tokens=1024, output_tokens=512, tensor_parallel=1)
    priced = served.price(server.deployment)
    plenty, short = (closed_loop.simulate_row(server, Setup(slots_short=slots), priced) for slots in (0, 1))
    answer_s = 511 * short.tpot_s
    assert short.ttft_s - plenty.ttft_s == pytest.approx(answer_s / 8, rel=0.15)


def test_the_simulated_server_runs_on_the_prices_it_is_given(table):
    """Ten more milliseconds of host time a step are ten more milliseconds a token: a default latency model must not slip in."""
    server = of(table, engine="sglang", llm="qwen3-32b", users=16, output_tokens=128, prompt_tokens=1024)
    priced = served.price(server.deployment)
    plain, slow = (closed_loop.simulate_row(server, Setup(0.0, host_step_s=host_s), priced) for host_s in (0.0, 0.010))
    assert slow.tpot_s - plain.tpot_s == pytest.approx(0.010, rel=0.03)


@pytest.mark.parametrize(
    "group, hidden",
    [
        ("qwen3-32b bf16 h100-sxm sglang", Setup(host_step_s=0.0015)),
        ("llama-3.1-8b bf16 h100-sxm trtllm", Setup(slots_short=1, host_step_s=0.0005)),
        ("qwen3-32b bf16 h100-sxm vllm", Setup(max_batch_tokens=16384, host_step_s=0.0003)),
    ],
)
def test_the_fit_finds_what_was_put_in(table, group, hidden):
    """Servers simulated with a hidden setup take the place of the measured ones."""
    members = [each for each in table if each.group == group and each.tensor_parallel == 4 and each.users == 16][:6]
    priced = served.price(members[0].deployment)
    made_up = [dataclasses.replace(each, **closed_loop.simulate_row(each, hidden, priced)._asdict()) for each in members]
    with closed_loop.simulations(1) as simulate:
        found = served_table.fit_groups({"made up": made_up}, simulate)["made up"]
    assert dataclasses.replace(found, host_step_s=None, host_sequence_s=0.0) == dataclasses.replace(hidden, host_step_s=None)
    host_s = found.host_step_s + 16 * found.host_sequence_s
    assert host_s == pytest.approx(hidden.host_step_s, abs=1e-4)


def test_answers_do_not_depend_on_the_number_of_processes(table):
    runs = [(of(table, engine="trtllm", llm="llama-3.1-8b", users=8, tensor_parallel=degree), Setup()) for degree in (1, 2)]
    found = []
    for jobs in (1, 2):
        with closed_loop.simulations(jobs) as simulate:
            found.append(simulate(runs))
    assert found[0] == found[1] and list(found[0]) == runs


def test_the_halves_are_disjoint_and_complete_and_the_judged_one_is_not_seen(table):
    halves = served_table._halves(table)
    for fitted, judged in halves.values():
        names = [each.identity for each in fitted], [each.identity for each in judged]
        assert not set(names[0]) & set(names[1]) and abs(len(fitted) - len(judged)) <= 1
    assert sum(len(fitted) + len(judged) for fitted, judged in halves.values()) == len(table)


def test_a_sample_of_the_table_in_one_process(path):
    rows = served_table.rows(path, fit=False, jobs=1, sample=2)
    assert len(rows) == 2 * 6 * 2
    assert {each.fitted_on for each in rows} == {"nothing"}
    bf16 = [abs(each.error) for each in rows if each.metric == "tpot_s" and " bf16 " in each.dataset]
    assert np.median(bf16) <= 0.10


@pytest.mark.parametrize(
    "column, value, message",
    [
        ("silicon_ttft_ms", "nan", r"served.csv:2: 'silicon_ttft_ms' is nan"),
        ("silicon_tpot_ms", "0", r"served.csv:2: column 'silicon_tpot_ms' is 0"),
        ("backend", "vlm", r"served.csv:2: column 'backend': no engine named 'vlm' .*vllm"),
        ("system", "h101_sxm", r"served.csv:2: column 'system': the catalogue has no GPU 'h101-sxm'"),
        ("model_path", "Qwen/Qwen3-33B", r"served.csv:2: column 'model_path': the catalogue has no language model 'qwen3-33b'"),
        ("tp_size", "", r"served.csv:2: 'tp_size' is '', not a number"),
    ],
)
def test_a_bad_row_is_named_by_line_and_column(path, tmp_path, column, value, message):
    with path.open() as stream:
        record = next(csv.DictReader(stream))
    with (tmp_path / "served.csv").open("w") as stream:
        writer = csv.DictWriter(stream, list(record))
        writer.writeheader()
        writer.writerow(record | {column: value})
    with pytest.raises(InputError, match=message):
        served.read(tmp_path / "served.csv")


def test_a_missing_column_is_named(tmp_path):
    (tmp_path / "served.csv").write_text("id,silicon_ttft_ms\n1,2\n")
    with pytest.raises(InputError, match=r"served.csv: column 'silicon_data_source' is missing"):
        accuracy(tmp_path)


def test_lengths_of_the_mlperf_run_follow_from_its_summary(data_dir):
    (submission,) = mlperf.find(data_dir / "measured" / "vllm_0.9.2_llama-3.1-70b-fp8_8xh200_mlperf")
    server = submission.summaries["server"]
    shares, lengths = mlperf.output_lengths(server)
    assert shares == [0.0, 0.5, 0.9, 0.95, 0.99, 1.0] and lengths[1:3] == pytest.approx([267.3, 488.8], abs=0.1) and lengths[-2:] == [1024, 1024]
    mean = sum((q - p) * (a + b) / 2 for p, q, a, b in zip(shares, shares[1:], lengths, lengths[1:]))
    assert mean == pytest.approx(26903.40 / 90.89, rel=1e-9)
    assert mlperf.samples(server, 93.45) == mlperf.samples(submission.summaries["offline"], 104.369) == 3 * 24_576
    del server.stated["tpot_s"], server.facts["performance_sample_count"]
    with pytest.raises(InputError, match="does not state tpot_s"):
        mlperf.output_lengths(server)
    with pytest.raises(InputError, match="does not state performance_sample_count"):
        mlperf.samples(server, 93.45)


def test_offline_latencies_show_more_requests_in_flight_than_16_bit_pages_hold(data_dir):
    """All samples come at once, so completions speed up when the queue is empty: nobody's prompt is computed any more."""
    (submission,) = mlperf.find(data_dir / "measured" / mlperf.KRAI)
    latency, once = submission.summaries["offline"].stated["e2e_s"], mlperf.samples(submission.summaries["offline"], 104.369)
    steady, later = (once * share / (latency[end] - latency[start]) for share, start, end in ((0.4, "p50", "p90"), (0.05, "p90", "p95")))
    assert later > 1.5 * steady
    answers = np.interp((np.arange(10_000) + 0.5) / 10_000, *mlperf.output_lengths(submission.summaries["server"]))
    held = openorca.PROMPT_TOKENS + (answers**2).mean() / (2.0 * answers.mean())  # tokens of a running request, on average
    needed = held * 0.1 * once / 8  # on each GPU, with a tenth of all left
    scenario, pools = mlperf._scenario(submission, "offline"), {}
    for dtype in ("bf16", "fp8"):
        (part,) = resolve_fleet(from_mapping({**scenario, "kv_cache": {**scenario["kv_cache"], "dtype": dtype}})).values()
        pools[dtype] = part.capacity.kv_tokens
    assert 1.5 * pools["bf16"] < needed < pools["fp8"]
    assert scenario["kv_cache"]["dtype"] == "fp8"


def test_openorca_prompts_share_system_messages_and_nothing_else():
    requests = [arrival.request for arrival in openorca.arrivals([0.0] * 20_000, [5] * 20_000, 16, 1)]
    mean = 0.85 * 5_463_976 / 24_576
    assert sum(each.prompt_tokens for each in requests) / len(requests) == pytest.approx(mean, rel=0.01)
    seen, shared = set(), 0
    for each in requests:
        assert len(each.prefix_hashes) == each.prompt_tokens // 16
        known = [key in seen for key in each.prefix_hashes]
        assert known == sorted(known, reverse=True), "only the front is shared"
        shared += sum(known)
        seen.update(each.prefix_hashes)
    assert 16 * shared / len(requests) == pytest.approx(42.4, abs=0.5)


def test_the_ladder_is_read_and_routing_by_prefix_wins(data_dir):
    (ladder,) = routing_ladder.find(data_dir / "measured")
    assert len(ladder.stages) == 36 and ladder.kv_tokens == 461_376 and ladder.seconds[5.0] == 120
    precise, blind = (routing_ladder.simulate_policy(ladder, policy)[8.0] for policy in ("precise-scheduling", "load-scheduling"))
    assert precise[0] < 0.1 * blind[0] and precise[1] > 1.2 * blind[1]


def test_orders_count_only_pairs_that_differ():
    def stage(policy, real, simulated):
        return row(f"ladder/{policy}/3 rps", "vllm", "table", "ttft_s", "mean", real, simulated, "nothing")

    found = routing_ladder.orders([stage("a", 1.0, 1.0), stage("b", 1.05, 0.5), stage("c", 2.0, 0.7)])
    assert found == [("3 rps", "a", "c", False), ("3 rps", "b", "c", True)]


def test_a_damaged_ladder_is_named(data_dir, tmp_path):
    source = data_dir / "measured" / "llm-d_routing_llama-70b_4xtp4-h100"
    shutil.copy(source / "37-capacity.csv", tmp_path)
    (tmp_path / "workload.yaml").write_text("stages_rps_and_seconds: 3\n")
    with pytest.raises(InputError, match=r"workload.yaml: does not describe the workload"):
        routing_ladder.find(tmp_path)
