"""Stages before the model: features, embedding, retrieval, rerank, each a station with servers and a queue of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_core import PydanticCustomError

from serving.scenario.distributions import Distribution
from serving.scenario.fields import STRICT, Fraction, Name

NETWORK = "network"  # in records: the way to the site that serves, which is no stage


class FrontStage(BaseModel):
    """One station: requests are served first come, first served, by ``servers`` alike. Where users enter at sites, each site has its own.

    What a stage adds to the prompt (retrieved passages) comes after it, is new to the prefix cache, and counts as prompt tokens.
    """

    model_config = STRICT
    name: Name
    service_s: Annotated[Distribution, Field(description="seconds that one request takes")]
    servers: Annotated[int, Field(strict=True, ge=1, le=100_000, description="requests served at once")] = 1
    share: Annotated[Fraction, Field(description="part of the requests that come here; the others pass at once")] = 1.0
    classes: Annotated[tuple[Name, ...], Field(description="only requests of these; empty: of all")] = ()
    adds_tokens: Annotated[Distribution | None, Field(description="added to the prompt; must have a largest value")] = None


def check_stages(stages: tuple[FrontStage, ...], classes: tuple[str, ...]) -> None:
    """Raise pydantic's error, at the key at fault, for what no single stage can see. ``classes`` empty: a trace may bring any."""
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        if stage.name in seen or stage.name == NETWORK:
            raise PydanticCustomError("at", "the name '{name}' is taken", {"at": ("stages", index, "name"), "name": stage.name})
        seen.add(stage.name)
        for position, name in enumerate(stage.classes):
            if classes and name not in classes:
                at = ("stages", index, "classes", position)
                raise PydanticCustomError("at", "no class '{name}' in workload.classes", {"at": at, "name": name, "known": list(classes)})
