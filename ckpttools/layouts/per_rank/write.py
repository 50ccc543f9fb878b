"""Writes one torch file per rank and family of state: pickled DTensors as verl and plain FSDP2 have them, or local tensors.

A DTensor says which part of which tensor it is. Plain local tensors do not, so their files have a note of ours; and so have
files without a single DTensor, because nothing else tells what the ranks share from what each has of its own.

Source: verl-project/verl, verl/utils/checkpoint/fsdp_checkpoint_manager.py (names of files, `fsdp_config.json`), 0.9.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttools.containers.dtensor_records import (
    NEWEST,
    STRIDED_SINCE,
    RankMesh,
    Release,
    dtensor_record,
    mesh_record,
    parse_release,
)
from ckpttools.containers.local_boxes import render_local_boxes
from ckpttools.containers.torch_archive import Storage, arrange_archive, nest, tensor_record
from ckpttools.errors import ConversionError
from ckpttools.layouts.families import MODEL, OPTIMIZER, RANK_LOCAL
from ckpttools.layouts.per_rank.meshes import mesh_cuts, mesh_of_rank
from ckpttools.model import ArrangedFile, Arrangement, Literal, Mesh, ObjectEntry, Path, render_path
from ckpttools.pickles.records import Object
from ckpttools.placement.held import HeldTensor, require_none, uncuttable
from ckpttools.placement.local import PlacedTensor, Placement

_STEMS = {OPTIMIZER: "optim"}
_FSDP_VERSION = 2
AXIS_NAMES = {"dp": "ddp"}
"""What verl calls a mesh axis, where it is another name than ours."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the tensors of a file are pickled as."""

    has_dtensors: bool = True
    """Whether a tensor that is cut is a DTensor; a plain tensor of the rank's share if not."""
    release: Release = NEWEST
    """Of torch that shall load the files."""
    device_type: str = "cpu"
    """Of the meshes: it must be that of the job which loads them. The values are always loaded to the CPU."""
    axis_names: Mapping[str, str] = field(default_factory=lambda: AXIS_NAMES)
    """Our name of a mesh axis -> that of the job."""


@dataclass(frozen=True)
class _Family:
    """What goes into the files of one family."""

    name: str
    is_rank_local: bool
    tensors: list[tuple[Path, PlacedTensor]] = field(default_factory=list)
    """By the path in the file; of each rank's own state, below `rank_<R>`."""
    objects: list[tuple[Path, object]] = field(default_factory=list)
    sequences: dict[Path, str] = field(default_factory=dict)

    def of_rank(self, rank: int) -> tuple[list[tuple[Path, PlacedTensor]], list[tuple[Path, object]], dict[Path, str]]:
        """(tensors, objects, sequences) of one rank's file."""
        if not self.is_rank_local:
            return self.tensors, self.objects, self.sequences
        own = f"rank_{rank}"
        return (
            [(p[1:], t) for p, t in self.tensors if p[0] == own],
            [(p[1:], o) for p, o in self.objects if p[0] == own],
            {p[1:]: kind for p, kind in self.sequences.items() if p[:1] == (own,)},
        )


def arrange_ranks(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry] = (),
    sequences: Mapping[Path, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    has_dtensors: bool = True,
    torch_release: str = "",
    device_type: str = "cpu",
    axis_names: Mapping[str, str] | None = None,
) -> Arrangement:
    """`<family>_world_size_<W>_rank_<R>.pt` for every rank and family, nested as the paths say. Pure.

    Args:
        sequences: path of each branch that is a `list` or a `tuple`; all others are dicts.
        aliases: further name -> the name of the tensor that it is, which is stored once.
        has_dtensors: whether a tensor that is cut is pickled as a DTensor, or as the plain tensor that a rank holds.
        torch_release: the release that shall load the files (`2.9`): DTensors of one do not load in all others. The newest
            known unless given.
        device_type: of the device meshes.
        axis_names: name of a mesh axis in the job that loads the files, where it is not ours; verl's unless given.

    Raises: ConversionError: naming what has no place in these files, such as fused cuts in DTensors.
    """
    form = Form(has_dtensors, _release(torch_release), device_type, AXIS_NAMES if axis_names is None else axis_names)
    refused = refusals(tensors, mesh, objects=objects, has_dtensors=has_dtensors, torch_release=torch_release)
    require_none(refused, "a torch file per rank", hints=_hints(refused, has_dtensors))
    files = []
    for family in _families(tensors, objects, sequences or {}, aliases or {}):
        stem = f"{_STEMS.get(family.name, family.name)}_world_size_{mesh.ranks}_rank_"
        files += [_arrange_file(f"{stem}{rank}.pt", family, mesh, rank, form) for rank in range(mesh.ranks)]
    if has_dtensors:
        config = json.dumps({"FSDP_version": _FSDP_VERSION, "world_size": mesh.ranks}, indent=4).encode()
        files.append(ArrangedFile("fsdp_config.json", len(config), literals=(Literal(0, config),)))
    return Arrangement("per_rank", tuple(files))


