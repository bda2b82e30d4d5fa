"""Cross-layer reuse of keys and values: how similar neighbouring layers are, and which policy decides who shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from serving.scenario.fields import STRICT, Fraction, Name, PolicySpec, spec_field


class LayerReuse(BaseModel):
    """Layers that read the keys and values of an earlier layer project, write and keep none of their own."""

    model_config = STRICT
    policy: Annotated[spec_field("kv_cache.layer_reuse.policy"), Field(description="who shares")] = PolicySpec(
        name="threshold", where="kv_cache.layer_reuse.policy"
    )
    similarity: Annotated[tuple[Fraction, ...], Field(min_length=1, description="cosine between the KV entries of each layer and the next")]
    source: Annotated[Name, Field(description="where the similarities come from")]
