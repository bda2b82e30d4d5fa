"""Cases T1 and T2 end to end: closed loops whose batch sits in, beyond or just below a captured CUDA-graph size."""

from __future__ import annotations

from serving.records import open_run
from serving.scenario import from_mapping
from sim.run import simulate


def run(users, sizes, out=None):
    lengths = {"prompt_tokens": {"dist": "constant", "value": 16}, "output_tokens": {"dist": "constant", "value": 200}}
    scenario = {
        "version": 1,
        "name": "captured",
        "llm": "qwen3-1.7b",
        "cluster": {"gpu": "h100-sxm"},
        "latency": {"name": "roofline", "capture_sizes": sizes},
        "policy": {"batching": {"name": "chunked_prefill", "max_batch_seqs": 100}},
        "workload": {"requests": 2 * users, "arrivals": {"process": "closed_loop", "users": users}, **lengths},
    }
    return simulate(from_mapping(scenario), out=out).summary


def graphs(folder):
    steps = open_run(folder).steps
    return set(steps[steps["prefill_tokens"] == 0]["graph"])


def test_t1_a_hundred_sequences_leave_the_captured_path_and_capturing_them_mends_it(tmp_path):
    by_eights = list(range(8, 97, 8))
    inside, beyond = run(96, by_eights, tmp_path / "in"), run(100, by_eights, tmp_path / "beyond")
    mended = run(100, [*by_eights, 100], tmp_path / "mended")
    assert beyond["tpot_s"]["p50"] > 1.05 * inside["tpot_s"]["p50"]
    assert mended["tpot_s"]["p50"] < 1.03 * inside["tpot_s"]["p50"]
    assert graphs(tmp_path / "in") == {96} and graphs(tmp_path / "mended") == {100}
    assert not graphs(tmp_path / "beyond") & {96, 100}


def test_t2_eager_is_far_slower_than_padded_and_padded_than_exact():
    eager, exact, padded = (run(12, sizes)["output_tokens_per_s"] for sizes in ([1, 2, 4, 8], [1, 2, 4, 8, 12], [1, 2, 4, 8, 16]))
    assert eager < padded / 1.5
    assert padded < exact
