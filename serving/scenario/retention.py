"""Long contexts: which pages running sequences keep, and what attention looks like where a policy watches it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from serving.scenario.distributions import Distribution
from serving.scenario.fields import STRICT, PolicySpec, spec_field


class Retention(BaseModel):
    """The policy, and for the simulator the entropy of a decode's attention over its maximum (drawn for each decode of each step)."""

    model_config = STRICT
    policy: Annotated[spec_field("retention.policy"), Field(description="which pages are kept")] = PolicySpec(
        name="window", where="retention.policy"
    )
    entropy: Annotated[Distribution | None, Field(description="0 to 1; null: it is never low")] = None
