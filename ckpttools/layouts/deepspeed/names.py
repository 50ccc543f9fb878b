"""The files of a DeepSpeed snapshot, told by their names.

`pp_rank` in a name is the data-parallel rank; `mp_rank` counts tensor- and pipeline-parallel ranks together
(pipeline rank * tensor-parallel size + tensor-parallel rank). Start with `parse_names`.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/engine.py (`_get_*_ckpt_name`), deepspeed/runtime/pipe/module.py
(`ckpt_layer_path`), deepspeed/checkpoint/ds_to_universal.py, v0.19.8.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_?model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<prefix>[a-z0-9]+_)?zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(?:-model_(?P<tp>\d{1,9}))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(?P<layer>-?\d{1,9})_)?expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(?P<ep>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt")
_UNIVERSAL = re.compile(r"zero/(?P<name>.+)/(?P<state>[^/]+)\.pt")
SETTINGS = "zero/optimizer_state.pt"
"""Of a universal checkpoint: what the optimizer keeps beside its tensors."""


@dataclass(slots=True)
class Names:
    """The files of one snapshot by their ranks."""

    model: dict[tuple[int, int], str] = field(default_factory=dict)
    """By (data-parallel rank, model-parallel rank); the former is 0 where the name has none."""
    optimizer: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    """By (number of the pipeline layer, tensor-parallel rank); a topology without the latter leaves it out of the name."""
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """By (number of the MoE layer, global number of the expert, model-parallel rank)."""
    expert_optimizer: dict[tuple[int, int], str] = field(default_factory=dict)
    """By (expert-parallel rank, model-parallel rank); only when ZeRO is off."""
    universal: dict[tuple[str, str], str] = field(default_factory=dict)
    """By (parameter, state)."""
    settings: str = ""
    doubled: list[tuple[str, str]] = field(default_factory=list)
    """(a file, another file of the same rank): of two saves, or copied under another name."""

    @property
    def is_universal(self) -> bool:
        """Whether there is one folder per parameter."""
        return bool(self.universal or self.settings)

    @property
    def is_sharded(self) -> bool:
        """Whether the model files carry a data-parallel rank, as those of ZeRO 3 do."""
        return any("zero_pp_rank_" in path.rpartition("/")[2] for path in self.model.values())

    @property
    def files(self) -> list[str]:
        """Every file of a known name, sorted."""
        tables: list[Iterable[str]] = [self.model.values(), self.optimizer.values(), self.layers.values()]
        tables += [self.experts.values(), self.expert_optimizer.values(), self.universal.values()]
        found = {path for table in tables for path in table} | {other for _, other in self.doubled}
        return sorted(found | ({self.settings} if self.settings else set()))


def is_rank_file(name: str) -> bool:
    """Whether DeepSpeed alone writes files of this name, relative to the snapshot. Pure."""
    return any(p.fullmatch(name) for p in (_MODEL, _OPTIMIZER, _LAYER, _EXPERT, _EXPERT_OPTIMIZER))


def numbers_of(path: str) -> tuple[int, tuple[int | None, ...]] | None:
    """(kind of file, the ranks, layer or expert in its name); None of a name that is no rank's. Pure."""
    name = path.rpartition("/")[2]
    for kind, pattern in enumerate((_MODEL, _OPTIMIZER, _LAYER, _EXPERT, _EXPERT_OPTIMIZER)):
        if match := pattern.fullmatch(name):
            return kind, tuple(None if v is None else int(v) for k, v in match.groupdict().items() if k != "prefix")
    return None


