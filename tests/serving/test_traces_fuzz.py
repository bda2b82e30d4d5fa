"""Whatever stands in a trace, the only error is InputError, and it names the file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InputError
from serving.scenario import from_mapping
from serving.workload import conversations, follows_answers, open_arrivals
from serving.workload.traces import FORMATS

HEADERS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "length-pairs": "num_prefill_tokens,num_decode_tokens",
    "plain-csv": "arrival_s,prompt_tokens,output_tokens,session,turn,priority,class,hash_ids,hash_tokens",
}
KEYS = {
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "qwen-bailian": ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "turn", "hash_ids"),
    "agent-sessions": ("session_id", "turn", "timestamp_ms", "input_length", "output_length", "hash_ids"),
    "aibrix": ("timestamp", "input_length", "output_length"),
    "plain-jsonl": ("arrival_s", "prompt_tokens", "output_tokens", "session", "turn", "priority", "hash_ids", "hash_tokens", "max_output_tokens"),
}
FIELDS = st.one_of(
    st.integers(-3, 3000).map(str), st.floats().map(str), st.text(max_size=8), st.sampled_from(["", '"', "2023-11-16 18:15:46.68", "1e5", "1 2", "\uff19"])
)
VALUES = st.one_of(
    st.integers(0, 2000), st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=8), st.lists(st.integers(-3, 99), max_size=4), st.just({})
)


def replay(path: Path, trace_format: str | None) -> None:
    workload = {"trace": {"file": str(path), "format": trace_format}, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "duration_s": 1e6}
    try:
        made = from_mapping({"name": "s", "llm": "x", "cluster": {"gpu": "y"}, "workload": workload}).workload
        make = conversations if follows_answers(made) else open_arrivals
        list(make(made, seed=1, block_tokens=16, max_model_len=9999, prefix_caching=True))
    except InputError as error:
        assert path.name in str(error) or "workload" in error.where


@pytest.mark.parametrize("name", HEADERS)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(FIELDS, min_size=1, max_size=9), max_size=4))
def test_table_rows(tmp_path_factory, name: str, rows: list[list[str]]) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "t.csv"
    width = HEADERS[name].count(",") + 1
    text = "\n".join([HEADERS[name], *(",".join((fields * width)[:width]) for fields in rows)])
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    replay(path, None)


@pytest.mark.parametrize("name", KEYS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_json_rows(tmp_path_factory, name: str, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "t.jsonl"
    objects = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(KEYS[name], VALUES)), max_size=3))
    plausible = data.draw(st.booleans())
    if plausible:
        objects = [{**each, **{key: len(key) + 100 for key in KEYS[name] if "length" in key or "tokens" in key}} for each in objects]
    path.write_text("\n".join(json.dumps(each) for each in objects))
    replay(path, name)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=120), name=st.sampled_from([None, *FORMATS]), packed=st.booleans(), cut=st.integers(0, 20))
def test_arbitrary_bytes(tmp_path_factory, content: bytes, name: str | None, packed: bool, cut: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "t.bin"
    path.write_bytes(gzip.compress(content)[: -cut or None] if packed else content)
    replay(path, name)
