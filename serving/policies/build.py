"""From the policy part of a scenario to the set of policies that drives one replica, simulated or real."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from serving.adapters import AdapterSlots
from serving.errors import InputError
from serving.layout import Layout
from serving.policies import Limits, Policies, Routing, load, option_names

if TYPE_CHECKING:
    from serving.llm import Llm
    from serving.scenario import Policy, Scenario
    from serving.scenario.adapters import Adapters
    from serving.scenario.model import Cluster, Speculation
    from serving.scenario.retention import Retention


def policies_of(scenario: Scenario) -> Policies:
    """Build a fresh set for one replica of ``scenario``. Raises InputError naming the mistake."""
    return build_policies(scenario.policy, scenario.speculation, scenario.adapters, scenario.retention)


def build_policies(
    policy: Policy, speculation: Speculation | None = None, adapters: Adapters | None = None, retention: Retention | None = None
) -> Policies:
    """Build a fresh set: policies keep state, so each replica has its own. Raises InputError naming the mistake."""
    batching = policy.batching
    if batching.max_batch_tokens < batching.max_batch_seqs:
        raise InputError(
            "policy.batching.max_batch_tokens",
            f"{batching.max_batch_tokens} tokens a step are too few for {batching.max_batch_seqs} sequences that each decode one",
            "raise it or lower max_batch_seqs",
        )
    return Policies(
        ordering=_load("ordering", policy.ordering),
        batching=load("batching", batching.name, _batching_options(policy), where=batching.where),
        window=_load("window", batching.window),
        victim=_load("preemption", policy.preemption),
        admission=_load("admission", policy.admission),
        limits=Limits(batching.max_batch_tokens, batching.max_batch_seqs, batching.max_chunk_tokens),
        reload=_load("reload", policy.reload),
        speculation=_speculation(speculation, walked=retention is not None),
        retention=None if retention is None else _load("retention", retention.policy),
        adapters=None if adapters is None else AdapterSlots(adapters.slots, _load("adapters", adapters.policy), adapters.max_bypasses),
    )


def _speculation(speculation: Speculation | None, *, walked: bool) -> Any:
    """The speculation policy; one that drafts nothing where decodes must be walked one by one for another reason."""
    if speculation is not None:
        return _load("speculation", speculation.policy)
    return load("speculation", "none") if walked else None


def build_layout(cluster: Cluster, policy: Policy, llm: Llm) -> Layout:
    """Lay one replica out: the sharding policy places a tensor-parallel group, the cluster's other degrees multiply it.

    Raises InputError, by the key at fault, for what ``llm`` does not allow.
    """
    spec = policy.sharding
    group = _load("sharding", spec).layout(llm, cluster.tensor_parallel)
    if not isinstance(group, Layout) or group.gpus != cluster.tensor_parallel:
        raise InputError(spec.where, f"'{spec.name}' did not lay out {cluster.tensor_parallel} GPUs", f"it gave {group}")
    layout = replace(
        group, stages=group.stages * cluster.pipeline_parallel, ring=group.ring * cluster.sequence_parallel,
        expert_parallel=max(group.expert_parallel, cluster.expert_parallel),
    )  # fmt: skip
    layout.check(llm)
    return layout


def build_routing(policy: Policy) -> Routing:
    """Build the fleet's routing policy."""
    return _load("routing", policy.routing)


def _load(kind: str, spec: Any) -> Any:
    return load(kind, spec.name, spec.options, where=spec.where)


def _batching_options(policy: Policy) -> dict[str, Any]:
    """Options of the batching policy; the queue-head settings of a scenario go to those policies that have them."""
    batching = policy.batching
    shared = {"head_of_line": batching.head_of_line, "max_bypasses": batching.max_bypasses}
    known = option_names("batching", batching.name, where=batching.where)
    for key, value in shared.items():
        if key not in known and value != type(batching).model_fields[key].default:
            raise InputError(f"policy.batching.{key}", f"batching policy '{batching.name}' has no such option")
    return {**{key: value for key, value in shared.items() if key in known}, **batching.options}
