"""Adapters (LoRA): the slots of a replica, and which requests use which."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, Count, CountOrZero, Fraction, Name, PolicySpec, Positive, spec_field


class Adapters(BaseModel):
    """Slots for adapters beside the trunk of every replica."""

    model_config = STRICT
    slots: Annotated[int, Field(strict=True, ge=1, le=10_000, description="adapters that a replica holds at once")] = 4
    rank: Annotated[Count, Field(description="of the adapter matrices: decides bytes and work")] = 16
    policy: Annotated[spec_field("adapters.policy"), Field(description="which idle adapter makes room")] = PolicySpec(
        name="lru", where="adapters.policy"
    )
    max_bypasses: Annotated[CountOrZero, Field(description="how often a request that waits for a slot may be passed")] = 64
    load_bytes_per_s: Annotated[Positive | None, Field(description="to each GPU; null: what its host link reaches")] = None


class AdapterMix(BaseModel):
    """Which adapter a request asks for: with probability ``share`` one of ``names`` (or of ``count`` made-up ones), by popularity."""

    model_config = STRICT
    names: Annotated[tuple[Name, ...], Field(description="most popular first")] = ()
    count: Annotated[Count | None, Field(description="instead of names: a1, a2, ...")] = None
    share: Annotated[Fraction, Field(description="fraction of requests (or sessions) that use one")] = 1.0
    zipf_exponent: Annotated[float, Field(strict=True, ge=0, le=20, description="0: all are equally popular")] = 0.0

    @model_validator(mode="after")
    def _one_source(self) -> AdapterMix:
        if bool(self.names) == (self.count is not None):
            raise PydanticCustomError("form", "give names or count, one of them")
        if len(set(self.names)) < len(self.names):
            raise PydanticCustomError("form", "two adapters have the same name")
        return self

    def all_names(self) -> tuple[str, ...]:
        """The names, most popular first."""
        return self.names or tuple(f"a{index + 1}" for index in range(self.count or 0))
