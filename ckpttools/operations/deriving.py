"""Leaves out of a conversion what a target need not be given, because it follows from the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttools.errors import ConversionError, UsageError
from ckpttools.gather import Gather
from ckpttools.geometry import tiles
from ckpttools.layouts.deepspeed.write import Derived
from ckpttools.model import Box, Mesh, TensorEntry
from ckpttools.operations.apart import with_rows
from ckpttools.operations.holding import Taken
from ckpttools.operations.targets import Details, Target

_MEMORY_BYTES = 16 << 20
_TILE_ELEMENTS = 1 << 20


def without_derived(taken: Taken, target: Target, details: Details, mesh: Mesh) -> Taken:
    """What is left to write for a target that makes some tensors again, or has several as one; the latter are compared.

    Raises: UsageError: when the target is not told the ZeRO stage, or another one is. ConversionError: when tensors that must
        be equal are not.
    """
    if (target.derives is None) != (details.zero is None):
        raise UsageError("a DeepSpeed target and its ZeRO stage go together", hints=["--to deepspeed --zero 3"])
    if target.derives is None or details.zero is None:
        return taken
    selection = taken.selection
    derived = target.derives(selection.tensors, selection.objects, stage=details.zero, mesh=mesh)
    gather = Gather(taken.snapshot.source, memory_bytes=_MEMORY_BYTES)
    for names, text in (
        (derived.equal, "one tensor is written for several"),
        (derived.tied, "one weight under two names"),
    ):
        for name, kept in names.items():
            entry, other = selection.tensors[name], selection.tensors[kept]
            if not _are_equal(gather, entry, other):
                found = f"{other.name} has another value"
                raise ConversionError(f"{text}, and {name} is not the same", found=found, hints=[f"--exclude '{name}'"])
    same = {**derived.aliases, **derived.equal, **derived.tied}
    out = derived.left | same.keys()
    cut = {selection.tensors[n].name for n in derived.rows}  # such a master is not what its weight rounds
    rounded = {
        n: replace(t, rounded_from=_master(derived, n, taken) or (t.rounded_from if t.rounded_from not in cut else ""))
        for n, t in selection.tensors.items()
    }
    tensors = {n: _with_rows(t, n, derived) for n, t in rounded.items() if n not in out}
    first = {n: min(count, selection.tensors[n].spec.shape[0]) for n, count in derived.rows.items()} | dict(derived.kept_rows)
    padding = [f"{n}[{row}:]" for n, row in first.items() if n not in derived.left]
    left = tuple(rounded[n] for n in derived.left if rounded[n].rounded_from)
    return replace(
        taken,
        selection=replace(selection, tensors=tensors, aliases=same),
        derived=left,
        made_again=(*sorted(n for n in derived.left if not _is_master(selection.tensors, n, derived)), *padding),
    )


def _with_rows(entry: TensorEntry, name: str, derived: Derived) -> TensorEntry:
    """A tensor with the rows that it is written with."""
    if name in derived.kept_rows:
        return with_rows(with_rows(entry, derived.kept_rows[name]), entry.spec.shape[0])
    return with_rows(entry, derived.rows[name]) if name in derived.rows else entry


def _is_master(tensors: Mapping[str, TensorEntry], name: str, derived: Derived) -> bool:
    """Whether a weight is its own master, as in ZeRO 3: what is written is both."""
    master = tensors.get(derived.masters.get(name, ""))
    return master is not None and master.pieces == tensors[name].pieces


def _master(derived: Derived, name: str, taken: Taken) -> str:
    """The source's name of the tensor that a target takes a weight to be the rounding of; empty where there is none."""
    entries = taken.selection.tensors
    master = entries.get(derived.masters[name]) if name in derived.masters else None
    return master.name if master is not None and master.pieces != entries[name].pieces else ""


def _are_equal(gather: Gather, entry: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors of one shape have the same bytes."""
    if entry.pieces == other.pieces:
        return True
    return all(_value(gather, entry, tile) == _value(gather, other, tile) for tile in tiles(entry.spec.box, _TILE_ELEMENTS))


def _value(gather: Gather, entry: TensorEntry, box: Box) -> bytes:
    return b"".join(bytes(view) for view in gather.stream(entry, box))
