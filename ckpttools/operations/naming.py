"""Gives the selected tensors the names of another program, by maps that come with the tool and those that a user names.

Maps lead from one side to another (`megatron` to `hf`, `hf` to `meta`); where none leads all the way, several do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.errors import ConversionError, UsageError
from ckpttools.layouts import Snapshot
from ckpttools.layouts.families import MODEL
from ckpttools.model import ArrangedFile, Literal, Mesh, ObjectEntry, TensorEntry
from ckpttools.names.convert import Converted, NamesError, convert, side_of, stacked
from ckpttools.names.hf_config import HfConfig, config_of
from ckpttools.names.maps import BUILT_IN, NameMap, built_in, parse_map
from ckpttools.names.megatron_args import arguments_of
from ckpttools.operations.model_settings import ModelSettings, read_settings, read_text
from ckpttools.operations.select import Selection
from ckpttools.pickles.records import Global, Object
from ckpttools.pickles.views import kind_of
from ckpttools.placement.counts import counts_of

SIDES = ("hf", "megatron", "meta", "fms")


@dataclass(frozen=True, slots=True)
class Naming:
    """What a user says of names."""

    names: tuple[str, ...] = ()
    """A side, map files, or both; with files alone the other side of the first is meant."""
    model_config: str | None = None
    values: tuple[tuple[str, str], ...] = ()
    """Settings that the source does not state, or states wrongly: (`rotary_base`, `500000`)."""
    mesh: Mesh | None = None
    """Of the ranks that the output is for; None for output that is for none."""
    is_stacked: bool = False
    """Put layers and experts into stacks, where the target's names have that."""


@dataclass(frozen=True)
class Named:
    """A selection under other names."""

    selection: Selection
    steps: tuple[str, ...]
    """The maps that were used, in order."""
    notes: tuple[str, ...] = ()
    """What people should hear of: padding that was cut off, tables that were left behind, a config that was not written."""
    config: bytes = b""
    """The text of a config.json for the output; empty where none is to be written."""

    @property
    def files(self) -> tuple[ArrangedFile, ...]:
        """The config, as a file of the output."""
        if not self.config:
            return ()
        return (ArrangedFile("config.json", len(self.config), literals=(Literal(0, self.config),)),)


def name_tensors(selection: Selection, snapshot: Snapshot, naming: Naming) -> Named:
    """The selection under the names that are asked for.

    Raises: UsageError: for a side that no map leads to, or a bad map. ConversionError: for tensors that no map takes, with
        the reasons of the map that comes closest.
    """
    wanted, maps = _maps(naming.names)
    others = [n for n, t in selection.tensors.items() if t.family != MODEL]
    if others:
        hints = ["--weights-only leaves them behind"]
        raise ConversionError("only the model's tensors can get other names", found=f"{len(others)} others", hints=hints)
    entries = [replace(t, spec=replace(t.spec, name=name)) for name, t in selection.tensors.items()]
    settings = _settings(snapshot, naming)
    numbers = _numbers(settings)
    path, converted = _best(_paths(maps, entries, wanted), entries, numbers)
    entries = list(converted[-1].tensors) if converted else entries
    steps = [c.map for c in converted]
    notes = [f"left behind: {n}" for c in converted for n in c.left]
    notes += [f"cut off: {text}" for c in converted for text in c.cut]
    notes += [f"kept: {text}; give --setting vocab_size=N to cut them off" for c in converted for text in c.unsure]
    last = path[-1][0] if path else next((m for m in maps if wanted in m.sides), None)
    if naming.is_stacked and last is not None:
        entries = stacked(last, wanted, entries)
    config, said = _config(steps, wanted, entries, settings, snapshot)
    tensors = {t.name: t for t in entries}
    made, told = _arguments(selection, wanted, entries, settings, naming.mesh) if steps else ((), ())
    named = replace(selection, tensors=tensors, aliases={}, widened=frozenset(), objects=(*selection.objects, *made))
    said = [*said, *told]
    return Named(named, tuple(steps), (*notes, *said), config)


def _maps(names: Sequence[str]) -> tuple[str, list[NameMap]]:
    """(wanted side, maps: a user's own first)."""
    files = [n for n in names if n.endswith(".toml")]
    sides = [n for n in names if n not in files]
    own = [parse_map(read_text(f), f) for f in files]
    maps = own + [built_in(name) for name in BUILT_IN]
    known = list(dict.fromkeys(side for m in maps for side in m.sides))
    wrong = [side for side in sides if side not in known]
    if wrong or len(sides) > 1:
        raise UsageError(
            f"no names are called `{', '.join(wrong or sides)}`", expected=f"one of {', '.join(known)}, or a file *.toml"
        )
    return (sides[0] if sides else own[0].sides[1]), maps


