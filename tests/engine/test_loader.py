"""Weights on disk become the network that was saved, whatever their names and format, or are refused by file and tensor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
pytest.importorskip("safetensors", reason="the engine's extra is not installed")

import plain_forward
from safetensors.torch import save_file
from stub_plans import CPU, MOE, TINY

from engine.architecture import from_hf
from engine.checkpoint import MANIFEST, write_manifest
from engine.loader import load, random_weights
from engine.quantised import AWQ_ORDER
from serving.errors import InputError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
PROMPT = [3, 14, 15, 9, 2, 60]


def canonical(shape, seed=1) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=g) / size[-1] ** 0.5 for name, size in shape.weight_shapes().items()}


def save(folder, tensors, config=LLAMA, shards=1):
    """Write a Hugging Face folder of ``shards`` files."""
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    owner = {name: f"model-{i % shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(owner.values()):
        save_file({name: tensors[name].contiguous() for name in names if owner[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owner}))
    return folder


def read(folder, **options):
    return load(folder, device=CPU, dtype=torch.float32, **options)


def output(loaded):
    return plain_forward.logits(plain_forward.weights_of(loaded.weights, loaded.shape), loaded.shape, PROMPT)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_sharded_folder_gives_its_weights_back(tmp_path, shards):
    shape = from_hf(LLAMA)
    tensors = canonical(shape)
    loaded = read(save(tmp_path, tensors, shards=shards))
    assert loaded.shape == shape and loaded.formats == {"plain": len(tensors)}
    layer = loaded.weights.layers[1]
    assert torch.equal(layer.qkv[64:96], tensors["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(layer.gate_up[48:], tensors["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(loaded.weights.lm_head, tensors["lm_head.weight"])


def interleaved(weight):
    """Rows of each head from halves (i, i + D/2) to the original files' pairs (2i, 2i + 1)."""
    heads = weight.view(-1, 2, 8, 32)
    return heads.transpose(1, 2).reshape(weight.shape)


def meta_names(tensors):
    out = {}
    for name, t in tensors.items():
        name = name.removeprefix("model.")
        for old, new in (
            ("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.q_proj", "attention.wq"), ("self_attn.k_proj", "attention.wk"), ("self_attn.v_proj", "attention.wv"), ("self_attn.o_proj", "attention.wo"),
            ("mlp.gate_proj", "feed_forward.w1"), ("mlp.down_proj", "feed_forward.w2"), ("mlp.up_proj", "feed_forward.w3"),
        ):  # fmt: skip
            name = name.replace(old, new)
        out[name] = interleaved(t) if ".wq." in name or ".wk." in name else t
    return out


def fused_names(tensors):
    out = dict(tensors)
    for i in range(2):
        a, m = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        out[a + "qkv_proj.weight"] = torch.cat([out.pop(f"{a}{n}_proj.weight") for n in "qkv"])
        out[m + "gate_up_proj.weight"] = torch.cat([out.pop(f"{m}{n}_proj.weight") for n in ("gate", "up")])
    return out


@pytest.mark.parametrize("rename", [meta_names, fused_names, lambda t: {f"language_model.{name}": v for name, v in t.items()}])
def test_foreign_names_give_the_same_network(tmp_path, rename):
    (tmp_path / "own").mkdir()
    tensors = canonical(from_hf(LLAMA))
    own = read(save(tmp_path / "own", tensors))
    foreign = read(save(tmp_path, rename(tensors)))
    torch.testing.assert_close(output(foreign), output(own))


def test_mixtrals_experts_are_found(tmp_path):
    shape = from_hf(MIXTRAL)
    assert (shape.experts, shape.experts_per_token, shape.expert_intermediate, shape.normalise_router) == (4, 2, 24, True)
    tensors = canonical(shape)
    renamed = {
        name.replace("mlp.gate.", "block_sparse_moe.gate.").replace("mlp.experts", "block_sparse_moe.experts")
        .replace("gate_proj", "w1").replace("down_proj", "w2").replace("up_proj", "w3"): t
        for name, t in tensors.items()
    }  # fmt: skip
    loaded = read(save(tmp_path, renamed, MIXTRAL))
    assert torch.equal(loaded.weights.layers[0].experts.gate_up[3, :24], tensors["model.layers.0.mlp.experts.3.gate_proj.weight"])


