"""A scenario as frozen objects: the language model, the cluster, the policies, the workload, the objectives."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.adapters import Adapters
from serving.scenario.compilation import Compilation
from serving.scenario.dynamics import Autoscaling, Faults
from serving.scenario.fields import (
    STRICT,
    CatalogueName,
    Count,
    Fraction,
    Name,
    NotNegative,
    PolicySpec,
    Positive,
    Switch,
    spec_field,
)
from serving.scenario.integrity import Integrity
from serving.scenario.layer_reuse import LayerReuse
from serving.scenario.parallel import Experts, Ingress, Tenancy
from serving.scenario.planning import Plan
from serving.scenario.policy import Policy
from serving.scenario.retention import Retention
from serving.scenario.rollout import Rollout
from serving.scenario.sites import Sites
from serving.scenario.stages import FrontStage, check_stages
from serving.scenario.weights import Weights
from serving.scenario.workload import Workload

WeightDtype = Literal["auto", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4", "nvfp4"]
KvDtype = Literal["auto", "bf16", "fp16", "fp8", "int8", "int4"]


class Pool(BaseModel):
    """Replicas with one role; keys left out are the cluster's or the batching policy's."""

    model_config = STRICT
    role: Annotated[Literal["prefill", "decode"], Field(description="prefill: up to the first token; decode: all after it")]
    replicas: Annotated[int, Field(strict=True, ge=1, le=100_000)]
    gpu: CatalogueName | None = None
    tensor_parallel: Annotated[int | None, Field(strict=True, ge=1, le=1024)] = None
    max_batch_tokens: Annotated[Count | None, Field(description="as in policy.batching, for this pool")] = None
    max_batch_seqs: Annotated[Count | None, Field(description="as in policy.batching, for this pool")] = None
    autoscaling: Annotated[Autoscaling | None, Field(description="of this pool, by itself")] = None

    @model_validator(mode="after")
    def _bounds(self) -> Pool:
        if self.autoscaling is not None:
            self.autoscaling.check(self.replicas)
        return self

    @property
    def most(self) -> int:
        """Replicas that there may ever be."""
        return self.replicas if self.autoscaling is None else self.autoscaling.maximum


class Cluster(BaseModel):
    """The hardware: identical replicas of the language model.

    Each runs on tensor_parallel * pipeline_parallel GPUs, times sequence_parallel, or with whole experts on
    expert_parallel * pipeline_parallel GPUs; policy.sharding says what a group of tensor_parallel GPUs does with them.
    With ``pools`` prompts and answers are computed by different replicas, and KV pages cross the links of ``topology`` between them.
    """

    model_config = STRICT
    gpu: Annotated[CatalogueName, Field(description="a catalogue name (twinserve list gpus) or a path to a file of the same form")]
    replicas: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 1
    tensor_parallel: Annotated[int, Field(strict=True, ge=1, le=1024, description="GPUs that share each layer")] = 1
    pipeline_parallel: Annotated[int, Field(strict=True, ge=1, le=1024, description="stages of layers")] = 1
    expert_parallel: Annotated[
        int, Field(strict=True, ge=1, le=1024, description="GPUs that whole experts are spread over; a multiple of tensor_parallel attends in groups")
    ] = 1
    sequence_parallel: Annotated[
        int, Field(strict=True, ge=1, le=1024, description="groups that share every sequence: prompts by ring attention, KV by tokens")
    ] = 1
    experts: Annotated[Experts, Field(description="how unequally experts are used")] = Experts()
    tenancy: Annotated[Tenancy | None, Field(description="replicas that share GPUs")] = None
    ingress: Annotated[Ingress | None, Field(description="prompts cross the topology's links to their replica")] = None
    weight_dtype: Annotated[WeightDtype, Field(description="auto: as the catalogue says")] = "auto"
    pools: Annotated[tuple[Pool, ...], Field(description="one of each role, instead of replicas")] = ()
    first_token: Annotated[
        Literal["prefill", "decode"], Field(description="the pool that sends it to the client: at once, or when the KV pages are on the other side")
    ] = "prefill"
    topology: Annotated[CatalogueName | None, Field(description="a catalogue name (twinserve list topologies) or a path")] = None
    autoscaling: Autoscaling | None = None
    nodes: Annotated[int | None, Field(strict=True, ge=1, le=100_000, description="copies of the topology's node; null: as it says")] = None

    @model_validator(mode="after")
    def _links(self) -> Cluster:
        if self.ingress is not None and (self.topology is None or self.pools):
            raise PydanticCustomError("form", "ingress needs the key 'topology', and no pools")
        if self.nodes is not None and self.topology is None:
            raise PydanticCustomError("form", "nodes needs the key 'topology'")
        if self.tenancy is not None and (self.pools or self.autoscaling is not None):
            raise PydanticCustomError("form", "tenancy cannot be combined with pools or autoscaling")
        if self.tenancy is not None and self.replicas % self.tenancy.tenants:
            raise PydanticCustomError("range", "replicas must be a multiple of tenancy.tenants")
        return self

    @model_validator(mode="after")
    def _pools(self) -> Cluster:
        scaling = self.autoscaling
        if scaling is not None:
            scaling.check(self.replicas)
        if not self.pools:
            if self.first_token != "prefill":
                raise PydanticCustomError("form", "first_token needs the key 'pools'")
            return self
        if scaling is not None:
            raise PydanticCustomError("form", "with pools, give autoscaling in each pool")
        if sorted(pool.role for pool in self.pools) != ["decode", "prefill"]:
            raise PydanticCustomError("form", "pools needs one entry with role prefill and one with role decode")
        if "replicas" in self.model_fields_set and self.replicas != 1:
            raise PydanticCustomError("form", "with pools, give replicas in each pool")
        if self.topology is None:
            raise PydanticCustomError("form", "pools need the key 'topology': KV pages cross its links")
        return self

    def pool(self, role: str) -> Pool:
        """Return the pool with ``role``."""
        return next(pool for pool in self.pools if pool.role == role)


class KvTier(BaseModel):
    """Memory below the GPU's that keeps evicted KV pages: one GPU's share of it."""

    model_config = STRICT
    name: Name
    gib: Annotated[Positive, Field(description="GiB for each GPU")]
    read_bytes_per_s: Annotated[Positive | None, Field(description="to the GPU; null: what the GPU's host link reaches")] = None
    write_bytes_per_s: Annotated[Positive | None, Field(description="from the GPU; null: as read")] = None
    latency_s: Annotated[NotNegative | None, Field(description="before the first byte; null: the host link's")] = None


class KvCache(BaseModel):
    """The KV cache of a replica."""

    model_config = STRICT
    block_tokens: Annotated[int, Field(strict=True, ge=1, le=65_536, description="tokens per KV block")] = 16
    memory_fraction: Annotated[
        float, Field(strict=True, gt=0, le=1, description="part of GPU memory for weights, activations and KV together")
    ] = 0.90
    prefix_caching: Switch = True
    blocks: Annotated[Count | None, Field(description="blocks per replica, the reserved one included; overrides the memory model")] = None
    tiers: Annotated[tuple[KvTier, ...], Field(description="where evicted pages go, nearest first")] = ()
    eviction: Annotated[spec_field("kv_cache.eviction"), Field(description="which page leaves a tier that is full")] = PolicySpec(
        name="lru", where="kv_cache.eviction"
    )
    dtype: Annotated[KvDtype, Field(description="of the KV entries; auto: as the weights compute")] = "auto"
    layer_reuse: Annotated[LayerReuse | None, Field(description="layers that read the KV entries of an earlier, similar one")] = None


class Targets(NamedTuple):
    """Objectives of one class in seconds; infinite where there is none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf


