"""What ``twinserve plan`` may choose from: the ``plan`` part of a scenario."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, AlsoAccepts, CatalogueName, Count, NotNegative, Positive

Choices = Field(min_length=1)


def _name_alone(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class PricedGpu(BaseModel):
    """A kind of GPU, at the catalogue's price or another."""

    model_config = STRICT
    name: CatalogueName
    price_usd_per_h: Annotated[Positive | None, Field(description="of one GPU; null: the catalogue's")] = None


GpuChoice = Annotated[PricedGpu, BeforeValidator(_name_alone), AlsoAccepts({"type": "string"})]


class Candidates(BaseModel):
    """Every combination of these is a candidate; what is left out stays as the scenario has it."""

    model_config = STRICT
    gpus: Annotated[tuple[GpuChoice, ...] | None, Choices] = None
    llms: Annotated[tuple[CatalogueName, ...] | None, Choices] = None
    tensor_parallel: Annotated[tuple[Annotated[int, Field(strict=True, ge=1, le=1024)], ...] | None, Choices] = None
    weight_dtype: Annotated[tuple[str, ...] | None, Choices] = None
    kv_dtype: Annotated[tuple[str, ...] | None, Choices] = None
    max_batch_tokens: Annotated[tuple[int, ...] | None, Choices] = None
    max_batch_seqs: Annotated[tuple[int, ...] | None, Choices] = None
    max_chunk_tokens: Annotated[tuple[int | None, ...] | None, Choices] = None
    block_tokens: Annotated[tuple[int, ...] | None, Choices] = None
    memory_fraction: Annotated[tuple[float, ...] | None, Choices] = None
    other: Annotated[dict[str, Annotated[tuple[Any, ...], Choices]], Field(description="any further dotted path of the scenario, with its values")] = {}


class ReplicaRange(BaseModel):
    """How many replicas a fleet may have."""

    model_config = STRICT
    min: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 1
    max: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 64

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaRange:
        if self.min > self.max:
            raise PydanticCustomError("range", "min is larger than max")
        return self


class Replications(BaseModel):
    """Independent runs, by seed, until the interval on the attainment decides."""

    model_config = STRICT
    min: Annotated[int, Field(strict=True, ge=1, le=1000)] = 2
    max: Annotated[int, Field(strict=True, ge=1, le=1000)] = 8

    @model_validator(mode="after")
    def _ordered(self) -> Replications:
        if self.min > self.max:
            raise PydanticCustomError("range", "min is larger than max")
        return self


class Search(BaseModel):
    """Exhaustive considers every candidate; optuna draws ``trials`` of them by TPE, for spaces too large for that."""

    model_config = STRICT
    method: Literal["exhaustive", "optuna"] = "exhaustive"
    trials: Annotated[Count, Field(description="with optuna: candidates to try")] = 200


SearchChoice = Annotated[
    Search, BeforeValidator(lambda value: {"method": value} if isinstance(value, str) else value), AlsoAccepts({"type": "string"})
]


class Bound(BaseModel):
    """Both ends included."""

    model_config = STRICT
    min: NotNegative | None = None
    max: NotNegative | None = None


Axis = Literal["quality", "output_tokens_per_s", "e2e_p99_s", "ttft_p99_s", "tpot_p99_s", "cost_per_hour_usd"]


class Select(BaseModel):
    """The operating point to choose: the best of one figure where others are bounded."""

    model_config = STRICT
    best: Axis
    bounds: Annotated[dict[Axis, Bound], Field(description="allowed ends of the other figures")] = {}


class Plan(BaseModel):
    """Candidates, what a fleet may cost, and how sure the answer must be."""

    model_config = STRICT
    candidates: Candidates
    replicas: ReplicaRange = ReplicaRange()
    confidence: Annotated[float, Field(strict=True, ge=0.5, lt=1, description="one-sided, that the objectives are attained")] = 0.95
    replications: Replications = Replications()
    budget_usd_per_h: Positive | None = None
    objective: Annotated[
        Literal["cost_per_hour_usd", "usd_per_million_output_tokens"], Field(description="what the ranking is by; the other breaks ties")
    ] = "cost_per_hour_usd"
    top: Annotated[int, Field(strict=True, ge=1, le=1000, description="cheapest fleets to work out in full")] = 5
    search: SearchChoice = Search()
    capacity_error: Annotated[
        float, Field(strict=True, ge=0, lt=1, description="how far off the simulated capacity may be, as a fraction: your calibration says")
    ] = 0.1
    quality: Annotated[
        dict[str, NotNegative], Field(description="a score of the answers by weight_dtype, or by 'llm weight_dtype'; larger is better")
    ] = {}
    select: Select | None = None
