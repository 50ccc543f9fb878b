"""The optimizer when ZeRO is off: torch's own state dict by position, to which names are given where only one order fits.

Positions count the parameters of the groups one after another; within a group parameters keep the order of the
model. Frozen parameters are in no group. So the shapes at the positions are an interleaving of subsequences of the
model's shapes, and where a position can belong to one parameter only, it does. What stays open keeps its position as a name.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/fp16/unfused_optimizer.py (`state_dict`), v0.19.8; pytorch/pytorch,
torch/optim/optimizer.py (`state_dict`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.containers.torch_entries import RankFile
from ckpttools.findings import NOTE, Finding
from ckpttools.layouts.deepspeed.book import MASTER, Book
from ckpttools.layouts.deepspeed.fused_experts import Fused
from ckpttools.layouts.deepspeed.parts import whole_piece
from ckpttools.layouts.deepspeed.states import Files, Stored, items, numbered, table
from ckpttools.layouts.families import OPTIMIZER
from ckpttools.pickles.views import kind_of

_MAX_STATES = 20_000
_MAX_PAIRS = 4_000_000
_NOT_SETTINGS = frozenset({"optimizer_state_dict", "fp32_groups", "fp32_groups_flat", "state", "param_groups"})

State = tuple[int, ...]
"""How many positions of each group were given away."""
Params = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes in the order of the model."""
Fits = Callable[[int, int], bool]
"""Whether what is kept at a position can be of a parameter, by its place in the model."""


@dataclass(slots=True)
class Unflattened:
    """An optimizer's state by position."""

    path: str
    file: RankFile
    state: dict[int, dict[str, object]] = field(default_factory=dict)
    groups: list[list[int]] = field(default_factory=list)
    """Positions of each parameter group."""
    stated_names: list[list[str]] = field(default_factory=list)
    """Names of each group's parameters, where the optimizer was given them."""
    masters: dict[int, object] = field(default_factory=dict)
    """fp32 weights by position."""
    flats: list[object] = field(default_factory=list)
    """fp32 weights by group, where each group is one flat vector."""
    settings: dict[str, object] = field(default_factory=dict)
    rank: int = 0
    prefix: str = ""
    """Before the number of a position that has no name, where several optimizers count from 0."""
    fused: dict[str, tuple[Fused, int]] = field(default_factory=dict)
    """Of tensors of experts how they are spread, and the rank of this optimizer among those that share them."""


def read_unflattened(path: str, file: RankFile, record: object, rank: int) -> Unflattened | None:
    """The state of torch's optimizer, or of DeepSpeed's class around it; None where there is none. Pure."""
    outer = table(record)
    inner = table(outer.get("optimizer_state_dict")) or outer
    if "state" not in inner:
        return None
    found = Unflattened(path, file, rank=rank)
    found.state = {position: table(values) for position, values in numbered(inner["state"]).items()}
    for group in items(inner.get("param_groups")):
        settings = table(group)
        found.groups.append([p for p in items(settings.get("params")) if type(p) is int])
        found.stated_names.append([n for n in items(settings.get("param_names")) if isinstance(n, str)])
    for positions, masters in zip(found.groups, items(outer.get("fp32_groups")), strict=False):
        found.masters.update(zip(positions, items(masters), strict=False))
    found.flats = items(outer.get("fp32_groups_flat"))
    found.settings = {k: v for k, v in outer.items() if k not in _NOT_SETTINGS}
    found.settings["param_groups"] = inner.get("param_groups")
    return found


def shapes_by_position(files: Files, optimizer: Unflattened) -> dict[int, frozenset[tuple[int, ...]]]:
    """The shapes that each position's parameter can have: its master's, or one of its states'.

    A state of no dimension tells nothing, unless there is no other; positions without tensors are left out.
    """
    found: dict[int, frozenset[tuple[int, ...]]] = {}
    for position in (p for group in optimizer.groups for p in group):
        master = files.locate(optimizer.file, optimizer.masters.get(position), f"fp32 weight {position}")
        records = [] if master is not None else optimizer.state.get(position, {}).values()
        shapes = {s.shape for r in records if (s := files.locate(optimizer.file, r, f"state of {position}"))}
        if master is not None:
            found[position] = frozenset({master.shape})
        elif shapes:
            found[position] = frozenset(shapes - {()} or shapes)
    return found


def name_positions(
    optimizer: Unflattened,
    shapes: Mapping[int, Collection[tuple[int, ...]]],
    model: Params,
    is_like: Fits | None = None,
    *,
    is_all: bool = True,
) -> dict[int, str]:
    """The name of each position that can have one only. Pure, as far as `is_like` is.

    Args: shapes: those that the parameter at a position can have. model: the parameters in their order, buffers and
        further names of tied ones left out. is_like: whether the values at a position can be those of a parameter; asked
        where shapes leave a choice, and enough by itself where the groups have another order. is_all: whether no parameter
        can be absent from `model`; without that, shapes alone name nothing.
    """
    if any(optimizer.stated_names) and all(
        len(n) == len(p) for n, p in zip(optimizer.stated_names, optimizer.groups, strict=True)
    ):
        pairs = zip(optimizer.groups, optimizer.stated_names, strict=True)
        return {p: n for positions, names in pairs for p, n in zip(positions, names, strict=True)}
    total = sum(map(len, optimizer.groups))
    if total > len(model):
        return {}

    def has_shape(position: int, i: int) -> bool:
        return position not in shapes or model[i][1] in shapes[position]

    found = only_names(optimizer.groups, model, has_shape) if is_all else {}
    if is_like is not None and len(found) < total:
        fits = _remembering(lambda p, i: has_shape(p, i) and is_like(p, i))
        found = only_names(optimizer.groups, model, fits) or found or _by_values(optimizer.groups, model, fits)
    return found