class Objectives(BaseModel):
    """Latency objectives in milliseconds; a key left out is no objective."""

    model_config = STRICT
    ttft_ms: Annotated[Positive | None, Field(description="time to first token")] = None
    tpot_ms: Annotated[Positive | None, Field(description="time per output token after the first")] = None
    e2e_ms: Annotated[Positive | None, Field(description="arrival to last token")] = None


class Slo(BaseModel):
    """Service level objectives: a class takes from ``default`` what it does not state itself."""

    model_config = STRICT
    attainment: Annotated[Fraction, Field(description="fraction of requests that must meet all their objectives")] = 0.99
    default: Objectives = Objectives()
    classes: dict[str, Objectives] = {}

    def targets(self, class_name: str) -> Targets:
        """Return the objectives of a class, in seconds."""
        own = self.classes.get(class_name, self.default)
        values = ((getattr(own, key) or getattr(self.default, key)) for key in ("ttft_ms", "tpot_ms", "e2e_ms"))
        return Targets(*(math.inf if value is None else value / 1000.0 for value in values))


class Measure(BaseModel):
    """Which requests are measured: those that arrive between the warm-up and the cool-down."""

    model_config = STRICT
    warmup_s: Annotated[NotNegative, Field(description="requests that arrive before this are left out (seconds)")] = 0.0
    cooldown_s: Annotated[NotNegative, Field(description="requests that arrive in the last seconds of the run are left out")] = 0.0


