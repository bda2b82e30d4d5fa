"""What is done about the weights: streamed from the host, kept at several precisions, skipped by tokens that leave early."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.scenario.fields import STRICT, Count, Fraction, Positive, Switch


class Streaming(BaseModel):
    """Layers that do not fit stay in host memory and cross the link in every step."""

    model_config = STRICT
    resident: Annotated[Fraction, Field(description="share of the layers kept on the GPU")]
    prefetch: Annotated[Switch, Field(description="the next layers are copied while these are computed")] = True
    cache: Annotated[Literal["lru_ap", "lru"], Field(description="which layers are kept: by age and locality, or the latest used")] = "lru_ap"
    bytes_per_s: Annotated[Positive | None, Field(description="to each GPU; null: what its host link reaches")] = None


class LayerDtype(BaseModel):
    """So many layers with weights of one dtype."""

    model_config = STRICT
    dtype: Literal["bf16", "fp16", "fp8", "int8", "int4"]
    layers: Count


class Exit(BaseModel):
    """Where tokens may leave: after ``layer``, the ``share`` of all tokens whose gate opens there."""

    model_config = STRICT
    layer: Count
    share: Fraction


class EarlyExit(BaseModel):
    """Token-gated depth: decodes whose gate opens skip the layers that are left."""

    model_config = STRICT
    exits: Annotated[tuple[Exit, ...], Field(min_length=1, description="in order of depth")]
    acceptance: Annotated[Fraction, Field(description="share of the opened gates that are let through; the others go on to the end")] = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> EarlyExit:
        layers = [one.layer for one in self.exits]
        if layers != sorted(set(layers)) or sum(one.share for one in self.exits) > 1 + 1e-9:
            raise PydanticCustomError("form", "exits must go from shallow to deep and their shares sum to 1 at most")
        return self


class Weights(BaseModel):
    """How the trunk's weights are kept and used."""

    model_config = STRICT
    streaming: Streaming | None = None
    mixed: Annotated[tuple[LayerDtype, ...], Field(description="precision by layers, instead of cluster.weight_dtype")] = ()
    early_exit: EarlyExit | None = None
