"""The fused half-precision optimizer with ZeRO off: one flat vector of masters per parameter group, whole on every rank.

Nothing tells which parameters are in a vector. Each group has a subsequence of the model's parameters, one after the other
without padding, so every parameter either begins where a group's last one ended or is frozen; which of these holds, the
number of elements and samples of the values tell.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/fp16/fused_optimizer.py (`__init__`, `state_dict`), v0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from ckpttools.findings import NOTE, Finding
from ckpttools.layouts.deepspeed.book import MASTER, Book
from ckpttools.layouts.deepspeed.likeness import Likeness
from ckpttools.layouts.deepspeed.parts import Key, flat_pieces
from ckpttools.layouts.deepspeed.states import Files, Stored
from ckpttools.layouts.deepspeed.unflattened import Params, Unflattened
from ckpttools.layouts.families import OPTIMIZER
from ckpttools.pickles.views import kind_of

_MAX_STATES = 20_000

State = tuple[int, ...]
"""How many elements of each group were given away."""
Fits = Callable[[int, int, int], bool]
"""Whether, in a group, from an element on, a parameter can lie (by its place in the model)."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a parameter lies in its group's flat vector."""

    name: str
    shape: tuple[int, ...]
    group: int
    first: int


@dataclass(frozen=True, slots=True)
class _Filling:
    """Groups of so many elements, to be filled with a subsequence each of the parameters."""

    totals: State
    params: Params
    numels: tuple[int, ...]
    done: tuple[int, ...]
    """Elements of all parameters before each."""
    fits: Fits

    def choices(self, state: State, i: int) -> list[State]:
        """The states after a parameter: it goes to the end of a group, or to none while elements are left over."""
        numel, spare = self.numels[i], self.done[-1] - sum(self.totals)
        if not numel:
            return [state]
        found = [state] if self.done[i] - sum(state) + numel <= spare else []
        for g, at in enumerate(state):
            if at + numel <= self.totals[g] and self.fits(g, at, i):
                found.append((*state[:g], at + numel, *state[g + 1 :]))
        return found

    def sweep(self) -> list[dict[State, int]]:
        """The states that can be reached after each parameter, and in how many ways (2 stands for more); empty when too many."""
        layers: list[dict[State, int]] = [{(0,) * len(self.totals): 1}]
        for i in range(len(self.params)):
            reached: dict[State, int] = {}
            for state, ways in layers[-1].items():
                for following in self.choices(state, i):
                    reached[following] = min(2, reached.get(following, 0) + ways)
            if len(reached) > _MAX_STATES:
                return []
            layers.append(reached)
        return layers


def find_stretches(totals: Sequence[int], params: Params, fits: Fits) -> list[Stretch]:
    """Each parameter's place, where there is one way only to fill all groups to their last element; else none. Pure."""
    numels = tuple(prod(shape) for _, shape in params)
    filling = _Filling(tuple(totals), params, numels, (0, *accumulate(numels)), fits)
    layers, state = filling.sweep(), filling.totals
    if not layers or layers[-1].get(state) != 1:
        return []
    found = []
    for i in range(len(params) - 1, -1, -1):
        before = next(s for s in layers[i] if state in filling.choices(s, i))
        group = next((g for g, (a, b) in enumerate(zip(before, state, strict=True)) if a != b), None)
        if group is not None:
            found.append(Stretch(*params[i], group, before[group]))
        state = before
    return found[::-1]


def add_flat_state(
    book: Book, files: Files, optimizer: Unflattened, params: Params, likeness: Likeness, *, tp: int, is_all: bool
) -> list[list[str]]:
    """Masters and state of every parameter, as boxes of the flat vectors; the vectors themselves where names are not told.

    Args: is_all: whether no parameter can be absent from `params`; without that, numbers of elements alone name nothing.
    Returns: the parameters of each group; none where they are not told.
    """
    flats = [files.locate(optimizer.file, r, f"fp32 weights of group {g}") for g, r in enumerate(optimizer.flats)]
    totals = [flat.numel if flat else 0 for flat in flats]
    weights = [book.stored(name, tp) for name, _ in params]

    def fits(g: int, at: int, i: int) -> bool:
        flat, weight = flats[g], weights[i]
        return flat is None or weight is None or likeness.may_round_to(flat, weight, at)

    stretches = find_stretches(totals, params, fits)
    if not stretches and is_all:
        stretches = find_stretches(totals, params, lambda g, at, i: True)
    by_group: dict[int, list[Stretch]] = {}
    for stretch in stretches:
        by_group.setdefault(stretch.group, []).append(stretch)
    for g, flat in enumerate(flats):
        for key, record in (("fp32", optimizer.flats[g]), *_states(optimizer, g).items()):
            stored = flat if key == "fp32" else files.locate(optimizer.file, record, f"`{key}` of group {g}")
            _add(book, optimizer, g, key, stored, record, totals[g], by_group.get(g, []), tp=tp)
    if any(totals) and not stretches:
        found = f"{len(totals)} flat groups of {totals[:8]} elements that can be filled in more than one way, or in none"
        expected = "the parameters of each group"
        files.findings.append(Finding("names-unstated", optimizer.path, expected, found, severity=NOTE))
    return [[s.name for s in by_group.get(g, [])] for g in range(len(flats))] if stretches else []


def _states(optimizer: Unflattened, g: int) -> Mapping[str, object]:
    positions = optimizer.groups[g] if g < len(optimizer.groups) else []
    return optimizer.state.get(positions[0], {}) if positions else {}


def _add(
    book: Book,
    optimizer: Unflattened,
    g: int,
    name: str,
    stored: Stored | None,
    record: object,
    total: int,
    stretches: Sequence[Stretch],
    *,
    tp: int,
) -> None:
    key: Key = MASTER if name == "fp32" else (name,)
    if stored is not None and stored.shape != () and (stored.numel != total or not stretches):
        book.add_apart(f"{optimizer.prefix}group_{g}", key, stored, optimizer.rank, optimizer.path)
        return
    for stretch in stretches:
        if stored is None:
            if record is not None:
                book.add_object(("optimizer", "state", stretch.name, name), kind_of(record), record, OPTIMIZER)
        elif stored.shape == ():
            if not book.holds(stretch.name, key):
                book.add_whole(stretch.name, key, tp, stored, optimizer.rank, optimizer.path)
        else:
            extent = replace(stored.extent, offset=stored.extent.offset + stretch.first * stored.dtype.item_bytes)
            pieces = flat_pieces(stretch.shape, 0, prod(stretch.shape), extent, stored.dtype, optimizer.rank)
            add = book.add_stale if book.is_settled(stretch.name, key) else book.add
            add(stretch.name, key, tp, stored.dtype, stretch.shape, pieces, optimizer.path)
