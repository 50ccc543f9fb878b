"""Places the selected tensors of a checkpoint on a mesh, by the rules that a user names or that the names suggest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.errors import UsageError
from ckpttools.layouts import Snapshot
from ckpttools.layouts.families import MODEL
from ckpttools.model import Mesh
from ckpttools.operations.select import Selection
from ckpttools.pickles.views import attributes
from ckpttools.placement import assign
from ckpttools.placement.assign import Assignment, require_fit
from ckpttools.placement.counts import Counts, counts_of
from ckpttools.placement.infer import infer
from ckpttools.placement.rule_files import BUILT_IN, OTHERS, built_in, choose, parse_rules
from ckpttools.placement.rules import RuleSet
from ckpttools.storage.source import exists, open_source, read

_CONFIGS = ("config.json", "params.json", "huggingface/config.json")
_MAX_TEXT_BYTES = 16 << 20


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


def place(
    snapshot: Snapshot,
    selection: Selection,
    mesh: Mesh,
    placing: Placing,
    *,
    needs_even: bool,
    usual: Callable[[Mapping[str, Sequence[int]]], str] = lambda shapes: "",
) -> Assignment:
    """A placement for every selected tensor.

    Args: usual: the built-in set for tensors of such shapes where the user names none; empty for what the names suggest.

    Raises: UsageError: for rules that are none, or with all that does not fit the mesh and the nearest one that does.
    """
    tensors = [
        (replace(entry.spec, name=name), entry.path if name == entry.name else (name,), entry.family)
        for name, entry in selection.tensors.items()
    ]
    assignment = assign.place(
        tensors,
        mesh,
        _rules(snapshot, selection, placing.rules, usual),
        _counts(snapshot, placing.model_config),
        is_even=needs_even,
        layers_per_stage=placing.stage_layers,
        virtual_stages=placing.virtual_stages,
    )
    require_fit(assignment)
    return assignment


def _rules(
    snapshot: Snapshot, selection: Selection, wanted: str, usual: Callable[[Mapping[str, Sequence[int]]], str]
) -> RuleSet | None:
    if not wanted:
        shapes = {name: entry.spec.shape for name, entry in selection.tensors.items() if entry.family == MODEL}
        named = usual(shapes)
        return built_in(named) if named else choose(shapes)
    if wanted == "source":
        return infer(selection.tensors, snapshot.checkpoint.mesh)
    if wanted in (*BUILT_IN, *OTHERS):
        return built_in(wanted)
    if not exists(wanted):
        known = ", ".join(("source", *BUILT_IN, *OTHERS))
        raise UsageError(f"no rules: `{wanted}` is no file and no built-in set", expected=f"a TOML file, or one of {known}")
    return parse_rules(_text(wanted), wanted)


def _counts(snapshot: Snapshot, wanted: str | None) -> Counts:
    """What the model's config says: the one that is named, else the one that lies beside the source."""
    if wanted is not None:
        return counts_of(_config(_text(wanted), wanted), wanted)
    for path in _CONFIGS:
        if path in snapshot.listing and snapshot.listing.length_bytes(path) <= _MAX_TEXT_BYTES:
            data = read(snapshot.source, path, 0, snapshot.listing.length_bytes(path))
            try:
                return counts_of(_config(data.decode("utf-8", "replace"), path), path)
            except UsageError:  # nobody named it: it may be another model's, and what lacks a count is told when it is needed
                return Counts()
    return _arguments(snapshot)


def _arguments(snapshot: Snapshot) -> Counts:
    """What the arguments of the training run say, which Megatron keeps in its checkpoints."""
    for entry in snapshot.checkpoint.objects:
        if entry.path[-1:] == ("args",):
            try:
                return counts_of(attributes(entry.record) or {}, entry.name)
            except UsageError:
                return Counts()
    return Counts()


def _config(text: str, where: str) -> Mapping[str, object]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"not a model's config: {where}", expected="a JSON document", found=str(e)) from e
    if not isinstance(config, dict):
        raise UsageError(f"not a model's config: {where}", expected="a JSON object", found=type(config).__name__)
    return config


def _text(location: str) -> str:
    source, file = open_source(location)
    length = source.listing().length_bytes(file) if file else 0
    if not file or length > _MAX_TEXT_BYTES:
        raise UsageError(f"not a text file: {location}", found=f"{length} bytes" if file else "a directory")
    return read(source, file, 0, length).decode("utf-8", "replace")