def refusals(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry] = (),
    has_dtensors: bool = True,
    torch_release: str = "",
    **_options: object,
) -> dict[str, str]:
    """Per name of a tensor or object: why these files cannot hold it. Pure. Raises ConversionError for a release that is none."""
    refused, release = uncuttable(tensors, mesh), _release(torch_release)
    axes = [name for name, _ in mesh.axes]
    for tensor in tensors:
        spec = tensor.spec
        if spec.dtype.kind == "quantized" or spec.dtype.is_sub_byte:
            refused[spec.name] = f"torch has no plain tensor of {spec.dtype}"
        elif has_dtensors:
            cuts = mesh_cuts(tensor, mesh)
            if cuts is None:
                refused[spec.name] = f"{list(spec.shape)}: no DTensor is cut as {_shown(tensor)}"
            elif release < STRIDED_SINCE and any(sorted(by, key=axes.index) != by for by in cuts.values()):
                refused[spec.name] = f"torch {release[0]}.{release[1]} has no DTensor that is cut as {_shown(tensor)}"
    refused |= {o.name: f"{o.kind}: it was not read" for o in objects if o.record is None and o.kind != "NoneType"}
    return refused | _misfits(
        [(t.spec.name, t.path, t.family) for t in tensors], [(o.name, o.path, o.family) for o in objects], mesh
    )


def _release(text: str) -> Release:
    try:
        return parse_release(text) if text else NEWEST
    except ValueError as e:
        raise ConversionError(str(e)) from e


def _misfits(tensors: Sequence[tuple[str, Path, str]], objects: Sequence[tuple[str, Path, str]], mesh: Mesh) -> dict[str, str]:
    """State that each rank has of its own, where it is of another number of ranks: nobody can say whose it becomes."""
    refused: dict[str, str] = {}
    for family in RANK_LOCAL:
        own = [(name, _own_rank(path)) for name, path, f in (*tensors, *objects) if f == family and _is_below(name, path, family)]
        ranks = {rank for _, rank in own if rank is not None}
        if ranks and ranks != set(range(mesh.ranks)):
            why = f"each of {len(ranks)} ranks has its own, and the mesh has {mesh.ranks}"
            refused |= {name: why for name, rank in own if rank is not None}
    return refused


def _is_below(name: str, path: Path, family: str) -> bool:
    """Whether an entry has a place in the files of its family: its name says so, as it does where it was read from such."""
    return render_path(path) == name and len(path) > 1 and path[0] == family and family != MODEL


def _own_rank(path: Path) -> int | None:
    """The rank in the second key of the path of a rank's own state."""
    key = path[1]
    word, _, number = key.partition("_") if isinstance(key, str) else ("", "", "")
    return int(number) if word == "rank" and number.isascii() and number.isdigit() and len(number) < 10 else None


def _families(
    tensors: Sequence[PlacedTensor],
    objects: Sequence[ObjectEntry],
    sequences: Mapping[Path, str],
    aliases: Mapping[str, str],
) -> list[_Family]:
    """Every family with its entries, the model first. What has no files of its own stays nested in the model's."""
    found = {MODEL: _Family(MODEL, is_rank_local=False, sequences=dict(sequences))}

    def family_of(name: str, path: Path, family: str) -> tuple[_Family, Path]:
        if not _is_below(name, path, family) or (family in RANK_LOCAL and (_own_rank(path) is None or len(path) < 3)):
            return found[MODEL], path if render_path(path) == name else (name,)
        if family not in found:
            below = {p[1:]: kind for p, kind in sequences.items() if p[:1] == (family,) and len(p) > 0}
            found[family] = _Family(family, family in RANK_LOCAL, sequences=below)
        return found[family], path[1:]

    by_name = {t.spec.name: t for t in tensors}
    named = [(t.spec.name, t.path, t) for t in tensors]
    named += [(alias, _alias_path(alias, by_name[kept]), by_name[kept]) for alias, kept in aliases.items()]
    for name, path, tensor in named:
        family, inner = family_of(name, path, tensor.family)
        family.tensors.append((inner, tensor))
    for entry in objects:
        family, inner = family_of(entry.name, entry.path, entry.family)
        family.objects.append((inner, entry.record))
    return [f for f in found.values() if f.tensors or f.objects]


