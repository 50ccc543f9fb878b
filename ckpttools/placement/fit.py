"""What a mesh must keep to, what does not fit one, and the nearest that would."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import log, prod

from ckpttools.model import Mesh

MAX_RANKS = 1 << 20
_MAX_TRIED = 20_000
_MAX_SIZES = 12
_MAX_NAMED = 8
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the sizes of some axes, multiplied, must keep to: divide a number, or not exceed it."""

    axes: tuple[str, ...]
    number: int
    what: str
    """What there are `number` of: `attention heads`, `rows (dimension 0)`."""
    is_limit: bool = False
    """Whether the number is a limit, rather than what must be divided evenly."""
    why: str = ""
    """What to say besides the numbers."""
    is_either: bool = False
    """Whether a multiple of the number will do, too: as many ranks then share each of what there are."""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether a mesh of such sizes keeps to it."""
        parts = prod(sizes.get(axis, 1) for axis in self.axes)
        is_even = self.number % parts == 0 or (self.is_either and parts % self.number == 0)
        return parts <= self.number if self.is_limit else is_even


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not fit, and the tensors of which it is true."""

    message: str
    expected: str = ""
    found: str = ""
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """In one line; tensors of several layers are named once, with `*` for the number."""
        alike = list(dict.fromkeys(_NUMBER.sub("*", name) for name in self.tensors))
        listed = alike if len(alike) < len(self.tensors) else self.tensors
        named = ", ".join(f"`{name}`" for name in listed[:_MAX_NAMED])
        more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
        more += f", {len(self.tensors)} tensors" if len(listed) < len(self.tensors) else ""
        told = "; ".join(
            filter(None, (f"expected {self.expected}" if self.expected else "", f"found {self.found}" if self.found else ""))
        )
        return self.message + (f" ({told})" if told else "") + (f": {named}{more}" if named else "")


@dataclass
class Requirements:
    """Collects what tensors ask of a mesh, and what no mesh can mend."""

    constraints: dict[Constraint, list[str]] = field(default_factory=lambda: defaultdict(list))
    faults: dict[tuple[str, str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, constraint: Constraint, tensor: str = "") -> None:
        """Enters a constraint, and the tensor that has it."""
        tensors = self.constraints[constraint]
        if tensor:
            tensors.append(tensor)

    def fault(self, message: str, expected: str = "", found: str = "", tensor: str = "") -> None:
        """Enters what is wrong whatever the sizes are."""
        tensors = self.faults[message, expected, found]
        if tensor:
            tensors.append(tensor)

    def problems(self, mesh: Mesh) -> list[Problem]:
        """What does not fit a mesh."""
        sizes = dict(mesh.axes)
        found = [Problem(*key, tuple(dict.fromkeys(tensors))) for key, tensors in self.faults.items()]
        for constraint, tensors in self.constraints.items():
            if not constraint.holds(sizes):
                found.append(_problem(constraint, sizes, list(dict.fromkeys(tensors))))
        return found


def _problem(constraint: Constraint, sizes: Mapping[str, int], tensors: Sequence[str]) -> Problem:
    named = " times ".join(f"{axis}={sizes[axis]}" for axis in constraint.axes if axis in sizes)
    parts = prod(sizes.get(axis, 1) for axis in constraint.axes)
    if constraint.is_limit:
        message = constraint.why or f"{named} is more than there are {constraint.what}"
        return Problem(message, f"at most {constraint.number}", str(parts), tuple(tensors))
    message = f"{constraint.number} {constraint.what} cannot be divided evenly among {named}"
    if constraint.why:
        message += f", {constraint.why}"
    step = -(-constraint.number // parts)
    expected = f"a divisor{' or a multiple' if constraint.is_either else ''} of {constraint.number}"
    return Problem(message, expected, f"{parts} (shares of up to {step})", tuple(tensors))


def nearest_mesh(mesh: Mesh, constraints: Iterable[Constraint]) -> Mesh | None:
    """The mesh nearest to one that keeps to all constraints: of as many ranks where there is one. Pure.

    Only the sizes of its axes are varied; nearness is the sum of the ratios by which they change. None where none of the
    meshes tried fits.
    """
    asked = list(constraints)
    names = [name for name, _ in mesh.axes]
    wanted = [size for _, size in mesh.axes]

    def fits(sizes: Sequence[int]) -> bool:
        table = dict(zip(names, sizes, strict=True))
        return all(constraint.holds(table) for constraint in asked)

    def distance(sizes: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        ratios = [abs(log(size / want)) for size, want in zip(sizes, wanted, strict=True)]
        return abs(log(prod(sizes) / mesh.ranks)), round(sum(ratios), 9), tuple(-size for size in sizes)

    same = [sizes for sizes in islice(_factorizations(mesh.ranks, len(names)), _MAX_TRIED) if fits(sizes)]
    found = same or [sizes for sizes in islice(product(*_sizes_near(mesh, asked)), _MAX_TRIED) if fits(sizes)]
    if not found:
        return None
    best: tuple[int, ...] = min(found, key=distance)
    return Mesh(tuple((name, size) for name, size in zip(names, best, strict=True) if size > 1))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of `count` numbers, order counting."""
    if count == 0:
        return
    if count == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, count - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _sizes_near(mesh: Mesh, constraints: Sequence[Constraint]) -> list[list[int]]:
    """Per axis the sizes nearest to the asked one that keep to what is asked of the axis alone."""
    found = []
    for name, size in mesh.axes:
        own = [constraint for constraint in constraints if name in constraint.axes]
        fitting = [n for n in range(1, min(2 * size, 4096) + 1) if all(c.holds({name: n}) for c in own)]
        found.append(sorted(fitting, key=lambda n: abs(log(n / size)))[:_MAX_SIZES] or [1])
    return found