def test_a_users_own_rename_comes_first(tmp_path):
    tensors = canonical(from_hf(LLAMA))
    odd = {name.replace("model.layers", "blocks"): t for name, t in tensors.items()}
    with pytest.raises(InputError, match=r"no file holds tensor 'model\.layers\.0"):
        read(save(tmp_path, odd))
    loaded = read(tmp_path, remap={r"^blocks\.": "model.layers."})
    assert torch.equal(loaded.weights.layers[0].output, tensors["model.layers.0.self_attn.o_proj.weight"])


def pack(values, bits, order=None):
    """Pack the last axis of small non-negative integers into int32 words."""
    fields = 32 // bits
    words = values.view(*values.shape[:-1], -1, fields).to(torch.int64)
    if order is not None:
        words = words[..., list(order)]
    total = (words << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def quantise(kind, weight, base):
    """Return the stored tensors of one [out, in] matrix in ``kind``, and the matrix they stand for."""
    out, inputs = weight.shape
    g = torch.Generator().manual_seed(out)
    if kind in ("fp8", "fp8 rows", "fp8 blocks"):
        scale = {"fp8": torch.tensor([0.01]), "fp8 rows": torch.rand(out, 1, generator=g) + 0.01}.get(kind)
        name = "weight_scale"
        spread = scale
        if kind == "fp8 blocks":
            name, scale = "weight_scale_inv", torch.rand(-(-out // 16), -(-inputs // 16), generator=g) + 0.01
            spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:out, :inputs]
        stored = (weight / spread).to(torch.float8_e4m3fn)
        return {f"{base}.weight": stored, f"{base}.{name}": scale, f"{base}.input_scale": torch.ones(1)}, stored.float() * spread
    if kind in ("int8", "int8 SCB"):
        scale = weight.abs().amax(1, keepdim=True) / 127
        stored = (weight / scale).round().to(torch.int8)
        scb = {f"{base}.SCB": (scale * 127)[:, 0], f"{base}.weight_format": torch.zeros((), dtype=torch.uint8)}
        return {f"{base}.weight": stored} | (scb if "SCB" in kind else {f"{base}.weight_scale": scale}), stored.float() * scale
    group, bits = 16, 8 if kind == "gptq8" else 4
    q = torch.randint(0, 2**bits, (out, inputs), generator=g)
    scale = torch.rand(inputs // group, out, generator=g) / 2**bits / 4 + 0.001
    zero = torch.randint(1, 2**bits, (inputs // group, out), generator=g)
    if kind == "packed":
        plain = (q - 8) * scale.T.repeat_interleave(group, 1)
        parts = {"weight_packed": pack(q, 4), "weight_scale": scale.T.contiguous(), "weight_shape": torch.tensor([out, inputs])}
    elif kind == "awq":
        plain = ((q.T - zero.repeat_interleave(group, 0)) * scale.repeat_interleave(group, 0)).T
        parts = {"qweight": pack(q.T.contiguous(), 4, AWQ_ORDER), "qzeros": pack(zero, 4, AWQ_ORDER), "scales": scale}
    else:
        index = torch.randperm(inputs, generator=g) % (inputs // group) if kind == "gptq act-order" else torch.arange(inputs) // group
        plain = (q - zero[index].T) * scale[index].T
        parts = {"qweight": pack(q, bits).T.contiguous(), "qzeros": pack(zero - 1, bits), "scales": scale, "g_idx": index.to(torch.int32)}
    return {f"{base}.{name}": t for name, t in parts.items()}, plain.float()


@pytest.mark.parametrize("kind", ["fp8", "fp8 rows", "fp8 blocks", "int8", "int8 SCB", "gptq", "gptq act-order", "gptq8", "awq", "packed"])
def test_quantised_formats_are_recognised_and_dequantised(tmp_path, kind):
    tensors = canonical(from_hf(LLAMA))
    expected = {}
    for name in [name for name in tensors if "_proj" in name]:
        stored, expected[name] = quantise(kind, tensors.pop(name), name.removesuffix(".weight"))
        tensors |= stored
    loaded = read(save(tmp_path, tensors, shards=2))
    assert loaded.formats == {"plain": 7, kind.split()[0].replace("gptq8", "gptq"): 14}
    for i, layer in enumerate(loaded.weights.layers):
        torch.testing.assert_close(layer.down, expected[f"model.layers.{i}.mlp.down_proj.weight"])
        torch.testing.assert_close(layer.qkv[:64], expected[f"model.layers.{i}.self_attn.q_proj.weight"])


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"down_proj.weight.absmax": torch.ones(4)}, "bitsandbytes 4-bit"),
        ({"down_proj.weight_scale_2": torch.ones(1)}, "NVFP4"),
        ({"down_proj_blocks": torch.ones(4, dtype=torch.uint8)}, "MXFP4"),
        ({"down_proj.weight": torch.ones(4, 4, dtype=torch.uint8)}, "belongs to no known weight format"),
        ({"down_proj.weight": torch.ones(4, 4, dtype=torch.int8)}, "looks like int8 but .*weight_scale' is missing"),
        ({"down_proj.qweight": torch.ones(4, 4, dtype=torch.int32)}, "looks like gptq but .*qzeros' is missing"),
    ],
)
def test_formats_that_cannot_be_read_are_refused_by_name(tmp_path, extra, message):
    tensors = canonical(from_hf(LLAMA)) | {f"model.layers.0.mlp.{name}": t for name, t in extra.items()}
    with pytest.raises(InputError, match=message) as caught:
        read(save(tmp_path, tensors))
    assert "model-00000.safetensors" in caught.value.where


def test_damaged_shards_are_named_with_their_tensor(tmp_path):
    tensors = canonical(from_hf(LLAMA))
    shard = save(tmp_path, tensors, shards=2) / "model-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(InputError, match=r"model-00001\.safetensors: is truncated: tensor 'model\."):
        read(tmp_path)
    shard.write_bytes(whole[:100])
    with pytest.raises(InputError, match="truncated within its header"):
        read(tmp_path)
    shard.write_bytes(b"\x10" + b"\0" * 7 + b"not json at all!")
    with pytest.raises(InputError, match="damaged header"):
        read(tmp_path)
    shard.unlink()
    with pytest.raises(InputError, match=r"is missing; it should hold tensor"):
        read(tmp_path)


def test_another_networks_weights_are_refused(tmp_path):
    tensors = canonical(from_hf(LLAMA))
    with pytest.raises(InputError, match=r"embed_tokens.weight' has shape \[61, 32\], expected \[50, 32\]"):
        read(save(tmp_path, tensors, LLAMA | {"vocab_size": 50}))
    with pytest.raises(InputError, match="has no place in this architecture"):
        read(save(tmp_path, tensors | {"model.layers.2.mlp.down_proj.weight": torch.ones(32, 48)}))
    with pytest.raises(InputError, match="did you mean 'LlamaForCausalLM'"):
        read(save(tmp_path, tensors, LLAMA | {"architectures": ["LLaMAForCausalLM"]}))
    with pytest.raises(InputError, match="no key 'hidden_size'"):
        read(save(tmp_path, tensors, {k: v for k, v in LLAMA.items() if k != "hidden_size"}))


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="convert them to safetensors"):
        read(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        read(tmp_path / "absent")


def test_the_manifest_is_checked_before_anything_is_read(tmp_path):
    save(tmp_path, canonical(from_hf(LLAMA)), shards=2)
    manifest = write_manifest(tmp_path)
    assert manifest.name == MANIFEST
    read(tmp_path)
    shard = tmp_path / "model-00000.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # one bit; without the manifest it would load
    with pytest.raises(InputError, match=r"model-00000\.safetensors: does not have the digest"):
        read(tmp_path)
    shard.write_bytes(good)
    (tmp_path / "extra.safetensors").write_bytes(good)
    with pytest.raises(InputError, match=r"extra\.safetensors: is not in the manifest"):
        read(tmp_path)
    (tmp_path / "extra.safetensors").unlink()
    shard.unlink()
    with pytest.raises(InputError, match="in the manifest but missing"):
        read(tmp_path)
    manifest.write_text("abc  model.safetensors\n")
    with pytest.raises(InputError, match="SHA384SUMS:1"):
        read(tmp_path)


def test_random_weights_repeat_by_seed_and_name():
    one, two, other = (random_weights(MOE, seed, device=CPU, dtype=torch.float32) for seed in (1, 1, 2))
    assert torch.equal(one.layers[1].experts.down, two.layers[1].experts.down)
    assert not torch.equal(one.lm_head, other.lm_head)
    deeper = random_weights(replace(MOE, layers=3), 1, device=CPU, dtype=torch.float32)
    assert torch.equal(deeper.layers[1].qkv, one.layers[1].qkv)
    tied = random_weights(replace(TINY, tied_embeddings=True), 1, device=CPU, dtype=torch.float32)
    assert tied.lm_head is tied.embedding
