"""What arrives: the ``workload`` part of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.adapters import AdapterMix
from serving.scenario.arrivals import Arrivals, ClosedLoop, Piecewise, RatePerMinute
from serving.scenario.distributions import Constant, Distribution
from serving.scenario.fields import STRICT, Count, CountOrZero, DataFile, Fraction, Integer, Name, NotNegative, Positive, Switch
from serving.scenario.images import Images
from serving.scenario.reasoning import Reasoning

Lengths = Annotated[Distribution | None, Field(description="tokens per request")]
Cap = Annotated[
    Count | None,
    Field(description="the client's max_tokens; default: the largest drawn length, else what max_model_len leaves"),
]


class RequestClass(BaseModel):
    """A class of requests, drawn with probability share / sum of shares; its own lengths replace the workload's."""

    model_config = STRICT
    name: Name
    share: Annotated[NotNegative, Field(description="weight of the class")] = 1.0
    priority: Annotated[Integer, Field(description="smaller is more urgent")] = 0
    prompt_tokens: Lengths = None
    output_tokens: Lengths = None
    max_output_tokens: Cap = None


class Tenant(BaseModel):
    """A tenant, drawn with probability share / sum of shares."""

    model_config = STRICT
    name: Name
    share: NotNegative = 1.0


class Prefix(BaseModel):
    """Shared prompt beginnings, such as system prompts: ``tokens`` of each prompt are those of one of ``groups``."""

    model_config = STRICT
    groups: Annotated[int, Field(strict=True, ge=1, le=1_000_000, description="distinct prefixes")] = 1
    tokens: Annotated[Distribution, Field(description="length of a prefix, drawn once per group; part of prompt_tokens")]
    share: Annotated[Fraction, Field(description="fraction of requests that begin with one")] = 1.0
    zipf_exponent: Annotated[float, Field(strict=True, ge=0, le=20, description="0: all groups are equally popular")] = 0.0
    cache_suffix: Annotated[Switch, Field(description="blocks after the prefix enter the cache too, as in real engines")] = True


class Sessions(BaseModel):
    """Conversations: each turn's prompt is all that was said before plus ``new_tokens``; it waits for its predecessor."""

    model_config = STRICT
    turns: Annotated[Distribution, Field(description="requests in a session")]
    think_s: Annotated[Distribution, Field(description="seconds between an answer and the next turn")] = Constant(value=0.0)
    new_tokens: Annotated[Distribution | None, Field(description="tokens a turn adds after the first; default: prompt_tokens")] = None


class Queries(BaseModel):
    """What is asked: one of ``count`` questions, the k-th most popular with probability proportional to 1 / k^zipf_exponent."""

    model_config = STRICT
    count: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    zipf_exponent: Annotated[float, Field(strict=True, ge=0, le=20, description="0: all are equally popular")] = 1.0


class JointLengths(BaseModel):
    """Prompt and output lengths drawn together from a table of quantiles, which keeps their dependence."""

    model_config = STRICT
    table: DataFile


class Retry(BaseModel):
    """Clients that are refused come back: after backoff_s, then factor times as long, and never before the refusal says."""

    model_config = STRICT
    attempts: Annotated[Count, Field(description="further tries before a client gives up")] = 3
    backoff_s: Annotated[Positive, Field(description="before the first of them")] = 1.0
    factor: Annotated[float, Field(strict=True, ge=1, le=100, description="by which each pause is longer than the one before")] = 2.0
    jitter: Annotated[Fraction, Field(description="a pause is longer by a random part of itself, at most this")] = 0.1


class Trace(BaseModel):
    """A recorded workload. Slices are in the file's own time and rows; scaling comes after."""

    model_config = STRICT
    file: DataFile
    format: Annotated[Name | None, Field(description="default: recognised by content")] = None
    rate_scale: Annotated[Positive, Field(description="arrivals come this many times as fast; gaps inside sessions stay")] = 1.0
    time_scale: Annotated[Positive, Field(description="all times of the trace, session gaps included, are multiplied by this")] = 1.0
    prompt_scale: Annotated[Positive, Field(description="multiplies prompt lengths")] = 1.0
    output_scale: Annotated[Positive, Field(description="multiplies output lengths")] = 1.0
    start_s: Annotated[NotNegative, Field(description="skip what arrives earlier (seconds from the first row)")] = 0.0
    stop_s: Annotated[Positive | None, Field(description="end before this instant (seconds from the first row)")] = None
    first_row: Annotated[CountOrZero, Field(description="skip that many rows")] = 0
    limit: Annotated[Count | None, Field(description="at most that many rows")] = None
    loop: Annotated[int, Field(strict=True, ge=1, le=1_000_000, description="passes over the trace, one after the other")] = 1
    sort: Annotated[Switch, Field(description="sort rows by time instead of refusing disorder (reads all rows first)")] = False
    zero_rows: Annotated[Literal["skip", "error"], Field(description="rows without prompt or output tokens")] = "skip"
    turn_timing: Annotated[
        Literal["open", "after_answer", "recorded"] | None,
        Field(
            description="when a session's turn comes: open, at its recorded time; after_answer, its recorded gap after the answer "
            "before it; recorded, at its recorded time but not before that answer; default: as suits the format"
        ),
    ] = None

    @model_validator(mode="after")
    def _slice(self) -> Trace:
        if self.stop_s is not None and self.stop_s <= self.start_s:
            raise PydanticCustomError("range", "stop_s must be after start_s")
        return self


