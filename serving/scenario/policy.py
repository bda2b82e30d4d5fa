"""The decisions of a scenario: its ``policy`` part."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, Count, CountOrZero, Name, PolicySpec, policy_file, spec_field, where_of


class Batching(BaseModel):
    """How a step is filled. Keys beyond those below are options of the batching policy."""

    model_config = STRICT
    name: Name = "chunked_prefill"
    max_batch_tokens: Annotated[Count, Field(description="tokens a step may process")] = 2048
    max_batch_seqs: Annotated[Count, Field(description="sequences that may run at once")] = 256
    max_chunk_tokens: Annotated[Count | None, Field(description="prompt tokens of one request in a step; null: the budget")] = None
    head_of_line: Annotated[
        Literal["block", "skip"], Field(description="block: nobody passes a request that does not fit; skip: others may")
    ] = "block"
    max_bypasses: Annotated[CountOrZero, Field(description="with skip: how often the head may be passed before it blocks")] = 64
    max_in_flight: Annotated[int, Field(strict=True, ge=1, le=64, description="plans that may be uncommitted")] = 1
    window: Annotated[spec_field("policy.batching.window"), Field(description="when admission opens")] = PolicySpec(
        name="none", where="policy.batching.window"
    )
    options: Annotated[dict[str, Any], Field(description="further options of the batching policy")] = {}
    where: Annotated[str, Field(exclude=True, json_schema_extra={"internal": True})] = "policy.batching"

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, dict):
            raise PydanticCustomError("spec_type", "must be a name or a mapping")
        known = [key for key in cls.model_fields if key not in ("options", "where")]
        options = {key: option for key, option in value.items() if key not in known}
        for key in options:
            # An option of the user's own policy may have any name, but one letter off ours is a slip of the pen.
            if difflib.get_close_matches(key, known, n=1, cutoff=0.88):
                raise PydanticCustomError("near_key", "unknown key '{key}'", {"key": key, "known": known})
        own = {key: part for key, part in value.items() if key in known}
        if isinstance(own.get("name"), str):
            own["name"] = policy_file(own["name"], info)
        return {**own, "options": options, "where": where_of("policy.batching", info)}

    @model_serializer(mode="wrap")
    def _flat(self, handler: Any) -> dict:
        fields = handler(self)
        options = fields.pop("options")
        return {**fields, **options}

    @property
    def spec(self) -> PolicySpec:
        """Name and options of the batching policy itself, without the limits above."""
        return PolicySpec(name=self.name, options=self.options, where=self.where)


class Policy(BaseModel):
    """The decisions, each by name, or as {name, options…}, or as path/file.py:Class."""

    model_config = STRICT
    ordering: Annotated[spec_field("policy.ordering"), Field(description="who is served first")] = PolicySpec(
        name="fcfs", where="policy.ordering"
    )
    batching: Batching = Batching()
    preemption: Annotated[spec_field("policy.preemption"), Field(description="who gives way")] = PolicySpec(
        name="latest", where="policy.preemption"
    )
    admission: Annotated[spec_field("policy.admission"), Field(description="who is let in")] = PolicySpec(
        name="fits", where="policy.admission"
    )
    reload: Annotated[spec_field("policy.reload"), Field(description="read KV pages back from a lower tier, or compute them again")] = PolicySpec(
        name="always", where="policy.reload"
    )
    sharding: Annotated[spec_field("policy.sharding"), Field(description="how the GPUs of a replica share weights and KV")] = PolicySpec(
        name="head", where="policy.sharding"
    )
    routing: Annotated[spec_field("policy.routing"), Field(description="which replica")] = PolicySpec(
        name="least_outstanding_tokens", where="policy.routing"
    )
