"""What each rank of a mesh needs of a source: the files it draws on, and how many bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.geometry import BoxIndex, factored
from ckpttools.model import Box, Mesh, TensorEntry
from ckpttools.placement.local import PlacedTensor


@dataclass
class Draw:
    """What one rank needs."""

    rank: int
    at: str
    """Its coordinates: `fsdp=1,tp=0`."""
    length_bytes: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    """Source file -> bytes of it."""


def draws(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    sources: Mapping[str, TensorEntry],
    coordinates: Callable[[int], Mapping[str, int]],
) -> list[Draw]:
    """Rank by rank; a box that several ranks hold counts for each of them. Pure.

    Args: coordinates: what is shown of a rank: its place along each axis, in the order of the axes.
    """
    found = [Draw(rank, ",".join(f"{axis}={place}" for axis, place in coordinates(rank).items())) for rank in range(mesh.ranks)]
    for tensor in tensors:
        entry = sources[tensor.spec.name]
        index = BoxIndex([p.box for p in entry.pieces])
        known: dict[Box, dict[str, int]] = {}
        for draw in found:
            local = tensor.local(mesh, draw.rank)
            for part in local.parts if local else ():
                if part.box not in known:
                    known[part.box] = _files(entry, index, part.box)
                for file, count in known[part.box].items():
                    draw.sources[file] = draw.sources.get(file, 0) + count
                    draw.length_bytes += count
    return found


def _files(entry: TensorEntry, index: BoxIndex, box: Box) -> dict[str, int]:
    """Source file -> bytes of it that lie in a box."""
    files: dict[str, int] = {}
    counted = (part for _, part in factored(box, entry.factors))
    for k, shared in (hit for part in counted for hit in index.overlapping(part)):
        file = entry.pieces[k].extent.file
        files[file] = files.get(file, 0) + entry.spec.dtype.length_bytes(shared.volume)
    return files
