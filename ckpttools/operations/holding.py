"""What a target holds of a checkpoint: what is taken, what stays one object, and what has no place in its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.containers import items
from ckpttools.errors import ConversionError
from ckpttools.layouts import Snapshot
from ckpttools.layouts.families import MODEL
from ckpttools.model import TensorEntry
from ckpttools.operations.conversion import require_whole
from ckpttools.operations.select import Choice, Selection, arguments_of, select
from ckpttools.operations.targets import Target

_MAX_NAMED = 12


@dataclass(frozen=True)
class Taken:
    """What goes over to a target."""

    snapshot: Snapshot
    """With the exact place of every piece."""
    selection: Selection
    unheld: dict[str, str]
    """Name of a tensor or object -> why the target cannot hold it."""
    carried: tuple[TensorEntry, ...]
    """Tensors inside of objects that go over byte for byte."""
    derived: tuple[TensorEntry, ...] = ()
    """Weights that are not written because their masters stand for them."""
    made_again: tuple[str, ...] = ()
    """Output names of all tensors that are not written because whoever loads the output makes them again."""


def take(snapshot: Snapshot, target: Target, choice: Choice, allowed: Sequence[str]) -> Taken:
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
    if target.keeps_arguments and choice.is_weights_only:
        objects = arguments_of(located.checkpoint, choice)
    held = {n: t for n, t in everything.tensors.items() if target.holds_state or t.family == MODEL or choice.include}
    unheld = {n: f"{t.family} state" for n, t in everything.tensors.items() if n not in held}
    unheld |= {} if target.holds_objects else {o.name: f"{o.kind}, no tensor" for o in everything.objects}
    if not held:
        raise ConversionError(f"nothing that {target.name} can hold is selected", found=f"{len(unheld)} entries of other kinds")
    aliases = {n: kept for n, kept in everything.aliases.items() if kept in held}
    selection = replace(everything, tensors=held, aliases=aliases, objects=objects)
    carried = tuple(t for t in inner if any(t.name == o.name or t.name.startswith(f"{o.name}.") for o in objects))
    return Taken(located, selection, unheld, carried)


def without(taken: Taken, refused: Mapping[str, str], target: Target) -> Taken:
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


def unheld_error(target: Target, unheld: Mapping[str, str]) -> ConversionError:
    """What to raise for entries that a target cannot hold."""
    named = [f"{name} ({why})" for name, why in list(unheld.items())[:_MAX_NAMED]]
    listed = ", ".join(named) + (f", and {len(unheld) - _MAX_NAMED} more" if len(unheld) > _MAX_NAMED else "")
    return ConversionError(
        f"{target.name} cannot hold everything that is selected",
        found=listed,
        hints=["pass --drop to leave them behind, or --weights-only for the model's tensors alone"],
    )
