"""A layer-wise profile of one LLM in one engine: dense.csv, per_sequence.csv, attention.csv, skew.csv, times in microseconds.

    <folder>/meta.yaml            who measured what, where (optional)
    <folder>/tp<N>/dense.csv          layer, tokens                                   one call of one layer
    <folder>/tp<N>/per_sequence.csv   layer (lm_head, sampler), sequences
    <folder>/tp<N>/attention.csv      prefill_chunk, kv_prefill, n_decode, kv_decode  pure and mixed batches, one layer
    <folder>/tp<N>/skew.csv[.gz]      decodes of unequal length (optional; see skew.py)

The formula is that of the layers an engine runs: per transformer layer two layer norms, QKV, rotary, attention, O,
gate-up, activation and down; around them embedding, final norm, LM head and sampler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.profiles.columns import Columns, read_columns
from hwmodels.profiles.grid import Extrapolations, Line, Surface, fill, locate
from serving.errors import InputError
from serving.files import read_yaml

PER_LAYER = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1, "down_proj": 1}
PER_STEP = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")
ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
US = 1e-6


class LayerwiseKernels:
    """Times of the kernels of a step, from a layer-wise profile. All results are seconds for all layers together."""

    asynchronous = True

    def __init__(self, folder: Path, *, llm: Any, tensor_parallel: int, beyond: Extrapolations, dtype: str | None = None) -> None:
        self.beyond = beyond
        self.folder = tensor_parallel_folder(folder, tensor_parallel)
        self.layers: int = llm.layers
        self.launches = llm.layers * (sum(PER_LAYER.values()) + 1) + len(PER_STEP) + len(PER_SEQUENCE)
        _refuse_another_llm(self.folder.parent, llm, dtype)
        if getattr(llm, "moe", None):
            raise InputError(str(folder), f"a layer-wise profile prices dense layers and '{llm.name}' has experts")
        self._dense = _lines(self.folder / "dense.csv", "tokens", [*PER_LAYER, *PER_STEP], beyond)
        self._per_sequence = _lines(self.folder / "per_sequence.csv", "sequences", PER_SEQUENCE, beyond)
        attention = read_columns(self.folder / "attention.csv", axes=ATTENTION_AXES, times=("time_us",))
        _refuse_duplicates(attention)
        self._decode = _pure(attention, "n_decode", "kv_decode", beyond)
        self._prefill = _pure(attention, "prefill_chunk", "kv_prefill", beyond)
        self._mixed = MixedAttention(attention, beyond)
        self._largest_chunk = int(self._prefill.axes[0][-1])
        self._launch_us = self._prefill.rows[0][0]  # smallest chunk, no context: what one more chunk does not pay again

    def fixed_s(self, tokens: int, rows: int, graphed: bool) -> float:
        """Everything but attention, for ``tokens`` (padded) token rows of which ``rows`` get logits. The path does not matter:
        an eager profile holds no launch gaps, so ``graphed`` changes nothing here."""
        per_layer = sum(count * self._dense[name].at(tokens) for name, count in PER_LAYER.items())
        once = sum(self._dense[name].at(tokens) for name in PER_STEP)
        sampled = sum(self._per_sequence[name].at(rows) for name in PER_SEQUENCE) if rows else 0.0
        return (self.layers * per_layer + once + sampled) * US

    def decode_attention(self, decodes: int) -> tuple[list[float], list[float]]:
        """Return knots of the mean KV length and the attention time at each, linear between them."""
        scale = self.layers * US
        return self._decode.axes[1], [scale * us for us in self._decode.row_at(decodes)]

    def mixed_attention_s(self, chunk: int, before: int, decodes: int, mean_kv: float) -> float:
        """Attention of one chunk of ``chunk`` tokens after ``before`` cached ones, in a batch with ``decodes`` decodes."""
        us = 0.0
        while chunk > self._largest_chunk:  # the work of a long chunk is that of its pieces one after another
            self.beyond.note(self._prefill.name, "prefill_chunk", chunk, self._largest_chunk)
            us += self._prefill.at(self._largest_chunk, before) - self._launch_us
            before += self._largest_chunk
            chunk -= self._largest_chunk
        if decodes:
            us += self._mixed.at_us(chunk, before, decodes, mean_kv)
        else:
            us += self._prefill.at(chunk, before)
        return self.layers * us * US

    def extra_chunk_s(self, chunk: int, before: int) -> float:
        """Attention that a further, smaller chunk adds to the batch: its own time less one launch."""
        return max(0.0, self.mixed_attention_s(chunk, before, 0, 0.0) - self.layers * self._launch_us * US)

    def provenance(self) -> dict[str, Any]:
        """Who measured the profile: the entries of meta.yaml that identify engine, device and date."""
        meta = read_meta(self.folder.parent)
        wanted = ("gpu", "model", "variant", "vllm_version", "cuda_version", "profiled_at", "profiler_version")
        return {"layout": "layer-wise", "folder": str(self.folder), **{key: meta[key] for key in wanted if key in meta}}


class MixedAttention:
    """Four-dimensional linear interpolation of one layer's attention in batches of one chunk and some decodes.

    Adding separately measured prefill and decode times is badly wrong on some GPUs, which is why batches are measured.
    The grid is a flat list and the loop is written out: this is on the path of three steps in four.
    """

    def __init__(self, attention: Columns, beyond: Extrapolations) -> None:
        self._beyond = beyond
        self._name = str(attention.path)
        rows = (attention.numbers["prefill_chunk"] > 0) & (attention.numbers["n_decode"] > 0)
        if not rows.any():
            raise InputError(self._name, "no row has both a prefill chunk and decodes", "mixed batches are needed for chunked prefill")
        points = np.stack([attention.numbers[name][rows] for name in ATTENTION_AXES], axis=1)
        axes, times = fill(points, attention.numbers["time_us"][rows])
        short = [name for name, axis in zip(ATTENTION_AXES, axes) if len(axis) < 2]
        if short:
            raise InputError(self._name, f"column '{short[0]}': mixed batches were measured at a single value", "a grid needs two")
        self._axes = [axis.tolist() for axis in axes]
        self._flat = times.ravel().tolist()
        self._strides = [int(np.prod(times.shape[k + 1 :])) for k in range(4)]
        self._floor_us = min(self._flat)
        self._known: dict[tuple[int, int], tuple[int, float, int, float]] = {}

    def at_us(self, chunk: int, before: int, decodes: int, mean_kv: float) -> float:
        """Return microseconds of one layer."""
        key = (chunk, decodes)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (*self._place(0, chunk), *self._place(2, decodes))
        o1, w1, o3, w3 = known
        o2, w2 = self._place(1, before)
        o4, w4 = self._place(3, mean_kv)
        return max(self._floor_us, self._corner(o1 + o2 + o3 + o4, w1, w2, w3, w4))

    def _place(self, k: int, x: float) -> tuple[int, float]:
        axis = self._axes[k]
        i, weight = locate(axis, x)
        if weight > 1.0:
            self._beyond.note(f"{self._name} (mixed batches)", ATTENTION_AXES[k], x, axis[-1])
        return i * self._strides[k], weight

    def _corner(self, o: int, w1: float, w2: float, w3: float, w4: float) -> float:
        flat, (s1, s2, s3, _) = self._flat, self._strides
        u1, u2, u3, u4 = 1.0 - w1, 1.0 - w2, 1.0 - w3, 1.0 - w4
        p = o + s1
        return u1 * (
            u2 * (u3 * (u4 * flat[o] + w4 * flat[o + 1]) + w3 * (u4 * flat[o + s3] + w4 * flat[o + s3 + 1]))
            + w2 * (u3 * (u4 * flat[o + s2] + w4 * flat[o + s2 + 1]) + w3 * (u4 * flat[o + s2 + s3] + w4 * flat[o + s2 + s3 + 1]))
        ) + w1 * (
            u2 * (u3 * (u4 * flat[p] + w4 * flat[p + 1]) + w3 * (u4 * flat[p + s3] + w4 * flat[p + s3 + 1]))
            + w2 * (u3 * (u4 * flat[p + s2] + w4 * flat[p + s2 + 1]) + w3 * (u4 * flat[p + s2 + s3] + w4 * flat[p + s2 + s3 + 1]))
        )


def tensor_parallel_folder(folder: Path, tensor_parallel: int) -> Path:
    """Return the ``tp<N>`` folder of a profile; ``folder`` may be that folder itself. Raises InputError naming the degrees profiled."""
    if (folder / "dense.csv").exists():
        folder = folder.parent if folder.name.startswith("tp") else folder
    profiled = sorted(int(entry.name[2:]) for entry in folder.glob("tp*") if entry.name[2:].isdigit())
    if tensor_parallel in profiled:
        return folder / f"tp{tensor_parallel}"
    known = ", ".join(str(degree) for degree in profiled) or "none"
    raise InputError(str(folder), f"tensor_parallel {tensor_parallel} was not profiled", f"this profile can answer for: {known}")


def _refuse_another_llm(folder: Path, llm: Any, dtype: str | None) -> None:
    """Refuse a profile whose meta.yaml names other head counts or another weight dtype than the LLM has."""
    meta = read_meta(folder)
    profiled = (meta.get("engine_effective") or {}).get("hf_overrides") or {}
    degrees = meta.get("tp_degrees") or [1]  # the overrides noted are the per-GPU shape of the last degree profiled
    for key, wanted in (("num_attention_heads", llm.heads), ("num_key_value_heads", llm.kv_heads)):
        if key in profiled and profiled[key] * degrees[-1] != wanted:
            raise InputError(str(folder / "meta.yaml"), f"profiles {meta.get('model')} ({key} {profiled[key] * degrees[-1]}) and '{llm.name}' has {wanted}")
    if "variant" in meta and llm.dtype_of_weights(dtype) not in str(meta["variant"]):
        raise InputError(str(folder / "meta.yaml"), f"profiles {meta['variant']} weights, not {llm.dtype_of_weights(dtype)}")


def read_meta(folder: Path) -> dict[str, Any]:
    """Return meta.yaml of a profile, or an empty mapping when there is none."""
    path = folder / "meta.yaml"
    if not path.exists():
        return {}
    meta = read_yaml(path) or {}
    if not isinstance(meta, dict):
        raise InputError(str(path), "must hold a mapping of facts")
    return meta


def _lines(path: Path, axis: str, wanted: list[str] | tuple[str, ...], beyond: Extrapolations) -> dict[str, Line]:
    table = read_columns(path, axes=(axis,), times=("time_us",), words=("layer",))
    layers = np.array(table.words["layer"])
    lines = {}
    for name in wanted:
        rows = np.flatnonzero(layers == name)
        if not rows.size:
            raise InputError(str(path), f"column 'layer' has no rows of '{name}'", "it has: " + ", ".join(sorted(set(table.words["layer"]))))
        xs = table.numbers[axis][rows]
        falling = np.flatnonzero(np.diff(xs) <= 0)
        if falling.size:
            row = int(rows[falling[0] + 1])
            raise table.refuse(row, axis, f"{table.numbers[axis][row]:g} of '{name}' does not rise above the row before it")
        lines[name] = Line(f"{path} ({name})", axis, xs.tolist(), table.numbers["time_us"][rows].tolist(), beyond)
    return lines


def _pure(attention: Columns, first: str, second: str, beyond: Extrapolations) -> Surface:
    """The surface of batches with nothing but prefill, or nothing but decodes."""
    other = "n_decode" if first == "prefill_chunk" else "prefill_chunk"
    rows = (attention.numbers[other] == 0) & (attention.numbers[first] > 0)
    name = f"{attention.path} ({'prefill' if first == 'prefill_chunk' else 'decode'} only)"
    if not rows.any():
        raise InputError(str(attention.path), f"no row has {first} > 0 with {other} = 0")
    points = np.stack([attention.numbers[first][rows], attention.numbers[second][rows]], axis=1)
    surface = Surface(name, (first, second), points, attention.numbers["time_us"][rows], beyond)
    if len(surface.axes[0]) < 2 or len(surface.axes[1]) < 2:
        raise InputError(str(attention.path), f"column '{first}' or '{second}' has a single value", "a grid needs two")
    return surface


def _refuse_duplicates(attention: Columns) -> None:
    points = np.stack([attention.numbers[name] for name in ATTENTION_AXES], axis=1)
    _, first, inverse = np.unique(points, axis=0, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[inverse.ravel()] != np.arange(len(points)))
    if repeated.size:
        row = int(repeated[0])
        earlier = int(first[inverse.ravel()[row]]) + 2
        raise attention.refuse(row, ", ".join(ATTENTION_AXES), f"the same point as line {earlier}", "one time per grid point")
