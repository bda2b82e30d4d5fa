"""Quantised weights: recognised from names, dtypes and shapes alone, and turned back into plain matrices on load.

| format | stored as | value |
|---|---|---|
| fp8 | ``weight`` F8_E4M3/F8_E5M2, ``weight_scale`` or ``weight_scale_inv`` (one, per row, or per square block) | w · scale |
| int8 | ``weight`` I8, ``weight_scale`` per row, or ``SCB`` | w · scale; w · SCB / 127 |
| gptq | ``qweight`` I32 [in·bits/32, out], ``qzeros``, ``scales`` [groups, out], ``g_idx`` | (q − z − 1) · s |
| awq | ``qweight`` I32 [in, out·bits/32] in the order 0 2 4 6 1 3 5 7 | (q − z) · s |
| packed | ``weight_packed`` I32 [out, in/8], ``weight_scale`` [out, groups], ``weight_shape`` | (q − 8) · s |

Each format's layout is the one its public packing code writes (AutoGPTQ, AutoAWQ, compressed-tensors, bitsandbytes). Everything else with
integer weights is refused by name: a wrong guess would load and talk nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoint import Stored
from serving.errors import InputError

Read = Callable[[str], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = ("F8_E4M3", "F8_E5M2")
#: Suffixes of tensors that belong to activations or caches, not to weights: of no use to dequantised weights.
UNUSED = (".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale", "rotary_emb.inv_freq", ".weight_format")
REFUSED = {
    ".absmax": "bitsandbytes 4-bit",
    ".quant_map": "bitsandbytes 4-bit",
    ".weight_scale_2": "NVFP4",
    "_blocks": "MXFP4",
    ".B": "Marlin",
}


class LogicalWeight(NamedTuple):
    """One matrix as the network means it: its format, the stored tensors by role, and the name of the main one."""

    format: str
    parts: dict[str, str]
    main: str


def recognise(tensors: Mapping[str, Stored]) -> dict[str, LogicalWeight]:
    """Return the logical weights of a checkpoint by name (``….weight``, ``….bias``).

    Raises InputError, naming file and tensor, for a quantised format that cannot be dequantised.
    """
    found: dict[str, LogicalWeight] = {}
    consumed: set[str] = set()
    for name, stored in tensors.items():
        for suffix, label in REFUSED.items():
            if name.endswith(suffix):
                raise InputError(str(stored.file), f"tensor '{name}' is {label}, which is not read", "fp8, int8, gptq, awq and packed int4 are")
        weight = _recognise_one(name, stored, tensors)
        if weight is not None:
            logical = name.rsplit(".", 1)[0] + ".weight" if weight.format != "plain" else name
            found[logical] = weight
            consumed.update(weight.parts.values())
    for name, stored in tensors.items():
        if name not in consumed and not name.endswith(UNUSED):
            raise InputError(str(stored.file), f"tensor '{name}' ({stored.dtype}) belongs to no known weight format", "fp8, int8, gptq, awq, packed int4 or plain")
    return found


def _recognise_one(name: str, stored: Stored, tensors: Mapping[str, Stored]) -> LogicalWeight | None:
    base, _, leaf = name.rpartition(".")
    if name.endswith(UNUSED):
        return None
    if leaf == "qweight":
        return _grouped(base, tensors)
    if leaf == "weight_packed":
        return _with_parts("packed", base, ("weight_packed", "weight_scale", "weight_shape"), tensors)
    if leaf == "weight" and stored.dtype in FP8:
        scale = "weight_scale_inv" if f"{base}.weight_scale_inv" in tensors else "weight_scale"
        return _with_parts("fp8", base, ("weight", scale), tensors)
    if leaf == "weight" and stored.dtype == "I8":
        return _with_parts("int8", base, ("weight", "SCB" if f"{base}.SCB" in tensors else "weight_scale"), tensors)
    companions = ("scales", "qzeros", "weight_scale", "weight_scale_inv", "SCB", "weight_shape", "weight_zero_point", "g_idx")
    if stored.dtype in FLOATS and leaf not in companions:
        return LogicalWeight("plain", {leaf: name}, name)
    return None


def _with_parts(kind: str, base: str, roles: tuple[str, ...], tensors: Mapping[str, Stored]) -> LogicalWeight:
    for role in roles:
        if f"{base}.{role}" not in tensors:
            main = f"{base}.{roles[0]}"
            raise InputError(str(tensors[main].file), f"tensor '{main}' looks like {kind} but '{base}.{role}' is missing")
    return LogicalWeight(kind, {role: f"{base}.{role}" for role in roles}, f"{base}.{roles[0]}")


def _grouped(base: str, tensors: Mapping[str, Stored]) -> LogicalWeight:
    """Tell gptq (packed along the input) from awq (along the output) by the shapes."""
    roles = ("qweight", "qzeros", "scales", "g_idx") if f"{base}.g_idx" in tensors else ("qweight", "qzeros", "scales")
    weight = _with_parts("gptq", base, roles, tensors)
    packed, zeros, scales = (tensors[f"{base}.{role}"].shape for role in ("qweight", "qzeros", "scales"))
    where, out = str(tensors[weight.main].file), scales[1]
    bits = zeros[1] * 32 / out
    if bits not in (4, 8):
        raise InputError(where, f"tensor '{weight.main}' has {bits:g} bits a weight", "4 and 8 are read")
    if packed[1] == out:
        return weight
    if packed[1] * 32 == out * bits and bits == 4:
        return weight._replace(format="awq")
    raise InputError(where, f"tensor '{weight.main}' {list(packed)} fits neither gptq nor awq with scales {list(scales)}")


def dequantise(weight: LogicalWeight, read: Read) -> Tensor:
    """Return the plain matrix, float32 unless stored plain; [out, in]."""
    return DEQUANTISE[weight.format]({role: read(name) for role, name in weight.parts.items()})


def _plain(parts: dict[str, Tensor]) -> Tensor:
    return next(iter(parts.values()))


def _fp8(parts: dict[str, Tensor]) -> Tensor:
    weight = parts["weight"].float()
    scale = next(tensor for role, tensor in parts.items() if role != "weight").float()
    return weight * _spread(scale, weight.shape)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Broadcast a scale to ``shape``: one value, one a row, or one a square block (the largest power of two that fits the counts)."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.numel() == shape[0]:
        return scale.reshape(-1, 1)
    for block in (256, 128, 64, 32, 16):
        if scale.shape == (-(-shape[0] // block), -(-shape[1] // block)):
            return scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]
    raise InputError("weights", f"scales {list(scale.shape)} do not fit a weight {list(shape)}")


def _int8(parts: dict[str, Tensor]) -> Tensor:
    scale = parts["SCB"].float() / 127 if "SCB" in parts else parts["weight_scale"].float()
    return parts["weight"].float() * _spread(scale, parts["weight"].shape)


def _unpack(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 words along the last axis, lowest bits first; ``order[i]`` is where field i belongs."""
    fields = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    if order is not None:
        values = values[..., torch.tensor(order).argsort()]
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * fields)


