"""Distributions of lengths (tokens), think times (seconds) and counts, as a scenario writes them."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, AlsoAccepts, DataFile, Name, NotNegative, Positive

Low = Annotated[NotNegative | None, Field(description="draws below are set to this (tokens or seconds)")]
High = Annotated[Positive | None, Field(description="draws above are set to this (tokens or seconds)")]


def _ordered(low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        raise PydanticCustomError("range", "min is larger than max")


class Constant(BaseModel):
    """Always the same value."""

    model_config = STRICT
    dist: Literal["constant"] = "constant"
    value: NotNegative


class Uniform(BaseModel):
    """Equally likely between min and max, both included; or mean ± spread (a fraction of the mean)."""

    model_config = STRICT
    dist: Literal["uniform"]
    min: NotNegative | None = None
    max: Positive | None = None
    mean: Positive | None = None
    spread: Annotated[float, Field(strict=True, ge=0, le=1, description="half width as a fraction of the mean")] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Uniform:
        by_edges = self.min is not None and self.max is not None and self.mean is None and self.spread is None
        by_mean = self.min is None and self.max is None and self.mean is not None and self.spread is not None
        if not by_edges and not by_mean:
            raise PydanticCustomError("form", "needs either min and max, or mean and spread")
        _ordered(self.min, self.max)
        return self


class Normal(BaseModel):
    """Gaussian, clamped to min and max."""

    model_config = STRICT
    dist: Literal["normal"]
    mean: Positive
    std: NotNegative
    min: Low = None
    max: High = None

    @model_validator(mode="after")
    def _range(self) -> Normal:
        _ordered(self.min, self.max)
        return self


class Lognormal(BaseModel):
    """exp of a Gaussian: the median is its middle, sigma the standard deviation of the logarithm."""

    model_config = STRICT
    dist: Literal["lognormal"]
    median: Positive
    sigma: Annotated[float, Field(strict=True, ge=0, le=10)]
    min: Low = None
    max: High = None

    @model_validator(mode="after")
    def _range(self) -> Lognormal:
        _ordered(self.min, self.max)
        return self


class Exponential(BaseModel):
    """Exponential with the given mean, before clamping to min and max."""

    model_config = STRICT
    dist: Literal["exponential"]
    mean: Positive
    min: Low = None
    max: High = None

    @model_validator(mode="after")
    def _range(self) -> Exponential:
        _ordered(self.min, self.max)
        return self


class Gamma(BaseModel):
    """Gamma with the given mean and coefficient of variation (cv = standard deviation / mean; 1 is exponential)."""

    model_config = STRICT
    dist: Literal["gamma"]
    mean: Positive
    cv: Annotated[float, Field(strict=True, ge=1e-6, le=100)]
    min: Low = None
    max: High = None

    @model_validator(mode="after")
    def _range(self) -> Gamma:
        _ordered(self.min, self.max)
        return self


class Zipf(BaseModel):
    """Integers k between min and max with probability proportional to 1 / k^exponent."""

    model_config = STRICT
    dist: Literal["zipf"]
    exponent: Annotated[float, Field(strict=True, ge=0, le=20)]
    min: Annotated[int, Field(strict=True, ge=1, le=10**6)] = 1
    max: Annotated[int, Field(strict=True, ge=1, le=10**6)]

    @model_validator(mode="after")
    def _range(self) -> Zipf:
        _ordered(self.min, self.max)
        return self


class Empirical(BaseModel):
    """From data: equally spaced quantiles (linear between them), values drawn with replacement, or a file of values."""

    model_config = STRICT
    dist: Literal["empirical"]
    quantiles: Annotated[tuple[NotNegative, ...] | None, Field(min_length=2, description="at levels 0, 1/n … 1; not falling")] = None
    values: Annotated[tuple[NotNegative, ...] | None, Field(min_length=1)] = None
    file: Annotated[DataFile | None, Field(description="one number a line, or CSV with `column`; .gz accepted")] = None
    column: Name | None = None
    min: Low = None
    max: High = None

    @model_validator(mode="after")
    def _one_source(self) -> Empirical:
        if sum(source is not None for source in (self.quantiles, self.values, self.file)) != 1:
            raise PydanticCustomError("form", "needs exactly one of quantiles, values and file")
        if self.quantiles is not None and any(a > b for a, b in itertools.pairwise(self.quantiles)):
            raise PydanticCustomError("form", "quantiles must not fall")
        _ordered(self.min, self.max)
        return self


def _number_is_constant(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"dist": "constant", "value": value}
    if not isinstance(value, dict | BaseModel):
        raise PydanticCustomError("dist_type", "must be a number or a mapping with the key 'dist'")
    return value


Distribution = Annotated[
    Annotated[Constant | Uniform | Normal | Lognormal | Exponential | Gamma | Zipf | Empirical, Field(discriminator="dist")],
    BeforeValidator(_number_is_constant),
    AlsoAccepts({"type": "number"}),
]
