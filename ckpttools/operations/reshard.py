"""Reshard: the same checkpoint laid out for the ranks of another mesh, and proved to be the same.

What is selected is placed on the mesh, the target's layout arranges the files, and from there on it is a conversion like
any other. What the target cannot hold is named before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckpttools import plan as plans
from ckpttools.containers import items
from ckpttools.containers.trees import persistent_ids
from ckpttools.errors import ConversionError, UsageError
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.layouts.families import MODEL
from ckpttools.model import Mesh, ObjectEntry, TensorEntry
from ckpttools.operations.conversion import Conversion, Manner, carry_out, companions, require_replaceable, require_whole
from ckpttools.operations.draws import Draw, draws
from ckpttools.operations.nesting import sequences_of
from ckpttools.operations.place import Placing, place
from ckpttools.operations.select import Choice, Selection, select
from ckpttools.operations.targets import BY_NAME, Request, Target
from ckpttools.placement.assign import Assignment
from ckpttools.plan import Plan

_MAX_NAMED = 12


@dataclass(frozen=True)
class Resharding:
    """What was (or would be) written, and how it was placed."""

    conversion: Conversion
    target: str
    assignment: Assignment
    dropped: tuple[str, ...] = ()
    """Names of what the target cannot hold."""

    def draws(self) -> list[Draw]:
        """What each rank of the mesh needs of the source, rank by rank."""
        return draws(self.assignment.tensors, self.assignment.mesh, self.conversion.selection.tensors)


def reshard(
    location: str,
    destination: str,
    *,
    target: str,
    mesh: Mesh,
    choice: Choice | None = None,
    placing: Placing | None = None,
    files_per_rank: int = 1,
    max_part_bytes: int | None = None,
    is_dropping: bool = False,
    is_dry_run: bool = False,
    manner: Manner | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Resharding:
    """Lay the snapshot at a location out for the ranks of a mesh, and seal it.

    Args:
        target: a name of `targets.TARGETS`.
        choice: which tensors, under which names; everything that the target can hold unless given.
        placing: how tensors are placed on the mesh; by the rules that the names suggest unless given.
        is_dropping: leave behind what the target cannot hold, instead of refusing.

    Raises: FindingsError: when the source is not whole. ConversionError: when it cannot be done as asked, nothing having
        been written. DestinationError, LockedError, StorageError: when it cannot be written.
    """
    manner, choice = manner or Manner(), choice or Choice()
    into = _target(target)
    require_replaceable(destination, is_file=False, is_overwriting=manner.is_overwriting)
    snapshot = open_snapshot(location)
    taken = _take(snapshot, into, choice, manner.allowed_findings)
    if taken.unheld and not (is_dropping or choice.is_weights_only):
        raise _unheld(into, taken.unheld)
    assignment = place(taken.snapshot, taken.selection, mesh, placing or Placing(), needs_even=into.needs_even)
    request = Request(
        assignment.tensors,
        assignment.mesh,
        taken.selection.objects,
        sequences_of(snapshot.checkpoint) | sequences_of(taken.snapshot.checkpoint),
        taken.selection.aliases,
        files_per_rank,
        max_part_bytes,
    )
    arrangement = into.arrange(request)
    plan = plans.make(
        taken.snapshot.checkpoint,
        arrangement,
        tensor_of=taken.selection.tensors,
        companions=companions(snapshot),
        listing=snapshot.listing,
    )
    conversion = Conversion(plan, taken.selection, arrangement, destination, is_file=False, carried=taken.carried)
    if on_plan is not None:
        on_plan(plan)
    if not is_dry_run:
        conversion = carry_out(conversion, taken.snapshot, manner)
    return Resharding(conversion, into.name, assignment, taken.unheld)


def _target(name: str) -> Target:
    if name not in BY_NAME:
        raise UsageError(f"no target is named `{name}`", expected=", ".join(BY_NAME))
    return BY_NAME[name]


@dataclass(frozen=True)
class _Taken:
    """What goes over to a target."""

    snapshot: Snapshot
    """With the exact place of every piece."""
    selection: Selection
    unheld: tuple[str, ...]
    carried: tuple[TensorEntry, ...]
    """Tensors inside of objects that go over byte for byte."""


def _take(snapshot: Snapshot, target: Target, choice: Choice, allowed: Sequence[str]) -> _Taken:
    """Choose what is written, and tell what the target has no place for."""
    checkpoint = snapshot.checkpoint
    located = replace(snapshot, checkpoint=items.locate(snapshot.source, checkpoint))
    require_whole(located, allowed)
    names = {t.name for t in checkpoint.tensors}
    inner = [t for t in located.checkpoint.tensors if t.name not in names]
    if target.holds_whole_items and inner:  # an object that holds tensors stays the one object that it is
        opened = {o.name: o for o in located.checkpoint.objects}
        whole = tuple(opened.get(o.name, o) for o in checkpoint.objects)
        tensors = tuple(t for t in located.checkpoint.tensors if t.name in names)
        located = replace(located, checkpoint=replace(located.checkpoint, tensors=tensors, objects=whole))
    else:
        inner = []
    choice = choice if target.shares_storage else replace(choice, is_expanding_tied=True)
    everything = select(located.checkpoint, choice, is_weights_only_by_default=False)
    objects, lost = _carriable(everything.objects, target)
    tensors_held = {n: t for n, t in everything.tensors.items() if target.holds_state or t.family == MODEL or choice.include}
    unheld = [n for n in everything.tensors if n not in tensors_held] + lost
    if not tensors_held:
        raise ConversionError(f"nothing that {target.name} can hold is selected", found=f"{len(unheld)} entries of other kinds")
    aliases = {n: kept for n, kept in everything.aliases.items() if kept in tensors_held}
    selection = replace(everything, tensors=tensors_held, aliases=aliases, objects=objects)
    kept_objects = {o.name for o in objects}
    carried = tuple(t for t in inner if any(t.name.startswith(f"{name}.") or t.name == name for name in kept_objects))
    return _Taken(located, selection, tuple(unheld), carried)


def _carriable(objects: Sequence[ObjectEntry], target: Target) -> tuple[tuple[ObjectEntry, ...], list[str]]:
    """(objects that the target holds, names of the others)."""
    if not target.holds_objects:
        return (), [o.name for o in objects]
    kept, lost = [], []
    for entry in objects:
        is_item = entry.extent is not None and entry.extent.container == "torch" and entry.extent.encoding is None
        is_read = entry.record is not None or entry.kind == "NoneType"
        if (target.holds_whole_items and is_item) or (is_read and next(persistent_ids(entry.record), None) is None):
            kept.append(entry)
        else:
            lost.append(entry.name)
    return tuple(kept), lost


def _unheld(target: Target, names: Sequence[str]) -> ConversionError:
    listed = ", ".join(names[:_MAX_NAMED]) + (f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
    return ConversionError(
        f"{target.name} cannot hold everything that is selected",
        found=listed,
        hints=["pass --drop to leave them behind, or --weights-only for the model's tensors alone"],
    )
