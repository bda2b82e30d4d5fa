"""From a scenario to the parts of a simulation: catalogue facts, memory, latency model, replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hwmodels.group_links import GroupLinks
from hwmodels.latency import LatencyModel
from serving.catalog import Gpu, load_gpu, load_llm
from serving.errors import InputError
from serving.kv_pool import KVPool
from serving.kv_tiers import build_tiers
from serving.layer_reuse import reusing
from serving.layout import Layout
from serving.llm import Llm
from serving.memory import KvCapacity, kv_capacity
from serving.metrics import Metrics
from serving.policies import load as load_policy
from serving.policies.build import build_layout, build_routing, policies_of
from serving.recording import Recording
from serving.records import TableLog
from serving.rng import stream
from serving.scenario import Scenario
from serving.scenario.sites import Site
from serving.scheduler import Scheduler
from serving.topology import load_topology
from serving.workload.lengths import one_by_one, seconds
from sim import placement
from sim.cluster import Cluster
from sim.delivery import Delivery
from sim.disaggregation import Disaggregated
from sim.environment import Environment
from sim.held_weights import resident_gib
from sim.network import Network
from sim.pricing import price
from sim.replica import Replica
from sim.rollout import Split
from sim.sites import Entrances, Served, SiteFleet
from sim.tenancy import Crowded, SharedGpus, burden
from sim.topology import LinkGraph


@dataclass(frozen=True, slots=True)
class Parts:
    """What a scenario resolves to. ``max_model_len`` is the scenario's, or as much of the catalogue's as the pool can hold."""

    scenario: Scenario
    llm: Llm
    gpu: Gpu
    capacity: KvCapacity
    latency: LatencyModel
    max_model_len: int
    layout: Layout
    graph: LinkGraph | None = None  # of the topology, if there is one
    placed: tuple[list[str], ...] = ()  # the GPUs of every replica on it
    latencies: tuple[LatencyModel, ...] = ()  # of every replica, where their links differ

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        tenancy = self.scenario.cluster.tenancy
        return self.scenario.cluster.replicas // (tenancy.tenants if tenancy is not None else 1) * self.layout.gpus

    def latency_of(self, replica: int) -> LatencyModel:
        """What prices the steps of a replica: one of its own, where that depends on the steps before."""
        model = self.latencies[replica] if replica < len(self.latencies) else self.latency
        return model.for_replica() if hasattr(model, "for_replica") else model


def resolve(scenario: Scenario, on: tuple[LinkGraph, list[list[str]]] | None = None) -> Parts:
    """Look everything up and check that it can work at all. Raises InputError naming the binding limit.

    ``on`` gives the GPUs of every replica on a topology; without it those of the scenario's own topology are handed out.
    """
    cluster, cache, batching = scenario.cluster, scenario.kv_cache, scenario.policy.batching
    llm, gpu = reusing(load_llm(scenario.llm), cache.layer_reuse), load_gpu(cluster.gpu)
    weight_dtype = None if cluster.weight_dtype == "auto" else cluster.weight_dtype
    kv_dtype = "bf16" if cache.dtype == "auto" else cache.dtype
    layout = build_layout(cluster, scenario.policy, llm)
    _check_tenancy(scenario)
    if scenario.max_model_len is not None and scenario.max_model_len > llm.max_model_len:
        raise InputError("max_model_len", f"{scenario.max_model_len} tokens exceed what {llm.name} was made for", f"{llm.max_model_len} at most")
    if batching.name == "two_streams" and (scenario.latency.name not in ("roofline", "recorded") or layout.stages > 1):
        raise InputError("policy.batching", "only the roofline without pipeline stages prices two streams on one GPU", "use chunked_prefill")
    capacity = kv_capacity(
        llm,
        gpu,
        layout=layout,
        memory_fraction=cache.memory_fraction,
        block_tokens=cache.block_tokens,
        max_model_len=scenario.max_model_len or 1,
        max_batch_tokens=batching.max_batch_tokens,
        max_batch_seqs=batching.max_batch_seqs,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        weights_gib=resident_gib(scenario, llm, layout),
        blocks=cache.blocks,
    )
    if not capacity.fits or capacity.usable_blocks < 1:
        where = "max_model_len" if capacity.usable_blocks > 0 else "cluster"
        raise InputError(where, f"{llm.name} does not fit on {layout.gpus} x {gpu.name}", capacity.binding_limit)
    graph, placed = on or placement.of_scenario(cluster, layout, gpu)
    models = _latency_models(scenario, llm, gpu, layout, graph, placed)
    longest = scenario.max_model_len or min(llm.max_model_len, capacity.usable_blocks * cache.block_tokens)
    return Parts(scenario, llm, gpu, capacity, models[0], longest, layout, graph, tuple(placed), tuple(models))


def _latency_models(scenario: Scenario, llm: Llm, gpu: Gpu, layout: Layout, graph: LinkGraph | None, placed: list[list[str]]) -> list[LatencyModel]:
    """The latency model of every placed replica, shared by those whose links are alike; just one without a topology."""
    built: dict[GroupLinks | None, LatencyModel] = {}
    models = []
    for links in [placement.links_of(graph, gpus, layout, gpu) for gpus in placed] if graph is not None else [None]:
        if links not in built:
            built[links] = price(scenario, llm, gpu, layout, links)
        models.append(built[links])
    return models


def pool_scenario(scenario: Scenario, role: str) -> Scenario:
    """The scenario of one pool of a disaggregated fleet, as if it were a fleet of its own."""
    cluster, batching = scenario.cluster, scenario.policy.batching
    pool = cluster.pool(role)
    own = {"replicas": pool.replicas, "gpu": pool.gpu or cluster.gpu, "tensor_parallel": pool.tensor_parallel or cluster.tensor_parallel, "pools": ()}
    limits = {key: getattr(pool, key) for key in ("max_batch_tokens", "max_batch_seqs") if getattr(pool, key) is not None}
    policy = scenario.policy.model_copy(update={"batching": batching.model_copy(update=limits)})
    return scenario.model_copy(update={"cluster": cluster.model_copy(update=own), "policy": policy})


def site_scenario(scenario: Scenario, site: Site) -> Scenario:
    """The scenario of one site, as if it were a fleet of its own."""
    cluster, batching = scenario.cluster, scenario.policy.batching
    own = {"replicas": site.replicas, "gpu": site.gpu or cluster.gpu, "tensor_parallel": site.tensor_parallel or cluster.tensor_parallel}
    limits = {key: getattr(site, key) for key in ("max_batch_tokens", "max_batch_seqs") if getattr(site, key) is not None}
    policy = scenario.policy.model_copy(update={"batching": batching.model_copy(update=limits)})
    lengths = {"llm": site.llm or scenario.llm, "max_model_len": site.max_model_len or scenario.max_model_len}
    return scenario.model_copy(update={"cluster": cluster.model_copy(update=own), "policy": policy, "sites": None, **lengths})


def build_fleet(
    scenario: Scenario, parts: dict[str, Parts], metrics: Metrics, *, stepwise: bool = False, audit: float = 0.0, recording: Recording | None = None,
    stage_log: TableLog | None = None,
) -> Cluster | Disaggregated | Split | SiteFleet:
    """Build the whole fleet of ``scenario`` on a new environment; ``parts`` are those of ``resolve_fleet``.

    ``stage_log`` takes the ways between sites. Raises InputError for a mistake in a policy, or for pools that the topology cannot hold or join.
    """  # fmt: skip
    options = {"stepwise": stepwise, "audit": audit, "recording": recording}
    if scenario.sites is not None:
        return _build_sites(scenario, parts, metrics, options, stage_log)
    if not scenario.cluster.pools:
        if scenario.rollout is not None:
            return _build_split(scenario, parts["replicas"], metrics, options)
        scaling = scenario.cluster.autoscaling
        cluster = build_cluster(parts["replicas"], metrics, replicas=scaling.maximum if scaling is not None else None, **options)
        _join_links(cluster, parts["replicas"])
        return cluster
    most = {role: scenario.cluster.pool(role).most for role in parts}
    prefill = build_cluster(parts["prefill"], metrics, replicas=most["prefill"], **options)
    decode = build_cluster(parts["decode"], metrics, replicas=most["decode"], env=prefill.env, first_label=most["prefill"], **options)
    gpus = [*parts["prefill"].placed, *parts["decode"].placed]
    per_token = max(part.capacity.kv_bytes_per_token * part.layout.gpus for part in parts.values())
    network, answers = Network(parts["prefill"].graph, prefill.env), scenario.cluster.first_token == "decode"
    return Disaggregated(prefill, decode, network, lambda replica: gpus[replica.label], per_token, decode_answers=answers)


def _build_sites(
    scenario: Scenario, parts: dict[str, Parts], metrics: Metrics, options: dict[str, Any], log: TableLog | None
) -> SiteFleet:
    """A cluster at every site with replicas, two where a release runs; replicas are numbered from site to site."""
    spec, release = scenario.sites, scenario.rollout
    touched = [] if release is None else [name for region in release.regions or [site.name for site in spec.places] for name in spec.within(region)]
    env, label, served = Environment(), 0, {}
    for place, site in enumerate(spec.places):
        if not site.replicas:
            continue
        part = parts[site.name]
        if site.name in touched and site.replicas < 2:
            raise InputError(f"sites.places[{place}].replicas", "a release needs two replicas at every site that it touches", "see rollout.regions")
        build = {**options, "env": env, "first_label": label}
        if site.name in touched:
            takes = _build_split(part.scenario, parts[site.name], metrics, build)
            clusters = (takes.baseline, takes.candidate)
        else:
            takes = build_cluster(part, metrics, **build)
            clusters = (takes,)
        label += sum(len(cluster.replicas) for cluster in clusters)
        facts = {"name": site.name, "tier": site.level, "llm": part.llm.name, "gpu": part.gpu.name, "replicas": site.replicas}
        served[place] = Served(clusters, takes, part.max_model_len, facts)
    policy = load_policy("site", spec.routing.name, spec.routing.options, where=spec.routing.where)
    return SiteFleet(spec, served, env, policy, Entrances(spec, scenario.seed), log)


def _build_split(scenario: Scenario, parts: Parts, metrics: Metrics, options: dict[str, Any]) -> Split:
    """The fleet twice, with what it runs and with the candidate of a release: ``Release`` says how many of each are in service."""
    wanted = scenario.rollout.candidate
    changed = {key: getattr(wanted.policy, key) for key in wanted.policy.model_fields_set}
    other = resolve(scenario.model_copy(update={"policy": scenario.policy.model_copy(update=changed)}))
    baseline = build_cluster(parts, metrics, **options)
    first_label = options.get("first_label", 0) + len(baseline.replicas)
    candidate = build_cluster(other, metrics, **{**options, "env": baseline.env, "first_label": first_label})
    for replica in candidate.replicas:
        replica.slow_down(wanted.step_time_factor, 0.0)
    return Split(baseline, candidate)


def _join_links(cluster: Cluster, parts: Parts) -> None:
    """Let requests cross the topology to their replica, and replicas share their GPUs, where the scenario says so."""
    scenario = parts.scenario
    ingress, tenancy = scenario.cluster.ingress, scenario.cluster.tenancy
    if ingress is not None:
        gpus = [placed[0] for placed in parts.placed]
        cluster.signals.delivery = Delivery(cluster, Network(parts.graph, cluster.env), ingress, gpus, stream(scenario.seed, "ingress"))
    if tenancy is not None:
        SharedGpus(cluster, tenancy, scenario.kv_cache.memory_fraction)


def _check_tenancy(scenario: Scenario) -> None:
    tenancy, fraction = scenario.cluster.tenancy, scenario.kv_cache.memory_fraction
    if tenancy is None:
        return
    if tenancy.tenants * fraction > 1:
        raise InputError("kv_cache.memory_fraction", f"{tenancy.tenants} tenants cannot each have {fraction:g} of a GPU", f"at most {1 / tenancy.tenants:g}")
    if scenario.faults is not None:
        raise InputError("faults", "cannot be combined with cluster.tenancy")


def resolve_fleet(scenario: Scenario) -> dict[str, Parts]:
    """Resolve each pool by its role, each site by its name, or the one kind of replica as ``replicas``.

    Raises InputError naming the binding limit.
    """
    if scenario.sites is not None:
        return {site.name: resolve(site_scenario(scenario, site)) for site in scenario.sites.places if site.replicas}
    if not scenario.cluster.pools:
        return {"replicas": resolve(scenario)}
    if scenario.policy.batching.max_in_flight != 1:
        raise InputError("policy.batching.max_in_flight", "with pools only 1 plan in flight can be simulated")
    pools = {role: pool_scenario(scenario, role) for role in ("prefill", "decode")}
    graph = LinkGraph(load_topology(scenario.cluster.topology, nodes=scenario.cluster.nodes))
    wanted = []
    for role, pool in pools.items():
        layout = build_layout(pool.cluster, pool.policy, load_llm(pool.llm))
        wanted.append(placement.Wanted(layout, load_gpu(pool.cluster.gpu), scenario.cluster.pool(role).most, "cluster.pools"))
    return {role: resolve(pool, (graph, placed)) for (role, pool), placed in zip(pools.items(), placement.place(graph, wanted))}


def build_cluster(
    parts: Parts,
    metrics: Metrics,
    *,
    replicas: int | None = None,
    env: Environment | None = None,
    first_label: int = 0,
    stepwise: bool = False,
    audit: float = 0.0,
    recording: Recording | None = None,
) -> Cluster:
    """Build identical replicas (``replicas`` overrides their number) behind a router, on ``env`` or a new environment.

    ``first_label`` numbers them in records. Raises InputError for a mistake in a policy.
    """
    scenario = parts.scenario
    policy = scenario.policy
    if policy.batching.max_in_flight > 2:
        raise InputError("policy.batching.max_in_flight", "at most 2 plans in flight can be simulated")
    drafting = scenario.speculation is not None
    if drafting and policy.batching.max_in_flight > 1:
        raise InputError("policy.batching.max_in_flight", "with speculation the next step needs this one's tokens", "1 at most")
    recorded = getattr(parts.latency, "drafts", None)  # the tokens that a measured run's drafts brought
    built = []
    for index in range(replicas or scenario.cluster.replicas):
        label = first_label + index
        auditor = stream(scenario.seed, f"audit.{label}") if audit else None
        built.append(
            Replica(
                index, new_scheduler(parts), parts.latency_of(index), metrics, label=label, stepwise=stepwise, audit=auditor, audit_share=audit, recording=recording,
                acceptance=scenario.speculation.acceptance if drafting and recorded is None else 0.0,
                draft_rng=drafting and (recorded or stream(scenario.seed, f"drafts.{label}")),
            )
        )  # fmt: skip
    if scenario.retention is not None and scenario.retention.entropy is not None:
        for replica in built:
            draws = seconds(scenario.retention.entropy, stream(scenario.seed, f"entropy.{replica.label}"))
            replica.entropy = one_by_one(draws)
    return Cluster(env or Environment(), built, build_routing(policy), stepwise=stepwise)


def new_scheduler(parts: Parts) -> Scheduler:
    """An empty scheduler for one replica. Raises InputError for a mistake in a policy."""
    cache, policy = parts.scenario.kv_cache, parts.scenario.policy
    pool = KVPool(parts.capacity.blocks, cache.block_tokens, prefix_caching=cache.prefix_caching, lower=build_tiers(cache, parts.gpu, parts.capacity.kv_bytes_per_token))
    return Scheduler(pool, policies_of(parts.scenario), max_in_flight=policy.batching.max_in_flight)


def crowded(parts: Parts) -> LatencyModel:
    """What a step of one replica costs while all others are busy too: those that share its GPUs slow it down."""
    tenancy = parts.scenario.cluster.tenancy
    if tenancy is None:
        return parts.latency
    return Crowded(parts.latency, *burden(tenancy, tenancy.tenants, parts.scenario.kv_cache.memory_fraction))


def new_metrics(scenario: Scenario, *, keep_rows: bool = False) -> Metrics:
    """Metrics for the scenario's classes and objectives."""
    names = [row.name for row in scenario.workload.classes] or ["default"]
    measure, faults = scenario.measure, scenario.faults
    return Metrics(
        names, scenario.slo.targets, warmup_s=measure.warmup_s, cooldown_s=measure.cooldown_s, keep_rows=keep_rows,
        timeline_s=faults.window_s if faults is not None else None,
    )  # fmt: skip


