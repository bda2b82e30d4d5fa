"""Cross-layer reuse of the KV cache: which layers keep keys and values of their own, by a policy of kind ``kv_reuse``."""

from __future__ import annotations

from dataclasses import replace

from serving import policies
from serving.errors import InputError
from serving.llm import Llm
from serving.scenario.layer_reuse import LayerReuse

WHERE = "kv_cache.layer_reuse"


def reusing(llm: Llm, spec: LayerReuse | None, where: str = WHERE) -> Llm:
    """Return ``llm`` with as many KV layers as the policy of ``spec`` leaves it. Raises InputError for layers that are not all alike."""
    return llm if spec is None else replace(llm, kv_layers=len(set(owners_of(llm, spec, where))))


def owners_of(llm: Llm, spec: LayerReuse, where: str = WHERE) -> list[int]:
    """The layer whose keys and values each layer of ``llm`` reads. Raises InputError for layers that are not all alike."""
    if llm.mla is not None or llm.sliding_window is not None:
        raise InputError(where, f"{llm.name} has layers that keep latents or windows", "an LLM whose layers all keep keys and values of every token")
    if len(spec.similarity) != llm.layers - 1:
        raise InputError(f"{where}.similarity", f"{llm.name} has {llm.layers} layers: {llm.layers - 1} cosines between neighbours, got {len(spec.similarity)}")
    policy = policies.load("kv_reuse", spec.policy.name, spec.policy.options, where=spec.policy.where)
    owners = policy.owners(spec.similarity)
    if len(owners) != llm.layers or any(not 0 <= owner <= layer or owners[owner] != owner for layer, owner in enumerate(owners)):
        raise InputError(spec.policy.where, "must name for each layer itself, or an earlier one that keeps its own", f"got {owners}")
    return list(owners)
