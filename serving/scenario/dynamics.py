"""A fleet that changes while it serves: autoscaling with cold starts, and faults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, CountOrZero, Fraction, NotNegative, PolicySpec, Positive, spec_field


class ColdStart(BaseModel):
    """Seconds that a new replica spends in each stage before it takes requests."""

    model_config = STRICT
    schedule_s: Annotated[NotNegative, Field(description="until a machine is there and the process starts")] = 10.0
    weights_bytes_per_s: Annotated[Positive | None, Field(description="into each GPU; null: the GPU's host link")] = None
    compile_s: NotNegative = 20.0
    graph_capture_s: NotNegative = 15.0
    warmup_s: Annotated[NotNegative, Field(description="warm-up requests")] = 2.0


class Autoscaling(BaseModel):
    """Replicas come and go between ``minimum`` and ``maximum``; cluster.replicas, or those of the pool, are there at the start.

    A prefill pool sees objectives of the first token missed, a decode pool those of the tokens after it and of the whole.
    """

    model_config = STRICT
    policy: Annotated[spec_field("cluster.autoscaling.policy"), Field(description="how many replicas there should be")] = PolicySpec(
        name="utilisation", where="cluster.autoscaling.policy"
    )
    minimum: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    maximum: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    interval_s: Annotated[float, Field(strict=True, ge=1e-3, le=1e12, allow_inf_nan=False, description="between two decisions")] = 15.0
    cold_start: ColdStart = ColdStart()

    @model_validator(mode="after")
    def _bounds(self) -> Autoscaling:
        if self.minimum > self.maximum:
            raise PydanticCustomError("range", "minimum is larger than maximum")
        return self

    def check(self, replicas: int) -> None:
        """Raise pydantic's error unless so many may be there at the start."""
        if not self.minimum <= replicas <= self.maximum:
            raise PydanticCustomError("range", "replicas must lie between autoscaling.minimum and autoscaling.maximum")


class Fault(BaseModel):
    """Something that breaks: at ``at_s``, or again and again with exponential gaps of mean ``every_s``.

    ``replica_loss``: the replica is gone with all it held and is back, empty, after ``for_s``. ``slow_gpu``: its steps take
    ``factor`` times as long for ``for_s``. ``host_stall``: the step being executed ends ``for_s`` later. ``slow_link``: links whose
    name starts with ``link`` move at ``factor`` of their rate for ``for_s`` (fleets with pools or an ingress). Replicas are counted
    from 0, with pools those of prefill first.
    """

    model_config = STRICT
    kind: Literal["replica_loss", "slow_gpu", "host_stall", "slow_link"]
    at_s: NotNegative | None = None
    every_s: Positive | None = None
    for_s: Positive
    replica: Annotated[CountOrZero | None, Field(description="null: one at random")] = None
    factor: Annotated[Positive | None, Field(description="slow_gpu: above 1; slow_link: below 1")] = None
    link: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Fault:
        if (self.at_s is None) == (self.every_s is None):
            raise PydanticCustomError("form", "needs exactly one of at_s and every_s")
        uses = {"slow_gpu": ("replica", "factor"), "slow_link": ("factor", "link")}.get(self.kind, ("replica",))
        for key in ("replica", "factor", "link"):
            if getattr(self, key) is not None and key not in uses:
                raise PydanticCustomError("form", "'{key}' means nothing to a {kind}", {"key": key, "kind": self.kind})
            if getattr(self, key) is None and key in uses and key != "replica":
                raise PydanticCustomError("form", "needs the key '{key}'", {"key": key})
        if self.kind == "host_stall" and self.every_s is not None and self.every_s <= self.for_s:
            raise PydanticCustomError("range", "every_s must exceed for_s: a host that stalls all the time ends no step")
        if (self.kind == "slow_gpu" and self.factor < 1) or (self.kind == "slow_link" and self.factor > 1):
            raise PydanticCustomError("range", "factor must be at least 1 for a slow_gpu and at most 1 for a slow_link")
        return self


class Faults(BaseModel):
    """What breaks, and what becomes of the requests that a lost replica held."""

    model_config = STRICT
    events: Annotated[tuple[Fault, ...], Field(min_length=1)]
    lost_requests: Annotated[Literal["retry", "fail"], Field(description="retry: routed again, from the start")] = "retry"
    retries: Annotated[CountOrZero, Field(description="times a request is routed again before it fails")] = 3
    window_s: Annotated[Positive, Field(description="arrivals are judged against the SLO in windows of this length")] = 10.0
    cold_start: Annotated[ColdStart | None, Field(description="of a lost replica's new process; null: as for autoscaling")] = None
    recovered: Annotated[Fraction | None, Field(description="share of a window that must meet the SLO; null: slo.attainment")] = None
