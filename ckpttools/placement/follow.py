"""Which parameter a tensor of optimizer state belongs to, told by its name, or by its number and the shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ckpttools.model import Path, TensorSpec
from ckpttools.placement.globs import unwrapped

_MAX_PARTS = 48
Named = tuple[TensorSpec, Path]


def parameters_of_state(
    state: Sequence[Named], parameters: Sequence[TensorSpec], orders: Sequence[Sequence[TensorSpec]]
) -> list[TensorSpec | None]:
    """Per tensor of state the parameter that it belongs to; None where that cannot be told. Pure.

    A name that contains a parameter's dotted name, or its end where only one parameter ends so, is that parameter's. State
    that is numbered (`state.7.exp_avg`) belongs to the parameter with that number in the first of the orders in which every
    number has a tensor of its parameter's shape, or nothing but factors of it.

    Args:
        parameters: of the model.
        orders: in which an optimizer may have numbered them.
    """
    ends = _Ends(parameters)
    found: list[TensorSpec | None] = []
    numbered: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for position, (spec, path) in enumerate(state):
        place = _number_in(path, spec.name)
        if place is not None:
            numbered[place[0]].append((position, place[1]))
        found.append(None if place is not None else ends.owner(spec.name))
    for places in numbered.values():
        order = _agreeing_order(places, state, orders)
        for position, number in places if order is not None else ():
            found[position] = order[number] if order is not None else None
    return found


class _Ends:
    """Parameters by the ends of their names."""

    def __init__(self, parameters: Sequence[TensorSpec]) -> None:
        self._by_end: dict[str, TensorSpec | None] = {}
        for spec in parameters:
            name = _short(spec.name)
            for end in _ends(name):
                self._by_end[end] = None if end in self._by_end and end != name else spec
        # a whole name is that parameter's, whatever longer names end with it
        self._by_end.update({_short(spec.name): spec for spec in parameters})

    def owner(self, name: str) -> TensorSpec | None:
        """The parameter whose name, or whose name's end, is the longest stretch of a name of optimizer state."""
        parts = _short(name).split(".")
        for length in range(len(parts) - 1, 0, -1):
            for start in range(len(parts) - length, -1, -1):
                stretch = ".".join(parts[start : start + length])
                if stretch in self._by_end:
                    return self._by_end[stretch]
        return None


def _short(name: str) -> str:
    """A name without wrappers, and no more than its last parts: time grows with the square of their number."""
    return ".".join(unwrapped(name).rsplit(".", _MAX_PARTS)[-_MAX_PARTS:])


def _ends(name: str) -> Iterator[str]:
    """A dotted name without its first 0, 1, 2, ... parts."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _number_in(path: Path, name: str) -> tuple[Path, int] | None:
    """(keys up to `state`, number) of numbered state; None for state that is named."""
    keys: Path = path if len(path) > 2 else tuple(name.split("."))
    for i in range(len(keys) - 2):
        key, after = keys[i], keys[i + 1]
        if key == "state" and not isinstance(after, bool):
            if isinstance(after, int) and after >= 0:
                return keys[: i + 1], after
            if isinstance(after, str) and after.isascii() and after.isdigit() and i + 3 == len(keys):
                return keys[: i + 1], int(after[:9])
    return None


def _agreeing_order(
    places: Sequence[tuple[int, int]], state: Sequence[Named], orders: Sequence[Sequence[TensorSpec]]
) -> Sequence[TensorSpec] | None:
    """The first order of parameters with which the shapes of all numbered state agree."""
    shapes: Mapping[int, list[tuple[int, ...]]] = defaultdict(list)
    for position, number in places:
        shapes[number].append(state[position][0].shape)
    for order in orders:
        if max(shapes) < len(order) and all(_agrees(order[number].shape, found) for number, found in shapes.items()):
            return order
    return None


def _agrees(shape: tuple[int, ...], found: Sequence[tuple[int, ...]]) -> bool:
    """Whether state of these shapes can be that of a parameter: one is its shape, or each is a sum over some of it."""
    return shape in found or all(_is_factor(shape, other) for other in found)


def _is_factor(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a shape is another without some of its dimensions, or with 1 in their place: a row of sums, a step count."""
    sizes = iter(shape)
    return all(any(n == size for size in sizes) for n in other if n != 1)
