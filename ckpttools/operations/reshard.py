"""Reshard: the same checkpoint laid out for the ranks of another mesh, and proved to be the same.

What is selected is placed on the mesh, the target's layout arranges the files, and from there on it is a conversion like
any other. What the target cannot hold is named before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpttools import plan as plans
from ckpttools.errors import UsageError
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.model import Arrangement, FileEntry, Mesh
from ckpttools.operations.apart import layers_apart
from ckpttools.operations.conversion import Conversion, Manner, carry_out, companions, require_replaceable, unproved
from ckpttools.operations.deriving import without_derived
from ckpttools.operations.draws import Draw, draws
from ckpttools.operations.holding import Taken, take, unheld_error, without
from ckpttools.operations.naming import Naming, name_tensors
from ckpttools.operations.nesting import sequences_of
from ckpttools.operations.place import Placing, Told, place
from ckpttools.operations.replicas import COMPARE, allowed, settle
from ckpttools.operations.select import Choice
from ckpttools.operations.spelling import STACKED, spell
from ckpttools.operations.targets import BY_NAME, Details, Request, Target
from ckpttools.placement.assign import Assignment, require_fit
from ckpttools.placement.local import canonical_mesh
from ckpttools.plan import Plan


@dataclass(frozen=True)
class Resharding:
    """What was (or would be) written, and how it was placed."""

    conversion: Conversion
    target: str
    mesh: Mesh
    """As it was asked for, in the order in which ranks are numbered; of the assignment's only the product is the ranks."""
    assignment: Assignment
    dropped: tuple[str, ...] = ()
    """Names of what the target cannot hold."""

    @property
    def made_again(self) -> tuple[str, ...]:
        """Names of tensors and objects that are not written because whoever loads the output makes them again."""
        is_told = BY_NAME[self.target].derives is not None  # other layouts call their objects otherwise
        return (*self.conversion.made_again, *(self.conversion.unwritten if is_told else ()))

    def draws(self) -> list[Draw]:
        """What each rank of the mesh needs of the source, rank by rank."""
        places = partial(BY_NAME[self.target].rank_at, self.mesh)

        def coordinates(rank: int) -> dict[str, int]:
            found = places(rank)
            return {axis: found[axis] for axis, _ in self.mesh.axes}

        return draws(self.assignment.tensors, self.assignment.mesh, self.conversion.selection.tensors, coordinates)


