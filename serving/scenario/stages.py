"""Stages before the model: features, embedding, retrieval, rerank, each a station with servers and a queue of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.distributions import Distribution
from serving.scenario.fields import STRICT, Fraction, Name, NotNegative, PolicySpec, Positive, Switch, spec_field

MOST_FOUND = 20_000_000  # documents over all queries: a table of them is kept
NETWORK = "network"  # in records: the way to the site that serves, which is no stage
INTEGRITY = "integrity"  # in records: the check of a request that the key integrity asks for


class Kept(BaseModel):
    """A cache: least recently used entries leave when it is full, old ones when their time is up."""

    model_config = STRICT
    capacity_bytes: Positive
    entry_bytes: Annotated[Positive, Field(description="of one entry")]
    ttl_s: Annotated[Positive | None, Field(description="time to live, seconds; null: kept until there is no room")] = None

    @model_validator(mode="after")
    def _room(self) -> Kept:
        if self.capacity_bytes < self.entry_bytes:
            raise PydanticCustomError(
                "at", "is less than one entry of {entry} bytes", {"at": ("capacity_bytes",), "entry": f"{self.entry_bytes:g}"}
            )
        return self


class KeyedCache(Kept):
    """Outcomes of a stage by what was asked (``workload.queries``), or by image: a hit is served without a server."""

    lookup_s: Annotated[Distribution, Field(description="seconds of a look-up, whether it finds anything or not")]
    branch: Annotated[spec_field("stages.cache.branch"), Field(description="whether to look at all")] = PolicySpec(
        name="always", where="stages.cache.branch"
    )


class Retrieval(BaseModel):
    """Retrieval with three tiers of memory. ``service_s`` of the stage is the search; then the documents found are fetched, side by side.

    ``answers``: whoever asks the same gets the answer given before, and skips the search and the model. ``results``: the documents found, which skips
    the search. ``texts``: the documents themselves, which saves fetching them. Tiers left out do not exist.
    """

    model_config = STRICT
    documents: Annotated[int, Field(strict=True, ge=1, le=10_000_000, description="documents that there are")]
    per_query: Annotated[int, Field(strict=True, ge=1, le=100, description="documents that a query finds")] = 5
    zipf_exponent: Annotated[float, Field(strict=True, ge=0, le=20, description="0: all documents are equally popular")] = 0.0
    fetch_s: Annotated[Distribution, Field(description="seconds to fetch one document")]
    lookup_s: Annotated[NotNegative, Field(description="seconds to look at all tiers")] = 0.0
    answers: Kept | None = None
    results: Kept | None = None
    texts: Kept | None = None


class FrontStage(BaseModel):
    """One station: requests are served first come, first served, by ``servers`` alike. Where users enter at sites, each site has its own.

    What a stage adds to the prompt (retrieved passages) comes after it, is new to the prefix cache, and counts as prompt tokens.
    """

    model_config = STRICT
    name: Name
    service_s: Annotated[Distribution, Field(description="seconds that one request takes")]
    prompt_token_s: Annotated[NotNegative, Field(description="seconds beside service_s for each token of the prompt that comes in")] = 0.0
    servers: Annotated[int, Field(strict=True, ge=1, le=100_000, description="requests served at once")] = 1
    share: Annotated[Fraction, Field(description="part of the requests that come here; the others pass at once")] = 1.0
    classes: Annotated[tuple[Name, ...], Field(description="only requests of these; empty: of all")] = ()
    adds_tokens: Annotated[Distribution | None, Field(description="added to the prompt; must have a largest value")] = None
    after_answer: Annotated[Switch, Field(description="answers pass it once they are complete, not requests; it delays no token")] = False
    encodes_images: Annotated[Switch, Field(description="only requests with an image come; what is kept is kept by image")] = False
    cache: Annotated[KeyedCache | None, Field(description="remembers what came out, by what was asked")] = None
    retrieval: Annotated[Retrieval | None, Field(description="this stage searches documents")] = None

    @model_validator(mode="after")
    def _one_memory(self) -> FrontStage:
        if self.cache is not None and self.retrieval is not None:
            raise PydanticCustomError("form", "a retrieval stage has caches of its own: leave out 'cache'")
        if self.retrieval is not None and self.encodes_images:
            raise PydanticCustomError("form", "a stage encodes images or searches documents, not both")
        if self.after_answer and (self.adds_tokens is not None or self.retrieval is not None or self.encodes_images):
            raise PydanticCustomError("form", "after the answer nothing can be added to the prompt, searched for it or seen")
        return self


def check_stages(stages: tuple[FrontStage, ...], classes: tuple[str, ...], queries: int | None, images: bool) -> None:
    """Raise pydantic's error, at the key at fault, for what no single stage can see. ``classes`` empty: a trace may bring any."""
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        if stage.encodes_images and not images:
            raise PydanticCustomError("at", "there are none: needs the key 'workload.images'", {"at": ("stages", index, "encodes_images")})
        if (stage.retrieval or (stage.cache and not stage.encodes_images)) and queries is None:
            raise PydanticCustomError("form", "stages that remember need the key 'workload.queries': what is asked, and how often")
        if stage.retrieval is not None and queries * stage.retrieval.per_query > MOST_FOUND:
            at = ("stages", index, "retrieval", "per_query")
            raise PydanticCustomError("at", "workload.queries.count times this exceeds {most}", {"at": at, "most": f"{MOST_FOUND:,}"})
        if stage.name in seen or stage.name in (NETWORK, INTEGRITY):
            raise PydanticCustomError("at", "the name '{name}' is taken", {"at": ("stages", index, "name"), "name": stage.name})
        seen.add(stage.name)
        for position, name in enumerate(stage.classes):
            if classes and name not in classes:
                at = ("stages", index, "classes", position)
                raise PydanticCustomError("at", "no class '{name}' in workload.classes", {"at": at, "name": name, "known": list(classes)})
