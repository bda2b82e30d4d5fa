"""A second opinion: the decoder written plainly, one whole sequence at a time, in float64, straight from canonical weights."""

from __future__ import annotations

import math

import torch

from engine.architecture import Architecture


def weights_of(decoder_weights, shape: Architecture) -> dict[str, torch.Tensor]:
    """Undo the fusing, into float64."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    flat = {"embed": decoder_weights.embedding, "norm": decoder_weights.norm, "head": decoder_weights.lm_head}
    for i, layer in enumerate(decoder_weights.layers):
        flat |= {f"{i}.an": layer.attention_norm, f"{i}.mn": layer.mlp_norm, f"{i}.o": layer.output}
        flat |= {f"{i}.q": layer.qkv[:q], f"{i}.k": layer.qkv[q : q + kv], f"{i}.v": layer.qkv[q + kv :]}
        if layer.qkv_bias is not None:
            flat |= {f"{i}.qb": layer.qkv_bias[:q], f"{i}.kb": layer.qkv_bias[q : q + kv], f"{i}.vb": layer.qkv_bias[q + kv :]}
        if layer.q_norm is not None:
            flat |= {f"{i}.qn": layer.q_norm, f"{i}.kn": layer.k_norm}
        if layer.experts is None:
            flat |= {f"{i}.gu": layer.gate_up, f"{i}.d": layer.down}
        else:
            e = layer.experts
            flat |= {f"{i}.r": e.router, f"{i}.egu": e.gate_up, f"{i}.ed": e.down}
            if e.shared_gate_up is not None:
                flat |= {f"{i}.sgu": e.shared_gate_up, f"{i}.sd": e.shared_down, f"{i}.sg": e.shared_gate}
    return {name: tensor.double() for name, tensor in flat.items()}


def _norm(x, w, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def _frequencies(shape: Architecture) -> list[float]:
    """Llama 3's published rule, per frequency and by cases."""
    found = []
    for i in range(shape.head_dim // 2):
        f = shape.rope_theta ** (-2 * i / shape.head_dim)
        s = shape.rope_scaling
        if s is not None and s.kind == "linear":
            f /= s.factor
        elif s is not None:
            wavelength = 2 * math.pi / f
            if wavelength > s.original_max / s.low_freq_factor:
                f /= s.factor
            elif wavelength > s.original_max / s.high_freq_factor:
                smooth = (s.original_max / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                f = (1 - smooth) * f / s.factor + smooth * f
        found.append(f)
    return found


def _rotate(x, shape: Architecture):
    """x [heads, L, D]; complex multiplication of the pairs (i, i + D/2)."""
    half = shape.head_dim // 2
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * torch.tensor(_frequencies(shape), dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def _mlp(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


def _experts(x, w, i, shape: Architecture):
    rows = []
    for row in x:
        p = torch.softmax(row @ w[f"{i}.r"].T, -1)
        best = sorted(range(shape.experts), key=lambda e: -p[e].item())[: shape.experts_per_token]
        total = sum(p[e] for e in best) if shape.normalise_router else 1.0
        y = sum(p[e] / total * _mlp(row, w[f"{i}.egu"][e], w[f"{i}.ed"][e]) for e in best)
        if f"{i}.sgu" in w:
            y = y + torch.sigmoid(row @ w[f"{i}.sg"].T) * _mlp(row, w[f"{i}.sgu"], w[f"{i}.sd"])
        rows.append(y)
    return torch.stack(rows)


def logits(
    w: dict[str, torch.Tensor], shape: Architecture, tokens: list[int], kept: torch.Tensor | None = None, gates: dict | None = None
) -> torch.Tensor:
    """Return the logits of every position of one sequence, float64 [L, vocab]; ``kept`` [L, L] says what each position may look at.

    ``gates``: by the number of layers before it, (w, b); a position whose gate opens stands still from there on.
    """
    written: dict[int, tuple] = {}  # by layers that keep keys and values
    still = torch.zeros(len(tokens), dtype=torch.bool)
    x = w["embed"][tokens]
    length, dim, group = len(tokens), shape.head_dim, shape.heads // shape.kv_heads
    age = torch.arange(length)[:, None] - torch.arange(length)[None]
    for i in range(shape.layers):
        before = x
        window = shape.window_of(i)
        hidden = (age < 0) | (age >= (window or length))
        hidden = hidden if kept is None else hidden | ~kept
        h = _norm(x, w[f"{i}.an"], shape.norm_eps)
        q, k, v = (h @ w[f"{i}.{n}"].T + w.get(f"{i}.{n}b", 0.0) for n in "qkv")
        q, k, v = (t.view(length, -1, dim).transpose(0, 1) for t in (q, k, v))
        if f"{i}.qn" in w:
            q, k = _norm(q, w[f"{i}.qn"], shape.norm_eps), _norm(k, w[f"{i}.kn"], shape.norm_eps)
        if shape.positions == "rope":
            q, k = _rotate(q, shape), _rotate(k, shape)
        k, v = written.setdefault(i, (k, v)) if shape.owner_of(i) == i else written[shape.owner_of(i)]
        heads = []
        for head in range(shape.heads):
            score = q[head] @ k[head // group].T / math.sqrt(dim)
            if shape.positions == "alibi":  # for a power of two of heads
                score = score - 2.0 ** (-8 * (head + 1) / shape.heads) * age
            heads.append(torch.softmax(score.masked_fill(hidden, -math.inf), -1) @ v[head // group])
        x = x + torch.cat(heads, -1) @ w[f"{i}.o"].T
        h = _norm(x, w[f"{i}.mn"], shape.norm_eps)
        x = x + (_experts(h, w, i, shape) if shape.experts else _mlp(h, w[f"{i}.gu"], w[f"{i}.d"]))
        x = torch.where(still[:, None], before, x)
        if gates and i + 1 in gates:
            weight, bias = gates[i + 1]
            still = still | (torch.sigmoid(_norm(x, w[f"{i + 1}.an"], shape.norm_eps) @ weight.double() + bias) > 0.5)
    return _norm(x, w["norm"], shape.norm_eps) @ w["head"].T
