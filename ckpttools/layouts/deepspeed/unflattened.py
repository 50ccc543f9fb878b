"""The optimizer when ZeRO is off: torch's own state dict by position, to which names are given where only one order fits.

Positions count the parameters of the groups one after another; within a group parameters keep the order of the
model. Frozen parameters are in no group. So the shapes at the positions are an interleaving of subsequences of the
model's shapes, and where a position can belong to one parameter only, it does. What stays open keeps its position as a name.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/fp16/unfused_optimizer.py (`state_dict`), v0.19.8; pytorch/pytorch,
torch/optim/optimizer.py (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.containers.torch_entries import RankFile
from ckpttools.findings import NOTE, Finding
from ckpttools.layouts.deepspeed.book import MASTER, Book
from ckpttools.layouts.deepspeed.states import Files, Stored, items, numbered, table
from ckpttools.layouts.families import OPTIMIZER
from ckpttools.pickles.views import kind_of

_MAX_STATES = 20_000

State = tuple[int, ...]
"""How many positions of each group were given away."""


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
    settings: dict[str, object] = field(default_factory=dict)
    rank: int = 0


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
    found.settings = {k: v for k, v in outer.items() if k not in ("optimizer_state_dict", "fp32_groups", "state", "param_groups")}
    found.settings["param_groups"] = inner.get("param_groups")
    return found


def shapes_by_position(files: Files, optimizer: Unflattened) -> dict[int, tuple[int, ...]]:
    """The shape of each position's parameter, by its master or by a state of more than one dimension or element."""
    found: dict[int, tuple[int, ...]] = {}
    for position in (p for group in optimizer.groups for p in group):
        records = [optimizer.masters.get(position), *optimizer.state.get(position, {}).values()]
        stored = [s for r in records if r is not None and (s := files.locate(optimizer.file, r, f"state of {position}"))]
        shapes = [s.shape for s in stored if s.shape != ()]
        if shapes or stored:
            found[position] = shapes[0] if shapes else ()
    return found


def name_positions(
    optimizer: Unflattened, shapes: Mapping[int, tuple[int, ...]], model: Sequence[tuple[str, tuple[int, ...]]]
) -> dict[int, str]:
    """The name of each position that can have one only. Pure.

    Args: model: the parameters in their order, buffers and further names of tied ones left out.
    """
    if any(optimizer.stated_names) and all(
        len(n) == len(p) for n, p in zip(optimizer.stated_names, optimizer.groups, strict=True)
    ):
        pairs = zip(optimizer.groups, optimizer.stated_names, strict=True)
        return {p: n for positions, names in pairs for p, n in zip(positions, names, strict=True)}
    if sum(map(len, optimizer.groups)) > len(model):
        return {}
    forward = _sweep(optimizer.groups, shapes, model)
    goal = tuple(map(len, optimizer.groups))
    if not forward or goal not in forward[-1]:
        return {}
    return _only_choices(optimizer.groups, shapes, model, forward, goal)


def _steps(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, tuple[int, ...]], state: State, shape: tuple[int, ...]
) -> list[tuple[State, int | None]]:
    """Where a parameter of this shape can go: to the next position of a group, or to none (frozen)."""
    found: list[tuple[State, int | None]] = [(state, None)]
    for g, taken in enumerate(state):
        if taken < len(groups[g]):
            position = groups[g][taken]
            if shapes.get(position, shape) == shape:
                found.append(((*state[:g], taken + 1, *state[g + 1 :]), position))
    return found


def _sweep(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, tuple[int, ...]], model: Sequence[tuple[str, tuple[int, ...]]]
) -> list[set[State]]:
    """The states that can be reached after each parameter; empty when there are too many."""
    spare = len(model) - sum(map(len, groups))
    layers = [{(0,) * len(groups)}]
    for done, (_, shape) in enumerate(model, start=1):
        reached = {s for state in layers[-1] for s, _ in _steps(groups, shapes, state, shape) if done - sum(s) <= spare}
        if len(reached) > _MAX_STATES:
            return []
        layers.append(reached)
    return layers


def _only_choices(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...]],
    model: Sequence[tuple[str, tuple[int, ...]]],
    forward: Sequence[set[State]],
    goal: State,
) -> dict[int, str]:
    """Position -> name, for those that have the same name on every way to the goal."""
    alive, choices = {goal}, [set[int | None]() for _ in model]
    takers: dict[int, set[str]] = {}
    for at in range(len(model) - 1, -1, -1):
        name, shape = model[at]
        before = set()
        for state in forward[at]:
            for reached, position in _steps(groups, shapes, state, shape):
                if reached in alive:
                    before.add(state)
                    choices[at].add(position)
                    if position is not None:
                        takers.setdefault(position, set()).add(name)
        alive = before
    return {position: next(iter(names)) for position, names in takers.items() if len(names) == 1}


def add_state(book: Book, files: Files, optimizer: Unflattened, names: Mapping[int, str], *, tp: int) -> None:
    """Every state of every position under its parameter's name."""
    open_positions = [p for group in optimizer.groups for p in group if p not in names]
    for position, values in {p: optimizer.state.get(p, {}) for group in optimizer.groups for p in group}.items():
        name = names.get(position, f"{position}")
        master = optimizer.masters.get(position)
        for key, record in (("fp32", master), *values.items()) if master is not None else values.items():
            stored = files.locate(optimizer.file, record, f"`{key}` of parameter {position}")
            if stored is not None:
                _add(book, name, key, stored, optimizer, tp=tp)
            elif record is not None:
                book.add_object(("optimizer", "state", name, key), kind_of(record), record, OPTIMIZER)
    if open_positions:
        found = f"{len(open_positions)} positions that fit more than one or no parameter, such as {open_positions[0]}"
        files.findings.append(
            Finding("names-unstated", optimizer.path, "names of parameters in the optimizer's state", found, severity=NOTE)
        )


def _add(book: Book, name: str, key: str, stored: Stored, optimizer: Unflattened, *, tp: int) -> None:
    where = MASTER if key == "fp32" else (key,)
    if book.holds(name, where) and stored.shape == ():
        return
    book.add_whole(name, where, tp, stored, optimizer.rank, optimizer.path, is_stale=book.is_settled(name, where))
