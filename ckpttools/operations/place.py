"""Places the selected tensors of a checkpoint on a mesh, by the rules that a user names or that the names suggest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttools.errors import UsageError
from ckpttools.layouts import Snapshot
from ckpttools.layouts.families import MODEL
from ckpttools.model import Mesh
from ckpttools.operations.model_settings import read_settings, read_text
from ckpttools.operations.select import Selection
from ckpttools.placement import assign
from ckpttools.placement.assign import Assignment, HeldAt
from ckpttools.placement.counts import Counts, counts_of
from ckpttools.placement.infer import infer
from ckpttools.placement.rule_files import BUILT_IN, OTHERS, built_in, choose, parse_rules
from ckpttools.placement.rules import RuleSet
from ckpttools.storage.source import exists


@dataclass(frozen=True)
class Placing:
    """What a user says of placement."""

    rules: str = ""
    """Name of a built-in set, `source`, or a rule file; empty for what the names suggest."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage (of each virtual one, where there are several); empty for equal blocks."""
    virtual_stages: int = 1
    """Chunks of layers that each stage holds; chunk after chunk, all stages have one in turn."""
    model_config: str | None = None
    """Where a config.json or params.json with the numbers of heads lies; None for the source's own."""


@dataclass(frozen=True)
class Told:
    """What a checkpoint itself says of placement (`targets.Target.own_places`)."""

    rules: RuleSet | None = None
    """By which it is cut."""
    held: Mapping[str, HeldAt] = field(default_factory=dict)
    """Name of a tensor -> where it is, of stages and expert-parallel ranks."""


def place(
    snapshot: Snapshot,
    selection: Selection,
    mesh: Mesh,
    placing: Placing,
    *,
    needs_even: bool,
    copies_heads: bool = False,
    told: Told | None = None,
    usual: Callable[[Mapping[str, Sequence[int]]], str] = lambda shapes: "",
) -> Assignment:
    """A placement for every selected tensor.

    Args:
        told: what counts where the user names no rules, and in place of layers per stage.
        usual: the built-in set for tensors of such shapes where neither says anything; empty for what the names suggest.

    Raises: UsageError: for rules that are none; what does not fit the mesh is in the result (`assign.require_fit`).
    """
    told = told or Told()
    tensors = [
        (replace(entry.spec, name=name), entry.path if name == entry.name else (name,), entry.family)
        for name, entry in selection.tensors.items()
    ]
    return assign.place(
        tensors,
        mesh,
        told.rules if told.rules is not None and not placing.rules else _rules(snapshot, selection, placing, usual),
        _counts(snapshot, placing.model_config),
        is_even=needs_even,
        copies_heads=copies_heads,
        layers_per_stage=() if told.held else placing.stage_layers,
        virtual_stages=placing.virtual_stages,
        held=told.held,
    )


def _rules(
    snapshot: Snapshot, selection: Selection, placing: Placing, usual: Callable[[Mapping[str, Sequence[int]]], str]
) -> RuleSet | None:
    wanted = placing.rules
    if not wanted:
        shapes = {name: entry.spec.shape for name, entry in selection.tensors.items() if entry.family == MODEL}
        named = usual(shapes)
        kind = read_settings(snapshot, placing.model_config).values.get("model_type")
        return built_in(named) if named else choose(shapes, kind if isinstance(kind, str) else "")
    if wanted == "source":
        return infer(selection.tensors, snapshot.checkpoint.mesh)
    if wanted in (*BUILT_IN, *OTHERS):
        return built_in(wanted)
    if not exists(wanted):
        known = ", ".join(("source", *BUILT_IN, *OTHERS))
        raise UsageError(f"no rules: `{wanted}` is no file and no built-in set", expected=f"a TOML file, or one of {known}")
    return parse_rules(read_text(wanted), wanted)


def _counts(snapshot: Snapshot, wanted: str | None) -> Counts:
    """What the model's settings say; a count that is missing is told when it is needed."""
    settings = read_settings(snapshot, wanted)
    try:
        return counts_of(settings.values, settings.where)
    except UsageError:
        if settings.is_named:
            raise
        return Counts()  # nobody named it: it may be another model's
