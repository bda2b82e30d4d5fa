"""Requests that think before they answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from serving.scenario.distributions import Constant, Distribution
from serving.scenario.fields import STRICT, Fraction


class Reasoning(BaseModel):
    """Hidden rounds before each answer: every round continues all that was thought so far, and so finds its prefix cached.

    After a round its result is verified: with probability ``acceptance`` it is kept; else the branch is dropped, the context goes
    back to where the round began, and another branch is tried from there, up to ``branches`` in a row. Accepted or last branches are refined in the next round.
    """

    model_config = STRICT
    rounds: Annotated[Distribution, Field(description="refinement rounds")] = Constant(value=3)
    tokens: Annotated[Distribution, Field(description="reasoning tokens of a round; their largest value is the most a round may think")]
    verify_tokens: Annotated[Distribution, Field(description="prompt tokens that ask for the next round or branch")] = Constant(value=32)
    branches: Annotated[int, Field(strict=True, ge=1, le=64, description="tries of a round")] = 1
    acceptance: Annotated[Fraction, Field(description="probability that a branch is kept")] = 1.0
    share: Annotated[Fraction, Field(description="fraction of requests that reason")] = 1.0
