"""A release: a candidate takes a growing share of the requests and replicas, is compared, and taken back when it is worse."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, Count, CountOrZero, Fraction, Name, Positive
from serving.scenario.policy import Policy


class Candidate(BaseModel):
    """What is to be released: other policies, or other software whose steps take ``step_time_factor`` times as long."""

    model_config = STRICT
    policy: Annotated[Policy, Field(description="decisions that differ; keys left out are the scenario's")] = Policy()
    step_time_factor: Annotated[Positive, Field(description="below 1 for faster steps")] = 1.0


class Gates(BaseModel):
    """By how much the candidate may be worse than the baseline over the same time."""

    model_config = STRICT
    ttft_p99_ratio: Positive = 1.1
    tpot_p99_ratio: Positive = 1.1
    attainment_drop: Annotated[Fraction, Field(description="of the share of requests that meet their objectives")] = 0.005
    failure_share: Annotated[Fraction, Field(description="of the candidate's requests that may fail or be refused")] = 0.001


class Stage(BaseModel):
    """``share`` of the requests goes to the candidate for ``for_s``; then ``check`` decides whether the release goes on.

    ``probe``: something was answered and nothing failed. ``smoke``: that, and the candidate attains the SLO. ``compare``: the gates hold.
    """

    model_config = STRICT
    name: Name
    share: Fraction
    for_s: Positive
    check: Literal["probe", "smoke", "compare"] = "compare"


class Verification(BaseModel):
    """The first stages of a release: a probe, a smoke test, a comparison with the baseline."""

    model_config = STRICT
    share: Fraction = 0.05
    probe_s: Positive = 30.0
    smoke_s: Positive = 300.0
    comparison_s: Positive = 900.0


class Rollout(BaseModel):
    """A release by stages: ``verification``, then ``stages``; after the last all requests (of ``tenants`` and ``classes``) go to the candidate.

    As many of the fleet's replicas run the candidate as its share of the requests asks for, and at least one, so that the load of a replica
    is about the same with either variant; they change over at once, and end what they hold. The release is rolled back when a stage's check fails, and at once when, of its last outcomes within ``burn_window_s``, the share that misses
    its objectives exceeds ``burn`` times the error budget (1 - slo.attainment) and the baseline's own share.
    """

    model_config = STRICT
    candidate: Candidate
    verification: Verification | None = None
    stages: tuple[Stage, ...] = ()
    tenants: Annotated[tuple[Name, ...], Field(description="only requests of these; empty: of all")] = ()
    classes: Annotated[tuple[Name, ...], Field(description="only requests of these; empty: of all")] = ()
    regions: Annotated[tuple[Name, ...], Field(description="only at these sites and those further out; empty: at all")] = ()
    gates: Gates = Gates()
    least: Annotated[Count, Field(description="outcomes of the candidate that a check or a roll-back needs")] = 50
    burn: Annotated[Positive, Field(description="times the error budget")] = 10.0
    burn_window_s: Positive = 60.0
    warmup_s: Annotated[CountOrZero | Positive, Field(description="the release begins then")] = 0

    @model_validator(mode="after")
    def _complete(self) -> Rollout:
        if not self.all_stages():
            raise PydanticCustomError("form", "needs the key 'stages' (or 'verification')")
        return self

    def all_stages(self) -> tuple[Stage, ...]:
        """The stages in order, those of the verification first."""
        check = self.verification
        if check is None:
            return self.stages
        first = (
            ("probe", check.probe_s, "probe"),
            ("smoke", check.smoke_s, "smoke"),
            ("baseline comparison", check.comparison_s, "compare"),
        )
        return tuple(Stage(name=name, share=check.share, for_s=for_s, check=kind) for name, for_s, kind in first) + self.stages
