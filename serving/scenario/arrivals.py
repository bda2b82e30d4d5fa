"""Arrival processes, as a scenario writes them. Rates are requests per second (sessions per second with ``sessions``)."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.distributions import Constant, Distribution
from serving.scenario.fields import STRICT, AlsoAccepts, DataFile, NotNegative, Positive, Switch

Rate = Annotated[Positive | None, Field(description="mean arrivals per second")]
LoadFactor = Annotated[
    Annotated[float, Field(strict=True, gt=0, le=1000)] | None,
    Field(description="arrivals as a fraction of what this configuration serves when saturated; instead of rate_rps"),
]
Variation = Annotated[
    float, Field(strict=True, ge=1e-6, le=100, description="coefficient of variation of the gaps: 1 is Poisson, more is bursty")
]


def _one_rate(rate_rps: float | None, load_factor: float | None) -> None:
    if (rate_rps is None) == (load_factor is None):
        raise PydanticCustomError("form", "needs exactly one of rate_rps and load_factor")


class Poisson(BaseModel):
    """Independent exponential gaps, never cut."""

    model_config = STRICT
    process: Literal["poisson"]
    rate_rps: Rate = None
    load_factor: LoadFactor = None

    @model_validator(mode="after")
    def _rate(self) -> Poisson:
        _one_rate(self.rate_rps, self.load_factor)
        return self


class GammaGaps(BaseModel):
    """Gamma-distributed gaps of the given coefficient of variation."""

    model_config = STRICT
    process: Literal["gamma"]
    rate_rps: Rate = None
    load_factor: LoadFactor = None
    cv: Variation

    @model_validator(mode="after")
    def _rate(self) -> GammaGaps:
        _one_rate(self.rate_rps, self.load_factor)
        return self


class WeibullGaps(BaseModel):
    """Weibull-distributed gaps; shape below 1 is bursty, 1 is Poisson, above 1 is regular."""

    model_config = STRICT
    process: Literal["weibull"]
    rate_rps: Rate = None
    load_factor: LoadFactor = None
    shape: Annotated[float, Field(strict=True, ge=0.1, le=100)]

    @model_validator(mode="after")
    def _rate(self) -> WeibullGaps:
        _one_rate(self.rate_rps, self.load_factor)
        return self


class ConstantGaps(BaseModel):
    """One arrival every 1 / rate seconds, the first after one gap."""

    model_config = STRICT
    process: Literal["constant"]
    rate_rps: Rate = None
    load_factor: LoadFactor = None

    @model_validator(mode="after")
    def _rate(self) -> ConstantGaps:
        _one_rate(self.rate_rps, self.load_factor)
        return self


class RatePiece(BaseModel):
    """A constant rate up to ``until_s`` seconds from the start of the workload."""

    model_config = STRICT
    until_s: Annotated[Positive | None, Field(description="end of the piece; the last may leave it out")] = None
    rate_rps: Annotated[NotNegative | None, Field(description="mean arrivals per second; 0 is a pause")] = None
    load_factor: LoadFactor = None

    @model_validator(mode="after")
    def _rate(self) -> RatePiece:
        _one_rate(self.rate_rps, self.load_factor)
        return self


class Piecewise(BaseModel):
    """A rate that is constant between given instants; arrivals stop after the last ``until_s`` unless ``repeat``."""

    model_config = STRICT
    process: Literal["piecewise"]
    pieces: Annotated[tuple[RatePiece, ...], Field(min_length=1)]
    repeat: Switch = False
    cv: Variation = 1.0

    @model_validator(mode="after")
    def _ends(self) -> Piecewise:
        ends = [piece.until_s for piece in self.pieces]
        if any(end is None for end in ends[:-1]) or (self.repeat and ends[-1] is None):
            raise PydanticCustomError("form", "only the last piece may leave out until_s, and not with repeat")
        known = [end for end in ends if end is not None]
        if any(a >= b for a, b in itertools.pairwise(known)):
            raise PydanticCustomError("form", "until_s must rise from piece to piece")
        if all(piece.rate_rps == 0 for piece in self.pieces):
            raise PydanticCustomError("form", "the rate is zero throughout: nothing would ever arrive")
        return self


class Diurnal(BaseModel):
    """A daily wave: rate · (1 + amplitude · cos(2π (t - peak_s) / period_s))."""

    model_config = STRICT
    process: Literal["diurnal"]
    rate_rps: Rate = None
    load_factor: LoadFactor = None
    amplitude: Annotated[float, Field(strict=True, ge=0, le=1, description="swing as a fraction of the mean rate")]
    period_s: Positive = 86_400.0
    peak_s: NotNegative = 0.0
    cv: Variation = 1.0

    @model_validator(mode="after")
    def _rate(self) -> Diurnal:
        _one_rate(self.rate_rps, self.load_factor)
        return self


class RatePerMinute(BaseModel):
    """Arrivals counted minute by minute, from a list or from a table that tabulate wrote; ends with the table unless repeated."""

    model_config = STRICT
    process: Literal["rate_per_minute"]
    per_minute: Annotated[tuple[NotNegative, ...] | None, Field(min_length=1, description="arrivals in each minute")] = None
    table: Annotated[DataFile | None, Field(description="a table file with the key rate_per_minute")] = None
    rate_scale: Annotated[Positive, Field(description="multiplies the rate of every minute")] = 1.0
    repeat: Switch = False
    cv: Variation = 1.0

    @model_validator(mode="after")
    def _source(self) -> RatePerMinute:
        if (self.per_minute is None) == (self.table is None):
            raise PydanticCustomError("form", "needs exactly one of per_minute and table")
        if self.per_minute is not None and not any(self.per_minute):
            raise PydanticCustomError("form", "the rate is zero throughout: nothing would ever arrive")
        return self


class AllAtOnce(BaseModel):
    """Every request at one instant: what a saturated server sees."""

    model_config = STRICT
    process: Literal["all_at_once"]
    at_s: NotNegative = 0.0


class ClosedLoop(BaseModel):
    """A fixed number of users; each sends its next request a think time after the answer to its last."""

    model_config = STRICT
    process: Literal["closed_loop"]
    users: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    think_s: Annotated[Distribution, Field(description="seconds between an answer and the user's next request")] = Constant(value=0.0)
    ramp_s: Annotated[NotNegative, Field(description="users start evenly over this time; 0 is a burst at the start")] = 0.0
    retry_s: Annotated[Positive, Field(description="seconds a user waits after a refusal, if longer than its think time")] = 1.0


def _name_is_process(value: Any) -> Any:
    if isinstance(value, str):
        return {"process": value}
    if not isinstance(value, dict | BaseModel):
        raise PydanticCustomError("process_type", "must be a mapping with the key 'process'")
    return value


Arrivals = Annotated[
    Annotated[
        Poisson | GammaGaps | WeibullGaps | ConstantGaps | Piecewise | Diurnal | RatePerMinute | AllAtOnce | ClosedLoop,
        Field(discriminator="process"),
    ],
    BeforeValidator(_name_is_process),
    AlsoAccepts({"const": "all_at_once"}),
]
