"""Replaying a trace: slices, scaling, passes, order, classes, content keys and sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.errors import InputError
from serving.request import Arrival
from serving.scenario import Scenario, from_mapping, load
from serving.scenario.adapters import AdapterMix
from serving.workload import Session, conversations, follows_answers, open_arrivals


@pytest.fixture
def trace(tmp_path) -> Path:
    """Ten requests, two seconds apart from 5 s on: prompt 10, 20, … 100."""
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{5 + 2 * i},{10 * i + 10},{i + 1}\n" for i in range(10)))
    return path


def scenario(file: Path, workload: dict | None = None, **options: object) -> Scenario:
    parts = {"trace": {"file": str(file), **options}, **(workload or {})}
    return from_mapping({"name": "s", "llm": "x", "cluster": {"gpu": "y"}, "workload": parts})


ARGUMENTS = {"seed": 2, "block_tokens": 16, "max_model_len": 10_000, "prefix_caching": True}


def replayed(file: Path, workload: dict | None = None, skipped: dict | None = None, block_tokens: int = 16, **options: object) -> list[Arrival]:
    arguments = {**ARGUMENTS, "block_tokens": block_tokens}
    return list(open_arrivals(scenario(file, workload, **options).workload, skipped=skipped, **arguments))


def in_sessions(file: Path, workload: dict | None = None, **options: object) -> list[Session]:
    return list(conversations(scenario(file, workload, **options).workload, **ARGUMENTS))


def prompts(made: list[Arrival]) -> list[int]:
    return [each.request.prompt_tokens for each in made]


def instants(made: list[Arrival]) -> list[float]:
    return [each.request.arrival_s for each in made]


def test_times_count_from_the_first_row(trace: Path) -> None:
    made = replayed(trace)
    assert instants(made) == [2.0 * i for i in range(10)]
    assert prompts(made) == [10 * i + 10 for i in range(10)]
    assert [each.request.request_id for each in made] == list(range(10))
    assert {each.request.max_output_tokens + each.request.prompt_tokens for each in made} == {10_000}


def test_slices_by_time_and_by_row(trace: Path) -> None:
    made = replayed(trace, start_s=4, stop_s=12)
    assert prompts(made) == [30, 40, 50, 60]
    assert instants(made) == [0.0, 2.0, 4.0, 6.0]
    assert prompts(replayed(trace, first_row=3, limit=2)) == [40, 50]
    assert instants(replayed(trace, first_row=3, limit=2)) == [0.0, 2.0]
    with pytest.raises(InputError, match="no request is left"):
        replayed(trace, first_row=10)


def test_scaling_of_rate_time_and_lengths(trace: Path) -> None:
    assert instants(replayed(trace, rate_scale=4.0)) == [0.5 * i for i in range(10)]
    assert instants(replayed(trace, time_scale=3.0)) == [6.0 * i for i in range(10)]
    made = replayed(trace, prompt_scale=0.01, output_scale=2.5)
    assert set(prompts(made)) == {1}
    assert [each.output_tokens for each in made] == [round(2.5 * (i + 1)) for i in range(10)]


def test_a_row_names_its_adapter_and_its_content_is_the_adapters_own(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    row = '{"arrival_s": 0, "prompt_tokens": 32, "output_tokens": 1, "hash_ids": [7, 8], "hash_tokens": 16'
    path.write_text(row + '}\n' + row + ', "adapter": "a"}\n' + row + ', "adapter": "b"}\n')
    plain, one, other = (each.request for each in replayed(path))
    assert [plain.adapter, one.adapter, other.adapter] == ["", "a", "b"]
    assert (plain.prefix_hashes, one.prefix_hashes) == ((7, 8), (("a", 7), ("a", 8)))
    workload = scenario(path).workload.model_copy(update={"adapters": AdapterMix(names=("m",))})
    mixed = [each.request.adapter for each in open_arrivals(workload, **ARGUMENTS)]
    assert mixed == ["m", "a", "b"], "what a row says goes before what is drawn"


def test_passes_follow_each_other_at_the_same_rate(trace: Path) -> None:
    made = replayed(trace, loop=3)
    assert instants(made) == [2.0 * i for i in range(30)]
    assert prompts(made) == 3 * [10 * i + 10 for i in range(10)]
    assert [each.request.request_id for each in made] == list(range(30))


def test_disorder_is_refused_unless_sorting_is_asked_for(trace: Path) -> None:
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n3,10,1\n1,20,1\n2,30,1\n")
    with pytest.raises(InputError, match=r"t.csv:3: .*sort: true"):
        replayed(trace)
    assert prompts(replayed(trace, sort=True)) == [20, 30, 10]


def test_rows_without_tokens_are_counted_or_refused(trace: Path) -> None:
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n1,10,1\n2,0,0\n3,5,0\n4,30,1\n")
    skipped: dict[str, int] = {}
    assert prompts(replayed(trace, skipped=skipped)) == [10, 30]
    assert list(skipped.values()) == [2]
    with pytest.raises(InputError, match=r"t.csv:3: 0 prompt"):
        replayed(trace, zero_rows="error")


def test_a_broken_row_at_the_end_is_found_before_the_first_request(trace: Path) -> None:
    trace.write_text(trace.read_text() + "oops\n")
    with pytest.raises(InputError, match=r"t.csv:12"):
        open_arrivals(scenario(trace).workload, **ARGUMENTS)
    assert len(replayed(trace, limit=10)) == 10


def test_rows_take_the_scenarios_classes_where_they_have_none_of_their_own(trace: Path) -> None:
    trace.write_text("arrival_s,prompt_tokens,output_tokens,class,priority,tenant\n1,10,9,gold,,\n2,10,9,other,3,acme\n3,10,9,,,\n4,10,9,gold,7,\n")
    made = replayed(trace, {"classes": [{"name": "gold", "share": 0, "priority": 1, "max_output_tokens": 4}, {"name": "tin", "priority": 2}]})
    assert [(each.request.class_name, each.request.priority) for each in made] == [("gold", 1), ("other", 3), ("tin", 2), ("gold", 7)]
    assert [each.output_tokens for each in made] == [4, 9, 9, 4]
    assert [each.request.tenant for each in made] == ["", "acme", "", ""]


def test_content_hashes_expand_to_kv_blocks(trace: Path) -> None:
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [3, 9]}\n')
    (made,) = replayed(trace, block_tokens=128)
    assert made.request.prefix_hashes == (12, 13, 14, 15)  # 600 // 128 full blocks, four to a hash
    (made,) = replayed(trace, block_tokens=64)
    assert made.request.prefix_hashes == (*range(24, 32), 72)
    (made,) = replayed(trace, block_tokens=128, prompt_scale=0.5)
    assert made.request.prefix_hashes == (12, 13)
    for size in (48, 1024):
        with pytest.raises(InputError, match=rf"kv_cache.block_tokens: {size} does not divide the 512"):
            replayed(trace, block_tokens=size)


def test_lengths_without_times_take_the_scenarios_arrivals(trace: Path) -> None:
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "10,2\n" * 50)
    arrivals = {"arrivals": {"process": "constant", "rate_rps": 2.0}, "duration_s": 10.2}
    assert instants(replayed(trace, arrivals)) == [0.5 * (i + 1) for i in range(20)]
    with pytest.raises(InputError, match="no arrival times"):
        replayed(trace)
    with pytest.raises(InputError, match="start_s"):
        replayed(trace, arrivals, start_s=3)


def test_a_closed_loop_takes_the_traces_requests_in_turn(trace: Path) -> None:
    loop = {"arrivals": {"process": "closed_loop", "users": 2}}
    assert follows_answers(scenario(trace, loop).workload)
    assert [len(session.turns) for session in in_sessions(trace, loop)] == [1] * 10
    assert set(instants(replayed(trace, loop))) == {0.0}


SESSIONS = "arrival_s,prompt_tokens,output_tokens,session,turn\n1,10,1,a,0\n2,20,1,b,0\n4,30,1,a,1\n9,40,1,b,5\n"


def test_turns_come_at_recorded_times_or_gaps_or_regardless(trace: Path) -> None:
    trace.write_text(SESSIONS)
    recorded = in_sessions(trace, time_scale=2.0, rate_scale=4.0)
    assert [session.start_s for session in recorded] == [0.0, 0.5]
    assert [[turn.not_before_s for turn in session.turns] for session in recorded] == [[0.0, 6.0], [0.0, 14.0]]
    gaps = in_sessions(trace, turn_timing="after_answer")
    assert [[turn.gap_s for turn in session.turns] for session in gaps] == [[0.0, 3.0], [0.0, 7.0]]
    assert [turn.arrival.request.request_id for session in gaps for turn in session.turns] == [0, 2, 1, 3]
    regardless = replayed(trace, turn_timing="open")
    assert instants(regardless) == [0.0, 1.0, 3.0, 8.0]
    assert [each.request.session for each in regardless] == [0, 1, 0, 1]
    with pytest.raises(InputError, match="wait for answers"):
        replayed(trace)
    assert [turn.arrival.request.session for session in in_sessions(trace, loop=2) for turn in session.turns] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SESSIONS + "10,10,1,b,5\n", r"t.csv:6: turn 5 of session b comes after turn 5"),
        (SESSIONS + "10,10,1,,0\n", r"t.csv:6: some rows have a session"),
        (SESSIONS + ",10,1,c,0\n", r"t.csv:6: some rows have an arrival time"),
    ],
)
def test_sessions_that_contradict_themselves(trace: Path, text: str, words: str) -> None:
    trace.write_text(text)
    with pytest.raises(InputError, match=words):
        in_sessions(trace)


def test_agents_start_together_or_as_the_scenario_spreads_them(data_dir: Path) -> None:
    file = data_dir / "traces" / "agent_lmcache" / "miniswe.jsonl.gz"
    made = in_sessions(file)
    assert len(made) == 20
    assert sum(len(session.turns) for session in made) == 402
    assert {session.start_s for session in made} == {0.0}
    assert made[0].turns[1].gap_s == pytest.approx(2.333984)
    spread = in_sessions(file, {"arrivals": {"process": "constant", "rate_rps": 0.1}})
    assert [session.start_s for session in spread] == [10.0 * (i + 1) for i in range(20)]


def test_ideal_hit_rate_of_the_public_traces(data_dir: Path) -> None:
    """With an endless cache, the keys give the hit rates that the traces' authors state: 36.6 % and 93.5 %."""

    def hit_rate(made: list[Arrival], block_tokens: int) -> float:
        seen: set = set()
        hits = total = 0
        for each in made:
            keys = each.request.prefix_hashes
            known = next((position for position, key in enumerate(keys) if key not in seen), len(keys))
            hits += known * block_tokens
            total += each.request.prompt_tokens
            seen.update(keys)
        return hits / total

    mooncake = replayed(data_dir / "traces" / "mooncake_fast25" / "conversation_trace.jsonl.gz", block_tokens=512)
    assert hit_rate(mooncake, 512) == pytest.approx(0.366, abs=0.03)
    agents = replayed(data_dir / "traces" / "agent_lmcache" / "miniswe.jsonl.gz", block_tokens=64, turn_timing="open")
    assert hit_rate(agents, 64) == pytest.approx(0.935, abs=0.03)


def test_the_azure_hour_replays(data_dir: Path) -> None:
    file = data_dir / "traces" / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
    made = load("azure-conversation", [f"workload.trace.file={file}"])
    arrivals = list(open_arrivals(made.workload, **{**ARGUMENTS, "max_model_len": 32_768}))
    assert len(arrivals) == 19_366
    assert arrivals[-1].request.arrival_s == pytest.approx(3501.721937, abs=1e-6)
    assert sum(each.output_tokens for each in arrivals) / 19_366 == pytest.approx(211.126, abs=0.001)
