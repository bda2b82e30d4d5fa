"""Images in prompts: how many tokens each becomes, and how often it is asked about."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from serving.scenario.distributions import Distribution
from serving.scenario.fields import STRICT, Fraction, Switch


class Images(BaseModel):
    """A request (or session) with probability ``share`` begins with one of ``count`` images, by Zipf's law.

    An image becomes ``tokens`` at the front of the prompt, filled up to whole KV blocks; it has its number of them once and for all. Its pages are
    then a prefix like any other: whoever asks about the same image next finds them, if ``shared_pages``.
    """

    model_config = STRICT
    count: Annotated[int, Field(strict=True, ge=1, le=1_000_000, description="images that there are")]
    tokens: Annotated[Distribution, Field(description="tokens that an image becomes; must have a largest value")]
    share: Annotated[Fraction, Field(description="part of the requests, or sessions, that have one")] = 1.0
    zipf_exponent: Annotated[float, Field(strict=True, ge=0, le=20, description="0: all images are equally popular")] = 0.0
    shared_pages: Annotated[Switch, Field(description="false: every request computes the pages of its image, and of what follows, anew")] = True
