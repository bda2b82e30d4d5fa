"""Each trace format: recognised by content, read exactly, and a broken row named by file and line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from serving.errors import InputError
from serving.workload.traces import FORMATS, TraceRow, find_format, read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
AZURE_2024 = AZURE.replace("00,374", "00+00:00,374").replace("90,396", "90+00:00,396")
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,0,0,0,API log\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n{"timestamp": 3000, "input_length": 512, "output_length": 4, "hash_ids": [0]}\n'
QWEN = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 5, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}\n'
    '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.5, "input_length": 80, "output_length": 5, "type": "text", "turn": 2, "hash_ids": [7, 8]}\n'
)
AGENT = (
    '{"session_id":"a","turn":0,"timestamp_ms":0.0,"input_length":130,"output_length":8,"hash_ids":[1,2]}\n'
    '{"session_id":"a","turn":1,"timestamp_ms":2500.5,"input_length":200,"output_length":9,"hash_ids":[1,2,3]}\n'
)
AIBRIX = '{"timestamp": 6011, "input_length": 178, "output_length": 8}\n{"timestamp": 6917, "input_length": 258, "output_length": 40}\n'
PAIRS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.32\n"
PLAIN_CSV = "arrival_s,prompt_tokens,output_tokens,priority,class,hash_ids,hash_tokens\n0.25,40,5,-1,gold,7 8,16\n1.5,30,6,,,,\n"
PLAIN_JSONL = (
    '{"arrival_s": 0.25, "prompt_tokens": 40, "output_tokens": 5, "session": "x", "turn": 0, "tenant": "t", "max_output_tokens": 9}\n'
    '{"arrival_s": 1.5, "prompt_tokens": 60, "output_tokens": 6, "session": "x", "turn": 1, "priority": -2}\n'
)
SAMPLES = {
    "azure": AZURE, "burstgpt": BURST, "mooncake": MOONCAKE, "qwen-bailian": QWEN, "agent-sessions": AGENT, "aibrix": AIBRIX,
    "length-pairs": PAIRS, "plain-csv": PLAIN_CSV, "plain-jsonl": PLAIN_JSONL,
}  # fmt: skip


def rows_of(text: str | bytes, path: Path) -> list[TraceRow]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read(path, find_format(path)))


@pytest.fixture
def trace(tmp_path) -> Path:
    return tmp_path / "trace.txt"


def test_every_format_has_a_sample_here() -> None:
    assert list(SAMPLES) == list(FORMATS)


@pytest.mark.parametrize("name", SAMPLES)
def test_content_is_recognised_plain_and_packed(name: str, trace: Path) -> None:
    assert len(rows_of(SAMPLES[name], trace)) == 2
    assert find_format(trace).name == name
    plain = rows_of(SAMPLES[name], trace)
    assert rows_of(gzip.compress(SAMPLES[name].encode()), trace) == plain
    assert rows_of(b"\xef\xbb\xbf" + SAMPLES[name].replace("\n", "\r\n").encode(), trace) == plain


def test_azure_keeps_the_seventh_digit_in_both_years(trace: Path) -> None:
    for text in (AZURE, AZURE_2024):
        rows = rows_of(text, trace)
        assert [row.arrival_s for row in rows] == [0.0, 4.314579]
        assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109)]
        assert rows[1].where == f"{trace}:3"


def test_burstgpt_rows_without_tokens_are_left_to_the_replay(trace: Path) -> None:
    assert [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in rows_of(BURST, trace)] == [(5.0, 472, 18), (45.5, 0, 0)]


def test_json_formats(trace: Path) -> None:
    mooncake = rows_of(MOONCAKE, trace)
    assert [(row.arrival_s, row.hash_ids, row.hash_tokens) for row in mooncake] == [(0.0, (0, 1), 512), (3.0, (0,), 512)]
    qwen = rows_of(QWEN, trace)
    assert [(row.session, row.turn, row.hash_tokens) for row in qwen] == [("1", 1, 16), ("1", 2, 16)]
    agent = rows_of(AGENT, trace)
    assert [(row.session, row.turn, row.arrival_s) for row in agent] == [("a", 0, 0.0), ("a", 1, 2.5005)]
    assert [row.arrival_s for row in rows_of(AIBRIX, trace)] == [6.011, 6.917]


def test_lengths_without_times(trace: Path) -> None:
    assert [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in rows_of(PAIRS, trace)] == [(None, 74, 918), (None, 290, 905)]


def test_our_own_form_in_both_notations(trace: Path) -> None:
    first, second = rows_of(PLAIN_CSV, trace)
    assert (first.priority, first.class_name, first.hash_ids, first.hash_tokens) == (-1, "gold", (7, 8), 16)
    assert (second.priority, second.class_name, second.hash_ids) == (None, None, ())
    first, second = rows_of(PLAIN_JSONL, trace)
    assert (first.session, first.turn, first.tenant, first.max_output_tokens) == ("x", 0, "t", 9)
    assert (second.priority, second.turn) == (-2, 1)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (AZURE.replace("374", "x"), 2, "ContextTokens"),
        (AZURE.replace("396", "-4"), 3, "ContextTokens"),
        (AZURE.replace("396", "99999999999"), 3, "between"),
        (AZURE.replace("2023-11-16 18:15:50", "2023-11-36 18:15:50"), 3, "date"),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), 3, "TIMESTAMP"),
        (AZURE.replace(",109", ""), 3, "2 fields"),
        (AZURE.replace(",109", ",109,1"), 3, "4 fields"),
        (BURST.replace("45.5", "nan"), 3, "Timestamp"),
        (BURST.replace("45.5", ""), 3, "Timestamp"),
        (BURST.replace("ChatGPT", '"Chat'), 2, "CSV"),
        (MOONCAKE.replace("[0]", "[0, 1]"), 2, "more than a prompt"),
        (MOONCAKE.replace("[0]", '["a"]'), 2, "whole numbers"),
        (MOONCAKE.replace("[0]", "[true]"), 2, "whole numbers"),
        (MOONCAKE.replace("512", "1.5"), 2, "input_length"),
        (MOONCAKE.replace("512", "NaN"), 2, "input_length"),
        (MOONCAKE.replace("512", "1e999"), 2, "input_length"),
        (MOONCAKE.replace("3000", '"soon"'), 2, "timestamp"),
        (MOONCAKE.replace('"input_length": 512, ', ""), 2, "'input_length'"),
        (MOONCAKE + "{\n", 3, "JSON"),
        (MOONCAKE + "[" * 100_000 + "\n", 3, "JSON"),
        (MOONCAKE + "3\n", 3, "object"),
        (MOONCAKE + '{"timestamp": ' + "9" * 5000 + "}\n", 3, "JSON"),
        (QWEN.replace('"chat_id": 2', '"chat_id": [2]'), 2, "chat_id"),
        (AGENT.replace('"session_id":"a","turn":1', '"session_id":null,"turn":1'), 2, "session_id"),
        (AGENT.replace('"turn":1', '"turn":-1'), 2, "turn"),
        (PLAIN_CSV.replace("priority", "prioritty"), 2, "did you mean 'priority'"),
        (PLAIN_CSV.replace("-1", "high"), 2, "priority"),
        (PLAIN_CSV.replace("gold", "g" * 300), 2, "class"),
        (PLAIN_CSV.replace("7 8,16", "7 8,"), 2, "hash_tokens"),
        (PLAIN_JSONL.replace('"turn": 1', '"trun": 1'), 2, "did you mean 'turn'"),
        (PLAIN_JSONL.replace('"tenant": "t"', '"tenant": {}'), 1, "tenant"),
    ],
)
def test_a_broken_row_names_file_and_line(text: str, line: int, words: str, trace: Path) -> None:
    with pytest.raises(InputError) as caught:
        rows_of(text, trace)
    assert caught.value.where == f"{trace}:{line}"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n \n", b"hello\n", b"a,b,c\n1,2,3\n", b"{}\n", b"\xff\xfe\x00", b"\x00" * 50, b"\x1f\x8b", b"\x1f\x8b\x08 broken",
        gzip.compress(AZURE.encode(), mtime=0)[:-9], gzip.compress(b"\x80abc", mtime=0), AZURE.replace("GeneratedTokens", "Generated").encode(),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_an_input_error(content: bytes, trace: Path) -> None:
    with pytest.raises(InputError, match=r"trace\.txt"):
        rows_of(content, trace)


def test_unknown_format_names_the_nearest_and_a_folder_is_no_trace(trace: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'mooncake'"):
        find_format(trace, "moncake")
    with pytest.raises(InputError):
        find_format(trace.parent)


@pytest.mark.parametrize(
    ("file", "name", "rows", "prompt_mean", "output_mean"),
    [
        ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", "azure", 19_366, 1154.70, 211.13),
        ("azure_llm_2023/AzureLLMInferenceTrace_code.csv", "azure", 8_819, 2047.85, 27.88),
        ("mooncake_fast25/conversation_trace.jsonl.gz", "mooncake", 12_031, 12_035.06, 342.61),
        ("agent_lmcache/miniswe.jsonl.gz", "agent-sessions", 402, None, None),
        ("aibrix_autoscaling/8min_up_and_down.lengths.jsonl", "aibrix", 2_026, None, None),
        ("length_stats/sharegpt_8k_llama2.csv.gz", "length-pairs", 30_731, None, None),
        ("length_stats/arxiv_summarization_llama2.csv.gz", "length-pairs", 28_257, None, None),
    ],
)
def test_the_public_files(data_dir: Path, file: str, name: str, rows: int, prompt_mean: float | None, output_mean: float | None) -> None:
    path = data_dir / "traces" / file
    assert find_format(path).name == name
    read_rows = list(read(path, FORMATS[name]))
    assert len(read_rows) == rows
    if prompt_mean is not None:
        assert sum(row.prompt_tokens for row in read_rows) / rows == pytest.approx(prompt_mean, abs=0.01)
        assert sum(row.output_tokens for row in read_rows) / rows == pytest.approx(output_mean, abs=0.01)