def _gptq(parts: dict[str, Tensor]) -> Tensor:
    scales = parts["scales"].float()
    bits = parts["qzeros"].shape[1] * 32 // scales.shape[1]
    quantised = _unpack(parts["qweight"].T.contiguous(), bits)  # [out, in]
    zeros = _unpack(parts["qzeros"], bits) + 1  # [groups, out]
    inputs = quantised.shape[1]
    group = parts["g_idx"].long() if "g_idx" in parts else torch.arange(inputs) // (inputs // scales.shape[0])
    return (quantised - zeros[group].T) * scales[group].T


def _awq(parts: dict[str, Tensor]) -> Tensor:
    scales = parts["scales"].float()
    quantised = _unpack(parts["qweight"], 4, AWQ_ORDER)  # [in, out]
    zeros = _unpack(parts["qzeros"], 4, AWQ_ORDER)
    each = quantised.shape[0] // scales.shape[0]
    return ((quantised - zeros.repeat_interleave(each, 0)) * scales.repeat_interleave(each, 0)).T.contiguous()


def _packed(parts: dict[str, Tensor]) -> Tensor:
    rows, columns = parts["weight_shape"].tolist()
    quantised = _unpack(parts["weight_packed"], 4)[:rows, :columns] - 8
    scale = parts["weight_scale"].float()
    return quantised * scale.repeat_interleave(columns // scale.shape[1], 1)


DEQUANTISE: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "plain": _plain, "fp8": _fp8, "int8": _int8, "gptq": _gptq, "awq": _awq, "packed": _packed,
}  # fmt: skip
