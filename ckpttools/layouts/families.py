"""Which family of state an entry belongs to, told by the name of its file or by its top-level key.

Weights-only conversion takes the family `model` and nothing else, so what is not surely something else is the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpttools.model import Path

MODEL, OPTIMIZER, SCHEDULER, RNG_STATE, EXTRA_STATE = "model", "optimizer", "scheduler", "rng_state", "extra_state"

_FILE_STEMS = (
    (
        re.compile(r"(pytorch_)?model(_fsdp)?(_\d+)?(_(full|state|weights|local|sharded))?|weights|consolidated|adapter_model"),
        MODEL,
    ),
    (re.compile(r"optim(izer)?(_\d+)?(_(full|state|states|local|sharded))?"), OPTIMIZER),
    (re.compile(r"(lr_)?scheduler(_\d+)?"), SCHEDULER),
    (re.compile(r"rng(_state)?(_\d+)?|random_states?(_\d+)?"), RNG_STATE),
    (re.compile(r"extra_state"), EXTRA_STATE),
    (re.compile(r"(grad_)?scaler(_\d+)?"), "scaler"),
)
_MODEL_KEYS = frozenset(
    {"model", "model_state", "model_state_dict", "state_dict", "module", "net", "network", "weights", "params"}
)
_OTHER_KEYS = {
    **dict.fromkeys(
        ("optim", "optimizer", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict", "opt"), OPTIMIZER
    ),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "opt_param_scheduler"), SCHEDULER),
    **dict.fromkeys(("rng", "rng_state", "rng_states", "random_state", "cuda_rng_state"), RNG_STATE),
    **dict.fromkeys(
        (
            "common_state",
            "dataloader",
            "data_loader",
            "dataloaders",
            "train_state",
            "trainer_state",
            "extra_state",
            "client_state",
        ),
        EXTRA_STATE,
    ),
    **dict.fromkeys(("scaler", "grad_scaler", "amp"), "scaler"),
}
_WORD = re.compile(r"(?:chained_\d+\.)?([^./]*)")
_FLAT_KEYS = frozenset(
    {"optim", "optimizer", "optimizers", "lr_scheduler", "lr_schedulers", "opt_param_scheduler", "rng_state", "common_state"}
)
"""First words of flat names (`optimizer.state.w.step`) that are surely no model's; `scaler.` may be a module."""
RANK_LOCAL = frozenset({RNG_STATE, EXTRA_STATE})
"""Families in which every rank has a state of its own."""


def family_of_stem(stem: str) -> str:
    """The family that a file's name without suffix and rank tells; the stem itself when it tells none. Pure."""
    return next((family for pattern, family in _FILE_STEMS if pattern.fullmatch(stem)), stem or MODEL)


def is_known_stem(stem: str) -> bool:
    """Whether `family_of_stem` knows the stem rather than passing it through. Pure."""
    return not stem or any(pattern.fullmatch(stem) for pattern, _ in _FILE_STEMS)


def families_of_keys(paths: Iterable[Path]) -> dict[object, str]:
    """The family of each top-level key of one nested value. Pure.

    Where a key is a model's (`model`, `state_dict`, ...) with more below it, the other keys are not the model's; else
    all that is not told to be something else is. Optimizers flattened into the top level are told by `param_groups`.
    """
    below: dict[object, bool] = {}
    for path in paths:
        if path:
            below[path[0]] = below.get(path[0], False) or len(path) > 1
    has_model_key = any(key in _MODEL_KEYS and is_branch for key, is_branch in below.items() if isinstance(key, str))
    has_optimizer_keys = {"state", "param_groups"} <= {_first_word(key) for key in below}
    return {key: _family_of_key(key, is_branch, has_model_key, has_optimizer_keys) for key, is_branch in below.items()}


def _first_word(key: object) -> str:
    """What stands before the first dot or slash; megatron-core's chained optimizers are counted before that."""
    return _WORD.match(key)[1] if isinstance(key, str) else ""  # type: ignore[index]  # it matches any text


def _family_of_key(key: object, is_branch: bool, has_model_key: bool, has_optimizer_keys: bool) -> str:
    word = _first_word(key)
    if has_optimizer_keys and word in ("state", "param_groups"):
        return OPTIMIZER
    if is_branch and key in _OTHER_KEYS:
        return _OTHER_KEYS[str(key)]
    if word != key and word in _FLAT_KEYS:
        return _OTHER_KEYS[word]
    if has_model_key and not (isinstance(key, str) and key in _MODEL_KEYS):
        return EXTRA_STATE
    return MODEL
