"""The ranks that are written for: pipeline stages, data-parallel ranks, experts' among them, tensor-parallel ones. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckpttools.errors import UsageError
from ckpttools.layouts.deepspeed.names import model_name, stem_of
from ckpttools.model import Mesh
from ckpttools.placement.local import canonical_mesh, coordinate

_MAX_RANKS = 1 << 16
"""Planning takes about a millisecond for the file of each, of a model of a hundred tensors."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How many ranks there are along each axis; `ep` divides `dp`."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @classmethod
    def of(cls, mesh: Mesh) -> Grid:
        """Of a mesh as `world_mesh` gives it."""
        sizes = dict(mesh.axes)
        ep = sizes.get("ep", 1)
        return cls(sizes.get("pp", 1), sizes.get("dp", 1) * ep, ep, sizes.get("tp", 1))

    @property
    def mp(self) -> int:
        """Model-parallel ranks: pipeline stages times tensor-parallel ranks."""
        return self.pp * self.tp

    @property
    def shares(self) -> Mesh:
        """The axes along which ranks hold something else of a tensor."""
        return Mesh((("pp", self.pp), ("ep", self.ep), ("tp", self.tp)))

    def rank(self, pp: int, ep: int, tp: int) -> int:
        """The number of a rank of `shares`."""
        return (pp * self.ep + ep) * self.tp + tp

    def places(self) -> Iterator[tuple[int, int]]:
        """(pipeline stage, tensor-parallel rank) of each model-parallel rank, in order."""
        return ((pp, tp) for pp in range(self.pp) for tp in range(self.tp))

    def stems(self, stage: int) -> list[str]:
        """What the names of the model files begin with, the first rank's first."""
        dps = range(self.dp) if stage == 3 else (None,)
        return [stem_of(model_name(mp, dp)) for mp in range(self.mp) for dp in dps]


def world_mesh(mesh: Mesh) -> Mesh:
    """A mesh whose sizes multiply to the number of ranks: `ep` is taken out of the data-parallel ranks, which it is part of.

    DeepSpeed cuts a group as it likes, so `fsdp` is another word for `dp`.

    Raises: UsageError: when there are too many, or `ep` does not divide the data-parallel ranks.
    """
    ranks = prod(size for name, size in mesh.axes if name != "ep")
    if ranks > _MAX_RANKS:
        raise UsageError(
            f"the mesh has too many ranks for DeepSpeed's files, of which each rank has its own: {mesh}",
            expected=f"at most {_MAX_RANKS}",
            found=str(ranks),
            hints=["a universal checkpoint is for any number of data-parallel ranks: with --mesh dp=1 it is the same"],
        )
    sizes = dict(mesh.axes)
    dp, ep = sizes.pop("dp", 1) * sizes.pop("fsdp", 1), sizes.get("ep", 1)
    if dp % ep:
        expected = "expert-parallel ranks that divide the data-parallel ones"
        raise UsageError("experts are shared by data-parallel ranks", expected=expected, found=str(mesh))
    if any(name in ("dp", "fsdp") for name, _ in mesh.axes) or ep > 1:
        sizes["dp"] = dp // ep
    return Mesh(tuple(sizes.items()))


def stated_mesh(world: Mesh, asked: Mesh) -> Mesh:
    """A mesh as `world_mesh` gives it -> as a user gives one, with the word for data-parallel ranks of the one asked for."""
    sizes, words = dict(world.axes), {name for name, _ in asked.axes} & {"dp", "fsdp"}
    word, dp = ("fsdp" if words == {"fsdp"} else "dp"), sizes.pop("dp", 1) * sizes.get("ep", 1)
    return canonical_mesh(Mesh((*sizes.items(), *([(word, dp)] if dp > 1 else []))))


def rank_at(mesh: Mesh, rank: int) -> dict[str, int]:
    """Coordinates of a rank along the axes that a user gives; the expert-parallel one follows from the data-parallel ones."""
    ep = dict(mesh.axes).get("ep", 1)
    others = Mesh(tuple(axis for axis in canonical_mesh(mesh).axes if axis[0] != "ep"))
    places = coordinate(others, rank)
    return places | {"ep": (places.get("dp", 0) * dict(mesh.axes).get("fsdp", 1) + places.get("fsdp", 0)) % ep}
