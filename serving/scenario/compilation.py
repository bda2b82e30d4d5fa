"""Steps by compiled plans: what they are made for, when they are made again, and what may be fused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, Count, NotNegative, PolicySpec, Positive, spec_field


class Compilation(BaseModel):
    """A plan for decode-only steps and one for steps with prompts, each for so many tokens."""

    model_config = STRICT
    policy: Annotated[spec_field("compilation.policy"), Field(description="when to compile again")] = PolicySpec(name="drift", where="compilation.policy")
    recompile_s: Annotated[tuple[NotNegative, NotNegative], Field(description="seconds, for the smallest plan and for one of max_batch_tokens")] = (0.012, 0.047)
    decode_tokens: Annotated[Count | None, Field(description="of the first plan for decodes; null: max_batch_seqs")] = None
    mixed_tokens: Annotated[Count | None, Field(description="of the first plan for steps with prompts; null: max_batch_tokens")] = None
    shared_cache_bytes: Annotated[Positive, Field(description="of the cache that all cores share")]
    shared_cache_bytes_per_s: Annotated[float, Field(strict=True, gt=0, le=1e15, allow_inf_nan=False)]
    cross_share: Annotated[NotNegative, Field(description="fuse where handing over costs less than this share of computing")] = 0.3

    @model_validator(mode="after")
    def _ordered(self) -> Compilation:
        if self.recompile_s[0] > self.recompile_s[1]:
            raise PydanticCustomError("range", "recompile_s must go from the smallest plan to the largest")
        return self
