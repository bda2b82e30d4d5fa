"""Sites: edge, regional and central pools, each with hardware of its own, joined inwards by links with a round trip and a rate."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, CatalogueName, Count, Name, NotNegative, PolicySpec, Positive, spec_field


class Uplink(BaseModel):
    """The link from a site to the next one inwards."""

    model_config = STRICT
    round_trip_s: NotNegative
    bytes_per_s: Annotated[Positive, Field(description="one way, shared fairly by all that crosses it")] = 1.25e9


class Site(BaseModel):
    """One place: users who enter there, replicas that serve there, or both. Keys left out are the scenario's."""

    model_config = STRICT
    name: Name
    tier: Annotated[Name | None, Field(description="what policies call it (edge, regional, central); null: its name")] = None
    inward: Annotated[Name | None, Field(description="the next site on the way to the centre; null: this is a centre")] = None
    uplink: Annotated[Uplink | None, Field(description="the link to it")] = None
    users: Annotated[NotNegative, Field(description="weight of the users who enter here")] = 0.0
    replicas: Annotated[int, Field(strict=True, ge=0, le=100_000, description="0: it only passes requests on")] = 1
    llm: CatalogueName | None = None
    gpu: CatalogueName | None = None
    tensor_parallel: Annotated[int | None, Field(strict=True, ge=1, le=1024)] = None
    max_model_len: Annotated[int | None, Field(strict=True, ge=1, le=10**9)] = None
    max_batch_tokens: Annotated[Count | None, Field(description="as in policy.batching, for this site")] = None
    max_batch_seqs: Annotated[Count | None, Field(description="as in policy.batching, for this site")] = None

    @property
    def level(self) -> str:
        """What policies call it."""
        return self.tier or self.name


def _wrong(message: str, *at: str | int, **context: Any) -> PydanticCustomError:
    return PydanticCustomError("at", message, {"at": ("places", *at), **context})


class Sites(BaseModel):
    """Where requests may be served. A request enters at a site, drawn by ``users`` (sessions stay), and may be served there or further inwards.

    ``routing`` (a policy of kind ``site``) decides where. The whole round trip passes before the site sees the request: users' times are
    exact, the site's own clock runs half a round trip late.
    """

    model_config = STRICT
    places: Annotated[tuple[Site, ...], Field(min_length=1)]
    routing: Annotated[spec_field("sites.routing"), Field(description="which site on the way inwards serves")] = PolicySpec(
        name="nearest", where="sites.routing"
    )
    bytes_per_token: Annotated[NotNegative, Field(description="of a prompt, on the links")] = 5.0

    @model_validator(mode="after")
    def _tree(self) -> Sites:
        names = [site.name for site in self.places]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise _wrong("two sites have this name", index, "name")
        for index, site in enumerate(self.places):
            if site.inward is not None and site.inward not in names:
                raise _wrong("there is no site '{name}'", index, "inward", name=site.inward, known=names)
            if (site.inward is None) != (site.uplink is None):
                raise _wrong("inward and uplink need each other", index, "uplink" if site.inward is None else "inward")
        for index, site in enumerate(self.places):
            way = self.inwards(site.name)
            if way is None:
                raise _wrong("leads round in a circle", index, "inward")
            if site.users and not any(each.replicas for each in way):
                raise _wrong("users enter here, but no site on their way inwards has replicas", index, "users")
        if not any(site.users for site in self.places):
            raise PydanticCustomError("form", "no site has users")
        return self

    def inwards(self, name: str) -> list[Site] | None:
        """The sites from ``name`` to its centre; None when the way never ends."""
        by_name = {site.name: site for site in self.places}
        way = [by_name[name]]
        while way[-1].inward is not None:
            if len(way) > len(self.places):
                return None
            way.append(by_name[way[-1].inward])
        return way

    def within(self, region: str) -> list[str]:
        """Names of the sites with replicas that lie at ``region`` or further out."""
        return [site.name for site in self.places if site.replicas and any(each.name == region for each in self.inwards(site.name))]

    @property
    def levels(self) -> list[str]:
        """Names of the tiers, in the order of the file."""
        return list(dict.fromkeys(site.level for site in self.places))
