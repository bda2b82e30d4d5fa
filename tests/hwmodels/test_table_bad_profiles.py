"""A broken profile is refused by file, line and column, with what it can still answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from profile_folders import edit, write_csv, write_layerwise

from hwmodels.table import build
from serving.errors import InputError

LLM = SimpleNamespace(name="four-layers", layers=4, heads=8, kv_heads=2, moe=None)
GPU = SimpleNamespace(name="linear", sm_count=8, host=SimpleNamespace(step_s=0.0, sequence_s=0.0, launch_s=0.0))


def refusal(folder, **keywords) -> str:
    options = {"profile": str(folder), **keywords.pop("options", {})}
    with pytest.raises(InputError) as caught:
        build(options, llm=keywords.pop("llm", LLM), gpu=GPU, **keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "line", "text", "words"),
    [
        ("dense.csv", 1, "layer,tokns,time_us", ["dense.csv: column 'tokens' is missing", "tokns"]),
        ("dense.csv", 3, "layernorm,8,-1.5", ["dense.csv:3: column 'time_us': -1.5", "positive"]),
        ("dense.csv", 3, "layernorm,8,nan", ["dense.csv:3: column 'time_us': nan is not a finite number"]),
        ("dense.csv", 3, "layernorm,8,fast", ["dense.csv:3: column 'time_us': 'fast' is not a number"]),
        ("dense.csv", 3, "layernorm,1,1.0", ["dense.csv:3: column 'tokens': 1 of 'layernorm' does not rise"]),
        ("dense.csv", 3, "layernorm,8", ["dense.csv:3: 2 fields where the header has 3"]),
        ("per_sequence.csv", 2, "lm_head,-1,1.0", ["per_sequence.csv:2: column 'sequences': -1", "negative"]),
        ("attention.csv", 3, "0,0,1,16,5.0", ["attention.csv:3: column 'prefill_chunk, kv_prefill, n_decode, kv_decode'", "line 2"]),
        ("attention.csv", 3, "0,0,1,256,inf", ["attention.csv:3: column 'time_us': inf is not a finite number"]),
    ],
)
def test_a_bad_cell_is_named(tmp_path, file, line, text, words):
    folder = write_layerwise(tmp_path / "p")
    edit(folder / "tp1" / file, line, text)
    message = refusal(folder)
    assert all(word in message for word in words), message


def test_a_missing_layer_names_those_there_are(tmp_path):
    folder = write_layerwise(tmp_path / "p")
    path = folder / "tp1" / "dense.csv"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("o_proj")) + "\n")
    message = refusal(folder)
    assert "no rows of 'o_proj'" in message and "qkv_proj" in message


def test_missing_and_empty_files_are_named(tmp_path):
    folder = write_layerwise(tmp_path / "p")
    (folder / "tp1" / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n")
    assert "attention.csv: the file has a header and no rows" in refusal(folder)
    (folder / "tp1" / "attention.csv").unlink()
    assert "attention.csv: cannot be read" in refusal(folder)


def test_a_profile_without_mixed_batches_says_what_it_needs(tmp_path):
    folder = write_layerwise(tmp_path / "p")
    path = folder / "tp1" / "attention.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    write_csv(path, "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", [r for r in rows if "0" in (r[0], r[2])])
    assert "no row has both a prefill chunk and decodes" in refusal(folder)


def test_a_degree_that_was_not_profiled_names_those_that_were(tmp_path):
    folder = write_layerwise(tmp_path / "p")
    write_layerwise(tmp_path / "p", tensor_parallel=4)
    message = refusal(folder, tensor_parallel=2)
    assert "tensor_parallel 2 was not profiled" in message and "can answer for: 1, 4" in message


def test_experts_and_missing_skew_are_refused(tmp_path):
    folder = write_layerwise(tmp_path / "p")
    assert "has experts" in refusal(folder, llm=SimpleNamespace(name="moe", layers=4, moe=object(), heads=8, kv_heads=2))
    (folder / "tp1" / "skew.csv").unlink()
    assert "has no skew.csv" in refusal(folder, options={"skew": True})


def test_a_folder_that_is_no_profile(tmp_path):
    assert "holds no profile" in refusal(tmp_path)


def test_a_ragged_union_of_two_grids_is_one_grid(tmp_path):
    """Linear kernels profiled on two different grids are priced as on one."""
    from profile_folders import attention_us

    from serving.plan import StepShape

    full = build({"profile": str(write_layerwise(tmp_path / "a"))}, llm=LLM, gpu=GPU)
    folder = write_layerwise(tmp_path / "b")
    with (folder / "tp1" / "attention.csv").open("a") as stream:
        for q, c, n, kv in [(q, c, n, kv) for q in (32, 128) for c in (0, 512, 1024) for n in (0, 1, 16) for kv in (100, 2048)]:
            if n or kv == 100:
                point = (q, c, n, kv if n else 0)
                stream.write(",".join(map(str, (*point, attention_us(*point)))) + "\n")
    ragged = build({"profile": str(folder)}, llm=LLM, gpu=GPU)
    for shape in (StepShape(((100, 300),), 7, 7 * 1000, 7), StepShape(((200, 700),), 0, 0, 1), StepShape((), 7, 999, 7)):
        assert ragged.step_s(shape) == pytest.approx(full.step_s(shape), rel=1e-9)
