"""AutoEP: the experts of a layer are one tensor, of which each expert-parallel rank has some, and a file per expert the weights.

Weights are `<prefix>.w1.<number>` in the file of that expert; ranks keep state of `<prefix>.w1` with their own experts alone,
one after the other. Here both are boxes of the whole tensor, whose first dimension counts experts.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/engine.py (`_save_moe_checkpoint`), deepspeed/module_inject/auto_ep_layer.py,
v0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpttools.dtypes import DType
from ckpttools.layouts.deepspeed.parts import Cut, place
from ckpttools.layouts.deepspeed.states import count, counts, items, table
from ckpttools.model import Piece

_WEIGHTS = ("w1", "w2", "w3")
_MAX_EXPERTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Fused:
    """How the experts of a layer are spread over expert-parallel ranks."""

    experts: int
    ranks: tuple[tuple[int, ...], ...]
    """Of each rank the experts that it has, in the order in which it has them."""

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """What a rank has of a tensor of this whole shape."""
        return (len(self.ranks[rank]), *shape[1:])

    def whole_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor of which a rank has so much."""
        return (self.experts, *local[1:])

    def whole_pieces(self, pieces: Iterable[Piece], rank: int, dtype: DType) -> list[Piece]:
        """The pieces of a rank's tensor as pieces of the whole one."""
        cuts = _cuts(self.ranks[rank])
        return [part for piece in pieces for part in place(piece, 0, cuts, dtype)]

    def holds(self, local: tuple[int, ...], rank: int) -> bool:
        """Whether a tensor of this shape is what a rank has."""
        return rank < len(self.ranks) and bool(local) and local[0] == len(self.ranks[rank])


def read_fused(layers: object) -> dict[str, Fused]:
    """Parameter -> how its experts are spread, of layers that are spread over more than one rank. Pure.

    Args: layers: `ds_autoep_layers` of a model file.
    """
    found = {}
    for layer in items(layers):
        told = table(layer)
        prefix, experts = told.get("expert_key_prefix"), count(told.get("num_experts"))
        if isinstance(prefix, str) and experts and experts <= _MAX_EXPERTS:
            fused = Fused(experts, _ranks_of(told, experts))
            found.update({f"{prefix}.{w}": fused for w in _WEIGHTS})
    return found


def _ranks_of(told: dict[str, object], experts: int) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank: as they were placed, or evenly."""
    stated = [tuple(counts(table(r).get("experts"))) for r in items(table(told.get("expert_placement")).get("ranks"))]
    if stated and sorted(n for rank in stated for n in rank) == list(range(experts)):
        return tuple(stated)
    size = max(1, min(count(told.get("ep_size")) or 1, experts))
    each = experts // size
    return tuple(tuple(range(r * each, (r + 1) * each)) for r in range(size))


def rank_of(layers: object) -> int:
    """The expert-parallel rank that wrote a model file. Pure."""
    return next((r for layer in items(layers) if (r := count(table(layer).get("ep_rank"))) is not None), 0)


def split_number(name: str) -> tuple[str, int | None]:
    """(tensor of experts, which of them) that a name in an expert's file means: `experts.w1.3` is 3 of `experts.w1`. Pure."""
    head, _, number = name.rpartition(".")
    return (head, int(number)) if number.isascii() and number.isdigit() and len(number) < 10 else (name, None)


def _cuts(experts: tuple[int, ...]) -> list[Cut]:
    """Where the experts of a rank go, neighbours together."""
    found: list[Cut] = []
    for local, number in enumerate(experts):
        last = found[-1] if found else None
        if last is not None and last.offset + last.size == number:
            found[-1] = Cut(last.local_offset, last.offset, last.size + 1)
        else:
            found.append(Cut(local, number, 1))
    return found
