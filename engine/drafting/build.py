"""From a scenario's ``speculation`` to what drafts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.architecture import Architecture, from_llm
from engine.drafting import Proposer
from engine.drafting.network import DraftNetwork
from engine.drafting.prompt_lookup import PromptLookup
from engine.loader import load, random_weights
from engine.model import DecoderWeights
from engine.runner import Runner, RunnerOptions
from serving.catalog import load_llm
from serving.errors import InputError, nearest
from serving.scenario import Scenario
from serving.scenario.model import Speculation

WHERE = "speculation.proposer"
KINDS = ("prompt_lookup", "layers", "network")
RANDOM_SEED = 1  # added to the scenario's: a random drafter is no copy of a random network


@dataclass(frozen=True, slots=True)
class Drafter:
    """A network that drafts. ``own_weights``: it holds memory of its own."""

    shape: Architecture
    weights: DecoderWeights
    own_weights: bool

    def bytes(self) -> int:
        """Memory of its weights."""
        return self.shape.parameters() * self.weights.embedding.element_size() if self.own_weights else 0


def chosen(spec: Speculation) -> tuple[str, dict[str, Any]]:
    """The proposer's name and options. Raises InputError for an unknown name."""
    if spec.proposer is None:
        return ("prompt_lookup" if spec.draft_llm is None else "network"), {}
    name = spec.proposer.name
    if name not in KINDS and ":" not in name:
        raise InputError(WHERE, f"there is no proposer '{name}'", nearest(name, [*KINDS, "module:Class"]))
    return name, dict(spec.proposer.options)


def drafter_of(scenario: Scenario, shape: Architecture, weights: DecoderWeights) -> Drafter | None:
    """The network that drafts for one of ``shape``; None where none does. Raises InputError for one that cannot."""
    if scenario.speculation is None:
        return None
    name, options = chosen(scenario.speculation)
    if name == "layers":
        return _first_layers(options, shape, weights)
    if name != "network":
        return None
    folder = options.pop("weights", None)
    if options:
        raise InputError(WHERE, f"'network' has no option '{next(iter(options))}'", "weights: a local folder")
    device, dtype = weights.embedding.device, weights.embedding.dtype
    if folder is not None:
        found = load(Path(folder), device=device, dtype=dtype)
        small, own = found.shape, found.weights
    elif scenario.speculation.draft_llm is not None:
        small = from_llm(load_llm(scenario.speculation.draft_llm, "speculation.draft_llm"))
        _check_vocab(small, shape)
        own = random_weights(small, scenario.seed + RANDOM_SEED, device=device, dtype=dtype)
    else:
        raise InputError(WHERE, "a network that drafts must be named", "give speculation.draft_llm, or weights: a local folder")
    _check_vocab(small, shape)
    return Drafter(small, own, own_weights=True)


def _check_vocab(small: Architecture, shape: Architecture) -> None:
    if small.vocab != shape.vocab:
        raise InputError("speculation.draft_llm", f"knows {small.vocab} tokens, the network that it drafts for {shape.vocab}", "it must be of one vocabulary")


def _first_layers(options: dict[str, Any], shape: Architecture, weights: DecoderWeights) -> Drafter:
    layers = options.pop("layers", max(1, shape.layers // 4))
    if options:
        raise InputError(WHERE, f"'layers' has no option '{next(iter(options))}'", "layers: how many")
    if not isinstance(layers, int) or not 1 <= layers < shape.layers:
        raise InputError(f"{WHERE}.layers", f"must lie between 1 and {shape.layers - 1}, got {layers}")
    small = replace(shape, layers=layers, window_layers=min(shape.window_layers, layers), kv_owners=shape.kv_owners[:layers])
    return Drafter(small, DecoderWeights(weights.embedding, weights.layers[:layers], weights.norm, weights.lm_head), own_weights=False)


def proposer_of(scenario: Scenario, drafter: Drafter | None, options: RunnerOptions) -> Callable[[], Proposer] | None:
    """What makes a proposer for one loop; ``options`` are those of the network's own runner. Raises InputError for bad options."""
    if scenario.speculation is None:
        return None
    if drafter is not None:
        length = min(options.max_model_len, drafter.shape.max_model_len)
        if length < options.max_model_len:
            raise InputError("speculation.draft_llm", f"takes {length} positions, the engine {options.max_model_len}", f"lower max_model_len to {length}")
        runner = Runner(drafter.shape, drafter.weights, replace(options, drafts=True))
        runner.warm_up()
        return lambda: DraftNetwork(runner)
    name, given = chosen(scenario.speculation)
    make = _imported(name) if ":" in name else PromptLookup

    def build() -> Proposer:
        try:
            return make(**given)
        except TypeError as error:
            raise InputError(WHERE, f"'{name}' does not take these options: {error}") from None

    build()
    return build


def _imported(name: str) -> Callable[..., Proposer]:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(WHERE, f"'{name}' cannot be loaded: {error}") from None


def share_of_pages(shape: Architecture, drafter: Drafter | None) -> float:
    """Part of the KV memory that is left for the network itself beside its drafter's pages."""
    if drafter is None:
        return 1.0
    own, other = shape.kv_bytes_per_token(1), drafter.shape.kv_bytes_per_token(1)
    return own / (own + other)