def parse_names(paths: Iterable[str], directory: str = "", *, is_bf16: bool | None = None) -> Names:
    """The files of the snapshot in `directory` ("" for the root) among paths. Pure.

    Args: is_bf16: whether the training used bf16, which prefixes the optimizer's files; where files with and without a
        prefix are there for one rank, those of the other kind are left over from another save.
    """
    found, prefix = Names(), f"{directory}/" if directory else ""
    variants: dict[tuple[int, int], list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(p for p in paths if p.startswith(prefix)):
        name = path[len(prefix) :]
        if match := _MODEL.fullmatch(name):
            _add(found.model, (int(match["dp"] or 0), int(match["mp"])), path, found.doubled)
        elif match := _OPTIMIZER.fullmatch(name):
            variants[int(match["dp"]), int(match["mp"])].append((match["prefix"] or "", path))
        elif match := _LAYER.fullmatch(name):
            _add(found.layers, (int(match["layer"]), int(match["tp"] or 0)), path, found.doubled)
        elif match := _EXPERT.fullmatch(name):
            _add(found.experts, (int(match["layer"] or 0), int(match["expert"]), int(match["mp"])), path, found.doubled)
        elif match := _EXPERT_OPTIMIZER.fullmatch(name):
            _add(found.expert_optimizer, (int(match["ep"]), int(match["mp"])), path, found.doubled)
        elif name == SETTINGS:
            found.settings = path
        elif match := _UNIVERSAL.fullmatch(name):
            found.universal[match["name"], match["state"]] = path
    wanted = None if is_bf16 is None else ("bf16_" if is_bf16 else "")
    common = _most_common(prefix for files in variants.values() for prefix, _ in files)
    for key, files in variants.items():
        first, *others = sorted(files, key=lambda f: (f[0] != wanted, f[0] != common, f[1]))
        found.optimizer[key] = first[1]
        found.doubled += [(first[1], path) for _, path in others]
    return found


def _add(table: dict[Any, str], key: object, path: str, doubled: list[tuple[str, str]]) -> None:
    if key in table:
        doubled.append((table[key], path))
    else:
        table[key] = path


def _most_common(prefixes: Iterable[str]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for prefix in prefixes:
        counts[prefix] += 1
    return max(counts, key=lambda p: (counts[p], p), default="")


def model_name(mp: int, dp: int | None = None) -> str:
    """The model file of a rank; with a data-parallel rank as ZeRO 3 has it. Pure."""
    return f"{'' if dp is None else f'zero_pp_rank_{dp}_'}mp_rank_{mp:02d}_model_states.pt"


def optimizer_name(mp: int, dp: int, *, is_bf16: bool) -> str:
    """The file of a rank's part of the optimizer. Pure."""
    return f"{'bf16_' * is_bf16}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def layer_name(layer: int, tp: int) -> str:
    """The file of a pipeline's layer. Pure."""
    return f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"


def expert_name(layer: int, expert: int, mp: int) -> str:
    """The file of an expert, by its global number. Pure."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def expert_optimizer_name(ep: int, mp: int) -> str:
    """The file of an expert-parallel rank's optimizer, where ZeRO is off. Pure."""
    return f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt"


def state_name(parameter: str, state: str) -> str:
    """The file of a universal checkpoint that holds one state of a parameter. Pure."""
    return f"zero/{parameter}/{state}.pt"


def stem_of(path: str) -> str:
    """What the name of a rank's model file begins with: the word for the rank. Pure."""
    return path.rpartition("/")[2].removesuffix("_model_states.pt")


def rank_sibling(path: str, rank: int) -> str:
    """The name that the file of another data-parallel rank has. Pure."""
    directory, slash, name = path.rpartition("/")
    return directory + slash + re.sub(r"((?:zero_pp|expp)_rank_)\d+", rf"\g<1>{rank}", name, count=1)


def model_sibling(path: str, mp: int) -> str:
    """The name that the file of another model-parallel rank has. Pure."""
    directory, slash, name = path.rpartition("/")
    return directory + slash + re.sub(r"(mp_rank_)\d+", rf"\g<1>{mp:02d}", name, count=1)


def layer_sibling(path: str, layer: int, tp: int) -> str:
    """The name that the file of another pipeline layer or tensor-parallel rank has. Pure."""
    directory, slash, name = path.rpartition("/")
    name = re.sub(r"^layer_\d+", f"layer_{layer:02d}", name)
    return directory + slash + re.sub(r"(-model_)\d+", rf"\g<1>{tp:02d}", name)
