"""How a replica's GPUs divide the work, beyond tensor parallelism; who shares a GPU; where requests enter the links."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, Name, NotNegative, Positive, Switch


class Experts(BaseModel):
    """How unequally tokens choose experts, and where experts are placed: what decides the load of the busiest rank."""

    model_config = STRICT
    zipf: Annotated[NotNegative, Field(description="exponent of expert popularity; 0: all alike")] = 0.0
    load: Annotated[tuple[NotNegative, ...], Field(description="measured tokens by expert, instead of zipf")] = ()
    placement: Annotated[
        Literal["drawn", "balanced"], Field(description="drawn: without regard to popularity; balanced: the most popular ones apart")
    ] = "drawn"

    @model_validator(mode="after")
    def _one_source(self) -> Experts:
        if self.load and self.zipf:
            raise PydanticCustomError("form", "give zipf or load, not both")
        if self.load and not sum(self.load):
            raise PydanticCustomError("range", "load must not be zero for all experts")
        return self


class Tenancy(BaseModel):
    """Replicas that share a GPU: what a switch of context costs, and how the GPU is divided among them.

    A switch costs alpha_s * tenants + beta_s * memory bandwidth + gamma_s * kernel residency + epsilon_s, the latter two as shares
    that the other tenants in service use. With ``context_cache`` the contexts of tenants that ran before are kept, which spares
    ``cached`` of the first three terms. ``share: time`` hands the whole GPU to one tenant after the other; ``share: partition`` gives
    each a fixed part of it, used or not.
    """

    model_config = STRICT
    tenants: Annotated[int, Field(strict=True, ge=2, le=64, description="replicas on each group of GPUs")]
    share: Literal["time", "partition"] = "time"
    alpha_s: NotNegative = 0.0
    beta_s: NotNegative = 0.0
    gamma_s: NotNegative = 0.0
    epsilon_s: NotNegative = 0.0
    switches_per_step: Annotated[Positive, Field(description="how often a step is interrupted for another tenant")] = 1.0
    context_cache: Switch = False
    cached: Annotated[float, Field(strict=True, ge=0, le=1, description="part of a switch that the context cache spares")] = 0.75


class Ingress(BaseModel):
    """Where requests enter the topology: each at one of ``at``, from where its tokens cross the links to the replica that serves it."""

    model_config = STRICT
    at: Annotated[tuple[Name, ...], Field(description="components of the topology; empty: the host memory of every node")] = ()
    bytes_per_token: Annotated[Positive, Field(description="that a prompt token brings with it")] = 4.0