class Workload(BaseModel):
    """What arrives: a synthetic stream (arrivals, lengths), or a trace, which replaces both.

    A trace without arrival times takes those of ``arrivals``; a closed loop stays one, over the trace's requests.
    """

    model_config = STRICT
    requests: Annotated[Count | None, Field(description="stop after that many requests")] = None
    duration_s: Annotated[Positive | None, Field(description="no arrivals after this time (seconds)")] = None
    arrivals: Arrivals | None = None
    prompt_tokens: Lengths = None
    output_tokens: Lengths = None
    lengths: JointLengths | None = None
    max_output_tokens: Cap = None
    classes: tuple[RequestClass, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    prefix: Prefix | None = None
    adapters: Annotated[AdapterMix | None, Field(description="which requests use which adapter")] = None
    sessions: Sessions | None = None
    reasoning: Annotated[Reasoning | None, Field(description="hidden rounds before each answer")] = None
    trace: Trace | None = None
    images: Annotated[Images | None, Field(description="prompts that begin with an image")] = None
    queries: Annotated[Queries | None, Field(description="what stages with a memory go by")] = None
    retry: Annotated[Retry | None, Field(description="what refused clients do; null: they stay away")] = None

    @field_validator("trace", mode="before")
    @classmethod
    def _file_alone(cls, value: object) -> object:
        return {"file": value} if isinstance(value, str) else value

    @field_validator("classes", "tenants")
    @classmethod
    def _shares(cls, rows: tuple) -> tuple:
        names = [row.name for row in rows]
        if len(set(names)) < len(names):
            raise PydanticCustomError("form", "two entries have the same name")
        if rows and not sum(row.share for row in rows):
            raise PydanticCustomError("form", "all shares are zero")
        return rows

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        if self.reasoning is not None and (self.sessions is not None or self.trace is not None):
            raise PydanticCustomError("form", "reasoning cannot be combined with sessions or a trace")
        if self.reasoning is not None and self.images is not None:
            raise PydanticCustomError("form", "reasoning cannot be combined with images")
        if self.trace is not None:
            return self
        if self.arrivals is None:
            raise PydanticCustomError("form", "needs the key 'arrivals' (or 'trace')")
        if self.sessions is not None and _has_load_factor(self.arrivals):
            raise PydanticCustomError("form", "a load factor counts requests, arrivals start sessions: give rate_rps")
        self._has_lengths()
        ends = isinstance(self.arrivals, Piecewise | RatePerMinute) and not self.arrivals.repeat
        ends = ends and not (isinstance(self.arrivals, Piecewise) and self.arrivals.pieces[-1].until_s is None)
        if self.requests is None and (self.duration_s is None or self.arrivals.process == "all_at_once") and not ends:
            raise PydanticCustomError("form", "needs the key 'requests' (or 'duration_s'): it would never end")
        return self

    def _has_lengths(self) -> None:
        if self.lengths is not None:
            if self.prompt_tokens is not None or self.output_tokens is not None:
                raise PydanticCustomError("form", "'lengths' gives both: leave out prompt_tokens and output_tokens")
            return
        for key in ("prompt_tokens", "output_tokens"):
            everywhere = bool(self.classes) and all(getattr(row, key) is not None for row in self.classes)
            if getattr(self, key) is None and not everywhere:
                raise PydanticCustomError("form", "needs the key '{key}' (or 'lengths', or 'trace')", {"key": key})

    @property
    def closed_loop(self) -> ClosedLoop | None:
        """The closed loop that drives this workload, or None. With a trace, its users take the trace's requests in turn."""
        return self.arrivals if isinstance(self.arrivals, ClosedLoop) else None

    @property
    def uses_load_factor(self) -> bool:
        """Whether a rate is given as a fraction of what the fleet can serve."""
        return self.arrivals is not None and _has_load_factor(self.arrivals)


def _has_load_factor(arrivals: Arrivals) -> bool:
    parts = arrivals.pieces if isinstance(arrivals, Piecewise) else (arrivals,)
    return any(getattr(part, "load_factor", None) is not None for part in parts)
