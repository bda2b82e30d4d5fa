"""Integrity and attestation checks of requests and answers, as what they cost the host."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.distributions import Constant, Distribution
from serving.scenario.fields import STRICT, NotNegative
from serving.scenario.stages import INTEGRITY, FrontStage


class Integrity(BaseModel):
    """Each request is checked behind all stages, before the scheduler sees it; answers are sealed by the host of the replica, step by step.

    Nothing is checked by this: it is what checking costs. Sealing is taken to be exposed, as the tokens of a step leave sealed.
    """

    model_config = STRICT
    request_s: Annotated[Distribution, Field(description="seconds to check one request: its signature, the evidence of who asks and who answers")] = Constant(value=0.0)
    prompt_token_s: Annotated[NotNegative, Field(description="and for each token of its prompt: hashing")] = 0.0
    workers: Annotated[int, Field(strict=True, ge=1, le=100_000, description="requests checked at once")] = 1
    step_s: Annotated[NotNegative, Field(description="seconds of host time for each step")] = 0.0
    token_s: Annotated[NotNegative, Field(description="and for each sequence that gets a token in it: sealing")] = 0.0

    @model_validator(mode="after")
    def _costs(self) -> Integrity:
        if not (self.checks_requests or self.step_s or self.token_s):
            raise PydanticCustomError("form", "costs nothing: leave it out, or give request_s, prompt_token_s, step_s or token_s")
        return self

    @property
    def checks_requests(self) -> bool:
        """Whether requests wait for a check."""
        return self.request_s != Constant(value=0.0) or self.prompt_token_s > 0

    def stage(self) -> FrontStage:
        """The check of requests as the last stage before the scheduler."""
        return FrontStage(name=INTEGRITY, service_s=self.request_s, prompt_token_s=self.prompt_token_s, servers=self.workers)
