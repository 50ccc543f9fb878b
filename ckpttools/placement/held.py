"""What one rank's file holds of each tensor, and where in the file the boxes of it go. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import ConversionError
from ckpttools.geometry import contiguous_runs, intersect
from ckpttools.model import Box, Mesh, Slot, TensorSpec
from ckpttools.placement.local import LocalTensor, Part, PlacedTensor

_MAX_NAMED = 8


@dataclass(frozen=True)
class HeldTensor:
    """A rank's own tensor: its share of a global one, stored row-major."""

    tensor: PlacedTensor
    local: LocalTensor

    @property
    def spec(self) -> TensorSpec:
        """The rank's tensor, under the name of the global one."""
        return TensorSpec(self.tensor.spec.name, self.tensor.spec.dtype, self.local.shape)

    @classmethod
    def whole(cls, spec: TensorSpec) -> HeldTensor:
        """A tensor of which the rank has all."""
        return cls(PlacedTensor(spec, ()), LocalTensor(spec.shape, (Part(spec.box, spec.box),)))

    def within(self, box: Box) -> HeldTensor:
        """A box of the rank's own tensor, as a tensor."""
        found = []
        for part in self.local.parts:
            shared = intersect(part.local, box)
            if shared is not None and (shared.volume or not box.volume):
                shift = [o - p for o, p in zip(shared.offsets, part.local.offsets, strict=True)]
                offsets = tuple(o + d for o, d in zip(part.box.offsets, shift, strict=True))
                place = tuple(o - b for o, b in zip(shared.offsets, box.offsets, strict=True))
                found.append(Part(Box(offsets, shared.sizes), Box(place, shared.sizes)))
        return HeldTensor(self.tensor, LocalTensor(box.sizes, tuple(found)))

    @property
    def is_whole(self) -> bool:
        """Whether it is the global tensor itself."""
        return self.local.shape == self.tensor.spec.shape and len(self.local.parts) == 1

    def slots(self, offset: int) -> list[Slot]:
        """What fills it from byte `offset` of a file on: a slot per stretch of the rank's tensor that is one box."""
        spec = self.spec
        found = []
        for part in self.local.parts:
            shift = [g - o for g, o in zip(part.box.offsets, part.local.offsets, strict=True)]
            for run, place in contiguous_runs(part.local, self.local.shape):
                box = Box(tuple(o + d for o, d in zip(run.offsets, shift, strict=True)), run.sizes)
                place_bytes, length_bytes = spec.dtype.length_bytes(place), spec.dtype.length_bytes(box.volume)
                found.append(Slot(spec.name, box, offset + place_bytes, length_bytes))
        return found


@dataclass(frozen=True)
class TurnedTensors:
    """A rank's shares of several matrices as one tensor, each turned (its columns become rows) and one after the other."""

    spec: TensorSpec
    """Of the one tensor."""
    parts: tuple[HeldTensor, ...]

    @property
    def local(self) -> LocalTensor:
        """Its shape; what it is parts of, its parts know."""
        return LocalTensor(self.spec.shape, ())

    @property
    def slot_count(self) -> int:
        """How many slots it takes."""
        return sum(part.box.sizes[1] for held in self.parts for part in held.local.parts if part.box.volume)

    def slots(self, offset: int) -> list[Slot]:
        """What fills it from byte `offset` of a file on: a slot per column of each share (and run of it that is one box)."""
        found = []
        for held in self.parts:
            rows, dtype = held.local.shape[0], held.spec.dtype
            for part in held.local.parts:
                (row, column), (count, columns) = part.box.offsets, part.box.sizes
                length = dtype.length_bytes(count)
                for j in range(columns if count else 0):
                    place = (part.local.offsets[1] + j) * rows + part.local.offsets[0]
                    box = Box((row, column + j), (count, 1))
                    found.append(Slot(held.spec.name, box, offset + dtype.length_bytes(place), length))
            offset += held.spec.length_bytes
        return found


def held_by(tensors: Iterable[PlacedTensor], mesh: Mesh, rank: int) -> list[HeldTensor]:
    """What a rank holds of some tensors, in their order; those of other stages are not there."""
    return [HeldTensor(t, local) for t in tensors if (local := t.local(mesh, rank)) is not None]


def uncuttable(tensors: Iterable[PlacedTensor], mesh: Mesh) -> dict[str, str]:
    """Per output name: why a tensor cannot be cut at all, for elements of less than a byte."""
    return {
        t.spec.name: f"{t.spec.dtype} {list(t.spec.shape)}: elements of less than a byte cannot be cut"
        for t in tensors
        if t.spec.dtype.is_sub_byte and any(not h.is_whole for r in range(mesh.ranks) for h in held_by([t], mesh, r))
    }


def require_axes(mesh: Mesh, axes: Sequence[str], why: str) -> None:
    """Raise ConversionError when a mesh has ranks along axes that a target does not know."""
    other = [f"{name}={size}" for name, size in mesh.axes if name not in axes and size > 1]
    if other:
        fitting = ",".join(f"{name}={dict(mesh.axes).get(name, 1)}" for name in axes)
        raise ConversionError(
            f"{why}: {','.join(other)}",
            expected=f"a mesh of {', '.join(axes)} only",
            found=str(mesh),
            hints=[f"--mesh {fitting} has a place for every rank"],
        )


def require_none(refused: Mapping[str, str], target: str, *, hints: Sequence[str] = ()) -> None:
    """Raise ConversionError with every name and reason (up to a limit) when a target cannot hold something."""
    if not refused:
        return
    named = [f"`{name}` ({why})" for name, why in list(refused.items())[:_MAX_NAMED]]
    more = f" and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
    raise ConversionError(f"{target} cannot hold {len(refused)} of the entries", found=", ".join(named) + more, hints=hints)