def _remembering(fits: Fits) -> Fits:
    known: dict[tuple[int, int], bool] = {}

    def answer(position: int, i: int) -> bool:
        if (position, i) not in known:
            known[position, i] = fits(position, i)
        return known[position, i]

    return answer


def _by_values(groups: Sequence[Sequence[int]], model: Params, fits: Fits) -> dict[int, str]:
    """The names of positions in any order, where one parameter alone is like what is kept there, and like nothing else."""
    positions = [p for group in groups for p in group]
    if len(positions) * len(model) > _MAX_PAIRS:
        return {}
    likes = {p: [i for i in range(len(model)) if fits(p, i)] for p in positions}
    takers = Counter(i for like in likes.values() for i in like)
    return {p: model[like[0]][0] for p, like in likes.items() if len(like) == 1 and takers[like[0]] == 1}


def only_names(groups: Sequence[Sequence[int]], model: Params, fits: Fits) -> dict[int, str]:
    """Position -> name, for those that have the same name in every order that fits; none where none does. Pure."""
    goal = tuple(map(len, groups))
    forward = _sweep(groups, model, fits)
    if not forward or goal not in forward[-1]:
        return {}
    alive, takers = {goal}, dict[int, set[str]]()
    for at in range(len(model) - 1, -1, -1):
        before = set()
        for state in forward[at]:
            for reached, position in _steps(groups, state, at, fits):
                if reached in alive:
                    before.add(state)
                    if position is not None:
                        takers.setdefault(position, set()).add(model[at][0])
        alive = before
    return {position: next(iter(names)) for position, names in takers.items() if len(names) == 1}


def _steps(groups: Sequence[Sequence[int]], state: State, i: int, fits: Fits) -> list[tuple[State, int | None]]:
    """Where a parameter can go: to the next position of a group, or to none (frozen)."""
    found: list[tuple[State, int | None]] = [(state, None)]
    for g, taken in enumerate(state):
        if taken < len(groups[g]) and fits(groups[g][taken], i):
            found.append(((*state[:g], taken + 1, *state[g + 1 :]), groups[g][taken]))
    return found


def _sweep(groups: Sequence[Sequence[int]], model: Params, fits: Fits) -> list[set[State]]:
    """The states that can be reached after each parameter; empty when there are too many."""
    spare = len(model) - sum(map(len, groups))
    layers = [{(0,) * len(groups)}]
    for i in range(len(model)):
        reached = {s for state in layers[-1] for s, _ in _steps(groups, state, i, fits) if i + 1 - sum(s) <= spare}
        if len(reached) > _MAX_STATES:
            return []
        layers.append(reached)
    return layers


def add_state(book: Book, files: Files, optimizer: Unflattened, names: Mapping[int, str], *, tp: int) -> None:
    """Every state of every position under its parameter's name."""
    open_positions = [p for group in optimizer.groups for p in group if p not in names]
    for position, values in {p: optimizer.state.get(p, {}) for group in optimizer.groups for p in group}.items():
        name = names.get(position, f"{optimizer.prefix}{position}")
        master = optimizer.masters.get(position)
        for key, record in (("fp32", master), *values.items()) if master is not None else values.items():
            stored = files.locate(optimizer.file, record, f"`{key}` of parameter {position}")
            if stored is not None and position in names:
                _add(book, name, key, stored, optimizer, tp=tp)
            elif stored is not None:
                book.add_apart(name, MASTER if key == "fp32" else (key,), stored, optimizer.rank, optimizer.path)
            elif record is not None:
                book.add_object(("optimizer", "state", name, key), kind_of(record), record, OPTIMIZER)
    open_positions = [p for p in open_positions if p in optimizer.masters or optimizer.state.get(p)]
    if open_positions:
        found = f"{len(open_positions)} positions that fit more than one or no parameter, such as {open_positions[0]}"
        files.findings.append(
            Finding("names-unstated", optimizer.path, "names of parameters in the optimizer's state", found, severity=NOTE)
        )


def _add(book: Book, name: str, key: str, stored: Stored, optimizer: Unflattened, *, tp: int) -> None:
    where = MASTER if key == "fp32" else (key,)
    if book.holds(name, where) and stored.shape == ():
        return
    fused, rank = optimizer.fused.get(name, (None, 0))
    if fused is not None and fused.holds(stored.shape, rank):
        pieces = fused.whole_pieces([whole_piece(stored.shape, stored.extent, optimizer.rank)], rank, stored.dtype)
        book.add(name, where, tp, stored.dtype, fused.whole_shape(stored.shape), pieces, optimizer.path)
        return
    book.add_whole(name, where, tp, stored, optimizer.rank, optimizer.path, is_stale=book.is_settled(name, where))