def _alias_path(alias: str, tensor: PlacedTensor) -> Path:
    """Where a further name of a tensor stands: beside it, when they begin alike."""
    for cut in range(len(tensor.path) - 1, 0, -1):
        prefix = render_path(tensor.path[:cut]) + "."
        if alias.startswith(prefix):
            return (*tensor.path[:cut], alias[len(prefix) :])
    return (alias,)


def _arrange_file(path: str, family: _Family, mesh: Mesh, rank: int, form: Form) -> ArrangedFile:
    tensors, objects, sequences = family.of_rank(rank)
    pickled = _Pickled(mesh, rank, form)
    entries: list[tuple[Path, object]] = []
    for inner, tensor in tensors:
        # a rank's own state is of that rank alone, and no mesh cuts it
        own = replace(tensor, placement=Placement()) if family.is_rank_local else tensor
        local = own.local(mesh, rank)
        if local is not None:
            entries.append((inner, pickled.record(HeldTensor(own, local), render_path(inner))))
    value = nest([*entries, *objects], sequences) if entries or objects else {}
    note = b"" if pickled.has_dtensors or family.is_rank_local else render_local_boxes(pickled.plain.items(), mesh, rank)
    return arrange_archive(path, value, pickled.storages, note=note)


class _Pickled:
    """The records of one file as they are made, and what fills its storages."""

    def __init__(self, mesh: Mesh, rank: int, form: Form) -> None:
        self.storages: dict[str, Storage] = {}
        self.plain: dict[str, HeldTensor] = {}
        """Tensors that are no DTensors, by their names in the file."""
        self.has_dtensors = False
        self._mesh, self._rank, self._form = mesh, rank, form
        self._records: dict[str, Object] = {}
        """By output name: a tensor under two names is one object."""
        self._meshes: dict[tuple[str, ...], tuple[RankMesh, Object]] = {}

    def record(self, held: HeldTensor, name: str) -> Object:
        """The record of a tensor that stands under `name` in the file."""
        known = self._records.get(held.spec.name)
        cuts = mesh_cuts(held.tensor, self._mesh) if self._form.has_dtensors else {}
        if not cuts:
            self.plain[name] = held
        if known is None:
            known = tensor_record(held.spec, self._storage(held))
            if cuts:
                known = self._dtensor(held, known, cuts)
            self._records[held.spec.name] = known
        return known

    def _dtensor(self, held: HeldTensor, local: Object, cuts: Mapping[int, Sequence[str]]) -> Object:
        self.has_dtensors = True
        left_out = tuple(axis for axis, _ in held.tensor.placement.held_at)
        if left_out not in self._meshes:
            mesh = mesh_of_rank(self._mesh, self._rank, left_out, self._form.device_type, self._form.axis_names)
            self._meshes[left_out] = mesh, mesh_record(mesh, self._form.release, self._storage(mesh.rank_bytes))
        mesh, record = self._meshes[left_out]
        axes = [name for name, _ in self._mesh.axes if name not in ("pp", *left_out)]
        numbered = {dim: [axes.index(axis) for axis in by] for dim, by in cuts.items()}
        form = self._form
        spec = held.tensor.spec
        return dtensor_record(spec, local, record, mesh.shape, numbered, release=form.release, device_type=form.device_type)

    def _storage(self, content: Storage) -> str:
        key = str(len(self.storages))
        self.storages[key] = content
        return key


def _shown(tensor: PlacedTensor) -> str:
    """The cuts of a tensor, for a message."""

    def one(axis: str, dim: int, sections: Sequence[int]) -> str:
        return f"{axis} along {dim}" + (f" in {'+'.join(map(str, sections))}" if len(sections) > 1 else "")

    return ", ".join(one(c.axis, c.dim, c.sections) for c in tensor.placement.cuts)


def _hints(refused: Mapping[str, str], has_dtensors: bool) -> list[str]:
    if has_dtensors and any("no DTensor" in why for why in refused.values()):
        return ["plain local tensors can hold these"]
    return []