def compile_report(replicas: list[Replica]) -> dict[str, Any]:
    """How often replicas compiled plans again, for how long they stood, and the tokens that the plans are for now, on average."""
    compiled = [replica.latency for replica in replicas]
    row = {"stalled_s": sum(model.stalled_s for model in compiled)}
    for kind in ("decode", "mixed"):
        plans = [getattr(model, kind) for model in compiled]
        row[kind] = {"recompiles": sum(plan.recompiles for plan in plans), "plan_tokens": sum(plan.tokens for plan in plans) / len(plans)}
    return row


def tier_report(replicas: list[Replica]) -> list[dict[str, Any]]:
    """What the lower KV tiers of a fleet moved, for its summary."""
    pools = [replica.scheduler.pool for replica in replicas]
    first = pools[0].lower
    return [
        {
            "name": spec.name,
            "capacity_blocks": spec.blocks * len(pools),
            "used_blocks": sum(pool.lower.pages(tier) for pool in pools),
            "stored_blocks": sum(pool.lower.stored[tier] for pool in pools),
            "loaded_blocks": sum(pool.lower.loaded[tier] for pool in pools),
            "loaded_bytes": sum(pool.lower.loaded[tier] for pool in pools) * first.block_bytes,
        }
        for tier, spec in enumerate(first.specs)
    ]
