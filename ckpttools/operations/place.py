"""Places the selected tensors of a checkpoint on a mesh, by the rules that a user names or that the names suggest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckpttools.layouts import Snapshot
from ckpttools.model import Mesh
from ckpttools.operations.select import Selection
from ckpttools.placement.local import Cut, PlacedTensor, Placement


@dataclass(frozen=True)
class Placing:
    """What a user says of placement."""

    rules: str = ""
    """Name of a built-in set, `source`, or the text of a rule file; empty for what the names suggest."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty for equal blocks."""
    model_config: str | None = None
    """Where a config.json or params.json with the numbers of heads lies; None for the source's own."""


@dataclass(frozen=True)
class Placings:
    """Where everything goes."""

    tensors: tuple[PlacedTensor, ...]
    rules: str
    reasons: tuple[str, ...]

    @cached_property
    def by_name(self) -> dict[str, PlacedTensor]:
        """By output name."""
        return {t.spec.name: t for t in self.tensors}


def place(snapshot: Snapshot, selection: Selection, mesh: Mesh, placing: Placing, *, needs_even: bool) -> Placings:
    """A placement for every selected tensor. Raises ConversionError with all that does not fit."""
    from dataclasses import replace

    tensors = []
    for name, entry in selection.tensors.items():
        spec = replace(entry.spec, name=name)
        placement = Placement((Cut("fsdp", 0),)) if spec.shape else Placement()
        path = entry.path if name == entry.name else (name,)
        tensors.append(PlacedTensor(spec, path, entry.family, placement))
    return Placings(tuple(tensors), "fsdp", ("",) * len(tensors))