class Speculation(BaseModel):
    """Draft tokens that decodes verify: made by a language model of its own, or for a fraction of a step each."""

    model_config = STRICT
    policy: Annotated[spec_field("speculation.policy"), Field(description="how many drafts")] = PolicySpec(name="fixed", where="speculation.policy")
    acceptance: Annotated[Fraction, Field(description="probability that a draft token is accepted")]
    draft_llm: CatalogueName | None = None
    proposer: Annotated[
        spec_field("speculation.proposer") | None,
        Field(description="what drafts in the engine: prompt_lookup, layers or network; null: network with a draft_llm, else prompt_lookup"),
    ] = None
    draft_step_fraction: Annotated[NotNegative, Field(description="without draft_llm: a draft's share of a plain step's time")] = 0.0


class Scenario(BaseModel):
    """One experiment: everything that decides its outcome."""

    model_config = STRICT
    version: Literal[1] = 1
    name: Annotated[Name, Field(description="default: the file's name")]
    description: str = ""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1, description="of every random stream")] = 0
    llm: Annotated[CatalogueName, Field(description="a catalogue name (twinserve list llms) or a path to a file of the same form")]
    max_model_len: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=10**9)] | None,
        Field(description="longest prompt and output together, in tokens; null: as the catalogue says"),
    ] = None
    cluster: Cluster
    latency: Annotated[spec_field("latency"), Field(description="what a step costs")] = PolicySpec(name="roofline", where="latency")
    kv_cache: KvCache = KvCache()
    policy: Policy = Policy()
    workload: Workload
    slo: Slo = Slo()
    speculation: Annotated[Speculation | None, Field(description="draft tokens")] = None
    faults: Annotated[Faults | None, Field(description="what breaks while it serves")] = None
    weights: Annotated[Weights | None, Field(description="how the trunk's weights are kept and used")] = None
    retention: Annotated[Retention | None, Field(description="pages that running sequences give back")] = None
    adapters: Annotated[Adapters | None, Field(description="slots for adapters (LoRA) on every replica")] = None
    rollout: Annotated[Rollout | None, Field(description="a release by stages, while it serves")] = None
    sites: Annotated[Sites | None, Field(description="edge, regional and central pools, instead of cluster.replicas")] = None
    stages: Annotated[tuple[FrontStage, ...], Field(description="what requests pass before the model, in order")] = ()
    integrity: Annotated[Integrity | None, Field(description="what checking requests and sealing answers costs")] = None
    compilation: Annotated[Compilation | None, Field(description="steps run by compiled plans")] = None
    measure: Measure = Measure()
    plan: Annotated[Plan | None, Field(description="what `twinserve plan` may choose from")] = None

    @model_validator(mode="after")
    def _release(self) -> Scenario:
        if self.rollout is not None and (self.cluster.pools or self.cluster.autoscaling or self.cluster.tenancy or self.cluster.topology or self.faults):
            raise PydanticCustomError("form", "rollout cannot be combined with pools, autoscaling, tenancy, a topology or faults")
        return self

    @model_validator(mode="after")
    def _front(self) -> Scenario:
        """Sites and stages."""
        workload = self.workload
        classes = () if workload.trace is not None else tuple(row.name for row in workload.classes) or ("default",)
        check_stages(self.stages, classes, None if workload.queries is None else workload.queries.count, workload.images is not None)
        if (self.sites is not None or self.front) and workload.uses_load_factor:
            raise PydanticCustomError("form", "with sites, stages or checks of requests there is no one capacity to be a fraction of: give workload.arrivals.rate_rps")
        regions = () if self.rollout is None else self.rollout.regions
        known = [] if self.sites is None else [site.name for site in self.sites.places]
        for index, name in enumerate(regions):
            if self.sites is None or name not in known:
                raise PydanticCustomError("at", "there is no site '{name}'", {"at": ("rollout", "regions", index), "name": name, "known": known})
        if self.front and self.plan is not None:
            raise PydanticCustomError("form", "stages and checks of requests cannot be combined with a plan")
        if self.plan is not None and any(pool.autoscaling is not None for pool in self.cluster.pools):
            raise PydanticCustomError("form", "pools that scale cannot be combined with a plan, which chooses how many replicas there are")
        if self.sites is None:
            return self
        cluster = self.cluster
        if cluster.pools or cluster.autoscaling or cluster.tenancy or cluster.topology or self.faults or self.plan or self.adapters:
            raise PydanticCustomError("form", "sites cannot be combined with pools, autoscaling, tenancy, a topology, faults, adapters or a plan")
        if "replicas" in cluster.model_fields_set and cluster.replicas != 1:
            raise PydanticCustomError("form", "with sites, give replicas at each site")
        return self

    @field_validator("version", mode="before")
    @classmethod
    def _version(cls, value: Any) -> Any:
        if isinstance(value, bool) or value != 1:
            raise PydanticCustomError("version", "only version 1 is known")
        return value

    @model_validator(mode="after")
    def _slo_classes(self) -> Scenario:
        known = [row.name for row in self.workload.classes]
        for name in self.slo.classes:
            # A trace may bring classes of its own.
            if name not in known and self.workload.trace is None:
                raise PydanticCustomError("slo_class", "slo.classes: no class '{key}' in workload.classes", {"key": name, "known": known})
        return self

    @model_validator(mode="after")
    def _adapter_slots(self) -> Scenario:
        if self.adapters is None and self.workload.adapters is not None:
            raise PydanticCustomError("form", "workload.adapters needs the key 'adapters': slots to run them in")
        if self.adapters is not None and self.cluster.pools:
            raise PydanticCustomError("form", "adapters cannot be combined with cluster.pools")
        return self

    @model_validator(mode="after")
    def _retained_pages(self) -> Scenario:
        if self.retention is None:
            return self
        if self.kv_cache.prefix_caching:
            raise PydanticCustomError("form", "retention needs kv_cache.prefix_caching: false: no page may leave the middle of a shared prefix")
        if self.cluster.pools or self.policy.batching.max_in_flight > 1:
            raise PydanticCustomError("form", "retention cannot be combined with cluster.pools or with policy.batching.max_in_flight above 1")
        return self

    @property
    def front(self) -> tuple[FrontStage, ...]:
        """What requests pass before the scheduler sees them: the stages, and the check of the request as it is then."""
        return (*self.stages, self.integrity.stage()) if self.integrity is not None and self.integrity.checks_requests else self.stages

    def resolved(self) -> dict[str, Any]:
        """Return the scenario with every default written out, as plain values: loading it gives an equal scenario."""
        return self.model_dump(mode="json", exclude_none=True)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a scenario file, for editors and for ``twinserve schema``."""
    schema = Scenario.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "twinserve scenario"
    schema["required"] = [key for key in schema["required"] if key != "name"]
    batching = schema["$defs"]["Batching"]
    for internal in ("where", "options"):
        batching["properties"].pop(internal)
    batching["additionalProperties"] = True
    schema["$defs"].pop("PolicySpec", None)
    return schema
