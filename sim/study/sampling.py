"""Which candidates to look at when there are too many for all: TPE (optuna), seeded, in rounds of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serving.errors import InputError
from sim.study.candidates import Candidate
from sim.study.search import RULED_OUT, Fate

_ROUND = 8
_REFUSED_USD = 1e9  # an hour: what a candidate that cannot work counts as


def sample(candidates: Sequence[Candidate], trials: int, *, seed: int, cost_of: Callable[[Sequence[Candidate]], Sequence[Fate]]) -> list[int]:
    """Indices of the candidates that were tried, in order; ``cost_of`` screens some of them at a time.

    Raises InputError when optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise InputError("plan.search", "optuna is not installed", "install the extra: pip install 'twinserve[study]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    keys = list(candidates[0].config)
    values = {key: list(dict.fromkeys(repr(candidate.config[key]) for candidate in candidates)) for key in keys}
    space = {key: optuna.distributions.CategoricalDistribution(choices) for key, choices in values.items() if len(choices) > 1}
    index_of = {tuple(repr(candidate.config[key]) for key in keys): candidate.index for candidate in candidates}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=min(2 * _ROUND, trials)))
    cost: dict[int, float] = {}
    for start in range(0, trials, _ROUND):
        asked = [study.ask(space) for _ in range(min(_ROUND, trials - start))]
        chosen = [index_of[tuple(trial.params.get(key, values[key][0]) for key in keys)] for trial in asked]
        fresh = [index for index in dict.fromkeys(chosen) if index not in cost]
        for index, fate in zip(fresh, cost_of([candidates[index] for index in fresh])):
            cost[index] = _REFUSED_USD if fate.status == RULED_OUT or fate.limit else fate.cost
        for trial, index in zip(asked, chosen):
            study.tell(trial, cost[index])
    return sorted(cost)
