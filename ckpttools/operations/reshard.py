"""Reshard: the same checkpoint laid out for the ranks of another mesh, and proved to be the same.

What is selected is placed on the mesh, the target's layout arranges the files, and from there on it is a conversion like
any other. What the target cannot hold is named before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools import plan as plans
from ckpttools.containers import items
from ckpttools.errors import ConversionError, UsageError
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.layouts.families import MODEL
from ckpttools.model import Arrangement, FileEntry, Mesh, TensorEntry
from ckpttools.operations.conversion import Conversion, Manner, carry_out, companions, require_replaceable, require_whole
from ckpttools.operations.draws import Draw, draws
from ckpttools.operations.nesting import sequences_of
from ckpttools.operations.place import Placing, place
from ckpttools.operations.select import Choice, Selection, select
from ckpttools.operations.targets import BY_NAME, Details, Request, Target
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
    details: Details | None = None,
    is_dropping: bool = False,
    is_dry_run: bool = False,
    manner: Manner | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Resharding:
    """Lay the snapshot at a location out for the ranks of a mesh, and seal it.

    Args:
        target: a name of `targets.TARGETS`.
        choice: which tensors, under which names; everything that the target can hold unless given.
        details: what the target can be told beside the mesh.
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

    def ask(taken: _Taken) -> tuple[Assignment, Request]:
        assignment = place(taken.snapshot, taken.selection, mesh, placing or Placing(), needs_even=into.needs_even)
        return assignment, _request(assignment, snapshot, taken, details or Details())

    taken, assignment, request = _held(taken, into, ask, is_dropping=is_dropping, is_weights_only=bool(choice.is_weights_only))
    arrangement = into.arrange(request)
    plan = plans.make(
        taken.snapshot.checkpoint,
        arrangement,
        tensor_of=taken.selection.tensors,
        companions=_companions(snapshot, arrangement),
        listing=snapshot.listing,
    )
    conversion = Conversion(plan, taken.selection, arrangement, destination, is_file=False, carried=taken.carried)
    if on_plan is not None:
        on_plan(plan)
    if not is_dry_run:
        conversion = carry_out(conversion, taken.snapshot, manner)
    return Resharding(conversion, into.name, assignment, tuple(taken.unheld))


def _held(
    taken: _Taken,
    target: Target,
    ask: Callable[[_Taken], tuple[Assignment, Request]],
    *,
    is_dropping: bool,
    is_weights_only: bool,
) -> tuple[_Taken, Assignment, Request]:
    """What the target holds of what was taken; raises ConversionError for the rest, unless it may be left behind."""
    assignment, request = ask(taken)
    refused = target.refusals(request)
    taken = _without(taken, refused, target)
    if taken.unheld and not (is_dropping or (is_weights_only and not refused)):
        raise _unheld(target, taken.unheld)
    if refused:
        assignment, request = ask(taken)
    return taken, assignment, request


def _request(assignment: Assignment, snapshot: Snapshot, taken: _Taken, details: Details) -> Request:
    """What is asked of the target's layout."""
    return Request(
        assignment.tensors,
        assignment.mesh,
        taken.selection.objects,
        sequences_of(snapshot.checkpoint) | sequences_of(taken.snapshot.checkpoint),
        taken.selection.aliases,
        details,
    )


def _companions(snapshot: Snapshot, arrangement: Arrangement) -> list[FileEntry]:
    """Config and tokenizer files beside the source that the target does not write itself."""
    written = {file.path for file in arrangement.files}
    return [file for file in companions(snapshot) if file.path not in written]


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
    unheld: dict[str, str]
    """Name of a tensor or object -> why the target cannot hold it."""
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
    objects = everything.objects if target.holds_objects else ()
    held = {n: t for n, t in everything.tensors.items() if target.holds_state or t.family == MODEL or choice.include}
    unheld = {n: f"{t.family} state" for n, t in everything.tensors.items() if n not in held}
    unheld |= {} if target.holds_objects else {o.name: f"{o.kind}, no tensor" for o in everything.objects}
    if not held:
        raise ConversionError(f"nothing that {target.name} can hold is selected", found=f"{len(unheld)} entries of other kinds")
    aliases = {n: kept for n, kept in everything.aliases.items() if kept in held}
    selection = replace(everything, tensors=held, aliases=aliases, objects=objects)
    carried = tuple(t for t in inner if any(t.name == o.name or t.name.startswith(f"{o.name}.") for o in objects))
    return _Taken(located, selection, unheld, carried)


def _without(taken: _Taken, refused: Mapping[str, str], target: Target) -> _Taken:
    """What is left without the entries that the target refuses. A weight of the model is never left behind."""
    selection = taken.selection
    weights = [n for n, t in selection.tensors.items() if n in refused and t.family == MODEL]
    if weights:
        raise ConversionError(
            f"{target.name} cannot hold {len(weights)} of the model's tensors",
            found="; ".join(f"{n}: {refused[n]}" for n in weights[:_MAX_NAMED]),
            hints=[f"--exclude '{weights[0]}' leaves one out"],
        )
    kept = replace(
        selection,
        tensors={n: t for n, t in selection.tensors.items() if n not in refused},
        objects=tuple(o for o in selection.objects if o.name not in refused),
        aliases={n: name for n, name in selection.aliases.items() if name not in refused},
    )
    return replace(taken, selection=kept, unheld=taken.unheld | dict(refused))


def _unheld(target: Target, unheld: Mapping[str, str]) -> ConversionError:
    named = [f"{name} ({why})" for name, why in list(unheld.items())[:_MAX_NAMED]]
    listed = ", ".join(named) + (f", and {len(unheld) - _MAX_NAMED} more" if len(unheld) > _MAX_NAMED else "")
    return ConversionError(
        f"{target.name} cannot hold everything that is selected",
        found=listed,
        hints=["pass --drop to leave them behind, or --weights-only for the model's tensors alone"],
    )