def reshard(
    location: str,
    destination: str,
    *,
    target: str,
    mesh: Mesh,
    roots: Sequence[str] = (),
    replicas: str = COMPARE,
    choice: Choice | None = None,
    placing: Placing | None = None,
    naming: Naming | None = None,
    details: Details | None = None,
    is_dropping: bool = False,
    is_dry_run: bool = False,
    manner: Manner | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Resharding:
    """Lay the snapshot at a location out for the ranks of a mesh, and seal it.

    Args:
        target: a name of `targets.TARGETS`.
        roots: further places that hold files of the same snapshot.
        replicas: what to do where copies of a box differ, one of `replicas.RULES`.
        choice: which tensors, under which names; everything that the target can hold unless given.
        details: what the target can be told beside the mesh.
        naming: the names of another program that the model's tensors get.
        placing: how tensors are placed on the mesh; by the rules that the names suggest unless given.
        is_dropping: leave behind what the target cannot hold, instead of refusing.

    Raises: FindingsError: when the source is not whole. ConversionError: when it cannot be done as asked, nothing having
        been written. DestinationError, LockedError, StorageError: when it cannot be written.
    """
    manner, choice, details = manner or Manner(), choice or Choice(), details or Details()
    into = _target(target, details)
    asked, mesh = mesh, into.world(mesh)
    require_replaceable(destination, (location, *roots), is_file=False, is_overwriting=manner.is_overwriting)
    snapshot = open_snapshot(location, roots=roots)
    manner = replace(manner, allowed_findings=allowed(replicas, manner.allowed_findings))
    taken = take(snapshot, into, choice, manner.allowed_findings)
    taken, notes = _named(without_derived(taken, into, details, mesh), naming, into, mesh)

    def ask(taken: Taken) -> tuple[Assignment, Request]:
        placed = replace(placing or Placing(), virtual_stages=details.virtual_stages)
        even, copies = into.needs_even, into.copies_heads
        chosen = taken.selection
        told = Told(*into.own_places(chosen.tensors, chosen.objects, mesh, placed.stage_layers))
        found = taken.snapshot, chosen
        assignment = place(*found, mesh, placed, needs_even=even, copies_heads=copies, told=told, usual=into.rules)
        require_fit(assignment, asked, lambda nearest: into.stated(nearest, asked))
        return assignment, _request(assignment, snapshot, taken, details)

    taken, assignment, request = _held(taken, into, ask, is_dropping=is_dropping, is_weights_only=bool(choice.is_weights_only))
    taken, record = _settled(taken, COMPARE if is_dry_run else replicas, manner)  # a dry run reads no values
    conversion = _conversion(snapshot, taken, into.arrange(request), destination)
    conversion = replace(conversion, replicas=record, notes=(*unproved(snapshot), *notes))
    if on_plan is not None:
        on_plan(conversion.plan)
    if not is_dry_run:
        conversion = carry_out(conversion, taken.snapshot, manner)
    return Resharding(conversion, into.name, canonical_mesh(asked), assignment, tuple(taken.unheld))


def _named(taken: Taken, naming: Naming | None, target: Target, mesh: Mesh) -> tuple[Taken, tuple[str, ...]]:
    """What was taken, under the names that are asked for, and what is to be said about them."""
    if target.parts_layers:
        taken = replace(taken, selection=replace(taken.selection, tensors=layers_apart(taken.selection.tensors)))
    if naming is None or not naming.names:
        return replace(taken, selection=spell(taken.selection, target.spelling)), ()
    naming = replace(naming, is_stacked=target.spelling == STACKED, mesh=mesh if target.keeps_arguments else None)
    named = name_tensors(taken.selection, taken.snapshot, naming)
    return replace(taken, selection=named.selection), named.notes


def _held(
    taken: Taken,
    target: Target,
    ask: Callable[[Taken], tuple[Assignment, Request]],
    *,
    is_dropping: bool,
    is_weights_only: bool,
) -> tuple[Taken, Assignment, Request]:
    """What the target holds of what was taken; raises ConversionError for the rest, unless it may be left behind."""
    assignment, request = ask(taken)
    refused = target.refusals(request)
    taken = without(taken, refused, target)
    if taken.unheld and not (is_dropping or (is_weights_only and not refused)):
        raise unheld_error(target, taken.unheld)
    if refused:
        assignment, request = ask(taken)
    return taken, assignment, request


def _settled(taken: Taken, rule: str, manner: Manner) -> tuple[Taken, Mapping[str, object]]:
    """What was taken, with a copy chosen of every box that has several; and how."""
    settled = settle(taken.snapshot, taken.selection.tensors, rule, jobs=manner.jobs, memory_bytes=manner.memory_bytes)
    return replace(taken, selection=replace(taken.selection, tensors=settled.tensors)), settled.record


def _conversion(snapshot: Snapshot, taken: Taken, arrangement: Arrangement, destination: str) -> Conversion:
    """The plan that fills the files of a target."""
    plan = plans.make(
        taken.snapshot.checkpoint,
        arrangement,
        tensor_of=taken.selection.tensors,
        companions=_companions(snapshot, arrangement),
        listing=snapshot.listing,
    )
    return Conversion(
        plan,
        taken.selection,
        arrangement,
        destination,
        is_file=False,
        carried=taken.carried,
        derived=taken.derived,
        made_again=taken.made_again,
    )


def _request(assignment: Assignment, snapshot: Snapshot, taken: Taken, details: Details) -> Request:
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


def _target(name: str, details: Details) -> Target:
    if name not in BY_NAME:
        raise UsageError(f"no target is named `{name}`", expected=", ".join(BY_NAME))
    if details.virtual_stages > 1 and not BY_NAME[name].has_virtual_stages:
        raise UsageError(f"{name} has no virtual stages", found=f"{details.virtual_stages} of each stage")
    return BY_NAME[name]