def _paths(maps: Sequence[NameMap], entries: Sequence[TensorEntry], wanted: str) -> list[list[tuple[NameMap, str]]]:
    """Ways from the side that the names belong to, each a list of (map, side to start from), the shortest first."""
    names = [t.name for t in entries]
    votes = [(m, side) for m in maps if (side := side_of(m, names)) is not None]
    if not votes:
        raise ConversionError(
            "no map of names knows these tensors", found=", ".join(names[:6]), hints=["--names FILE adds a map"]
        )
    found: list[list[tuple[NameMap, str]]] = []
    todo: list[list[tuple[NameMap, str]]] = [[(m, side)] for m, side in votes]
    if any(side == wanted for _, side in votes):
        return [[]]
    while todo:
        path = todo.pop(0)
        here = path[-1][0].other(path[-1][1])
        if here == wanted:
            found.append(path)
            continue
        used = {m.name for m, _ in path}
        todo += [[*path, (m, here)] for m in maps if m.name not in used and here in m.sides and len(path) < 4]
    if not found:
        raise UsageError(f"no map leads to the names of `{wanted}` from those of `{votes[0][1]}`")
    return found


def _best(
    paths: Sequence[list[tuple[NameMap, str]]], entries: Sequence[TensorEntry], numbers: Mapping[str, int]
) -> tuple[list[tuple[NameMap, str]], list[Converted]]:
    """The first way that takes everything. Raises ConversionError: with the reasons of the way on which fewest were left."""
    failures: list[NamesError] = []
    for path in paths:
        converted, error = _follow(path, entries, numbers)
        if error is None:
            return path, converted
        failures.append(error)
    raise min(failures, key=lambda e: len(e.problems))


def _follow(
    path: Sequence[tuple[NameMap, str]], entries: Sequence[TensorEntry], numbers: Mapping[str, int]
) -> tuple[list[Converted], NamesError | None]:
    """What each map of a way made, and why it ended."""
    converted: list[Converted] = []
    for map_, side in path:
        try:
            converted.append(convert(map_, side, entries, numbers))
        except NamesError as e:
            return converted, e
        entries = converted[-1].tensors
    return converted, None


def _settings(snapshot: Snapshot, naming: Naming) -> ModelSettings:
    read = read_settings(snapshot, naming.model_config)
    given: dict[str, object] = {}
    for key, text in naming.values:
        try:
            given[key] = json.loads(text)
        except ValueError:
            given[key] = text
    return replace(read, values={**read.values, **given})


def _numbers(settings: ModelSettings) -> dict[str, int]:
    """The numbers that rules name."""
    counts = counts_of(settings.values, settings.where or "the settings")
    found = {"heads": counts.heads, "groups": counts.kv_heads, "experts": counts.experts}
    numbers = {name: n for name, n in found.items() if n is not None}
    true = settings.values.get("vocab_size")
    if type(true) is int and true > 0:
        numbers["vocab"] = true
    if counts.heads and counts.kv_heads:
        if counts.heads % counts.kv_heads:
            raise ConversionError(f"{counts.heads} heads cannot be divided into {counts.kv_heads} groups of queries")
        numbers["group_heads"] = counts.heads // counts.kv_heads
    return numbers


def _arguments(
    selection: Selection, wanted: str, entries: Sequence[TensorEntry], settings: ModelSettings, mesh: Mesh | None
) -> tuple[tuple[ObjectEntry, ...], tuple[str, ...]]:
    """(what Megatron keeps beside the tensors, what is to be said), for ranks that have no arguments of a training run."""
    if wanted != "megatron" or mesh is None or any(o.path in (("args",), ("common", "args")) for o in selection.objects):
        return (), ()
    found = arguments_of(settings.values, {t.name: t.spec for t in entries})
    if not found:
        missing = "no config.json states layers, width and heads (--model-config FILE): Megatron loads it with --finetune only"
        return (), (f"args were not written: {missing}",)
    sizes = dict(mesh.axes)
    ranks = {"tensor": sizes.get("tp", 1), "pipeline": sizes.get("pp", 1), "expert": sizes.get("ep", 1)}
    found |= {f"{kind}_model_parallel_size": size for kind, size in ranks.items()}
    namespace = Object(Global("argparse", "Namespace"), (), state=found)
    values = {"args": namespace, "checkpoint_version": 3.0, "iteration": 0}
    return tuple(ObjectEntry(name, (name,), kind_of(value), value) for name, value in values.items()), ()


def _config(
    steps: Sequence[str], wanted: str, entries: Sequence[TensorEntry], settings: ModelSettings, snapshot: Snapshot
) -> tuple[bytes, list[str]]:
    """(text of a config.json, what is to be said): transformers wants one, and no other side does."""
    if wanted != "hf" or not steps or "config.json" in snapshot.listing:
        return b"", []
    made: HfConfig = config_of({t.name: t.spec for t in entries}, settings.values)
    if made.missing:
        given = " ".join(f"--setting {name}=..." for name in made.missing)
        return b"", [f"config.json was not written: nothing states {', '.join(made.missing)}; give them as {given}"]
    return json.dumps(made.values, indent=2).encode() + b"\n", []
