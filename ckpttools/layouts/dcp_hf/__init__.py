"""Shards that DCP's Hugging Face writer writes per rank, and what it consolidates from them.

`HuggingFaceStorageWriter(save_distributed=True)` writes a safetensors file per rank and output file, with the offsets of
each box in the header's `DCP_SHARDING_INFO` and the global shape nowhere; `write` adds a note that has it. With
consolidation the shards lie in `sharded/`, and whole tensors beside that directory: then those are the tensors and the
shards are replicas, so that the two can be compared. They do differ: the consolidation writes 0.0 for every rank-0 tensor
and zeros for what a missing shard had held. Without `save_distributed` the output is a plain set, and the `safetensors`
layout reads it.
Read `sniff` and `_Boxes` first.

Source: pytorch/pytorch, torch/distributed/checkpoint/hf_storage.py, _hf_utils.py, _consolidate_hf_safetensors.py, 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ckpttools.containers.jsons import JsonError, parse_json, shown
from ckpttools.containers.local_boxes import METADATA_KEY, LocalBoxes
from ckpttools.containers.safetensors_file import SafetensorsEntry, SafetensorsHeader
from ckpttools.containers.safetensors_ranks import read_note
from ckpttools.containers.safetensors_set import SafetensorsSet, piece_of, read_headers, read_set
from ckpttools.containers.shard_index import RankShard, parse_rank_shard, parse_shard_name, shard_sets
from ckpttools.findings import Finding
from ckpttools.geometry import contains, cover
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.layouts.dcp_hf.write import arrange_ranks
from ckpttools.model import Box, Commit, FileEntry, Mesh, Piece, TensorEntry, TensorSpec
from ckpttools.storage.source import Listing, Source

_DIRECTORY = "sharded"
_INDEX = "model.safetensors.index.json"
_INFO_KEY = "DCP_SHARDING_INFO"
_MAX_COUNT = 2**63 - 1
_MAX_LISTED = 20


class DcpHf:
    """See the module."""

    name = "dcp_hf"
    looks_for = "shard-<rank + 1>-model-<i>-of-<n>.safetensors, here or in sharded/"

    arrange_ranks = staticmethod(arrange_ranks)

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """One part: the shards, and the set that was consolidated from those in `sharded/`."""
        root = [f.path for f in listing.in_directory("")]
        inner = [f.path for f in listing.in_directory(_DIRECTORY) if parse_rank_shard(f.path)]
        outer = [path for path in root if parse_rank_shard(path)]
        if not inner:
            return [Part(self.name, "model", tuple(outer))] if outer else []
        whole = next((s for s in shard_sets(root) if (s.stem, s.variant) == ("model", "")), None)
        files = (*(whole.paths if whole else ()), *outer, *inner)
        return [Part(self.name, "model", files, whole.index if whole else "", _DIRECTORY)]

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The tensors: those of the consolidated set with the shards as replicas, or those that the shards make up."""
        shards = [s for s in map(parse_rank_shard, part.files) if s is not None and _directory(s.path) == part.directory]
        inside = [s.path for s in shards]
        stray = [f for f in part.files if parse_rank_shard(f) and f not in inside]
        whole = [n for n in map(parse_shard_name, part.files) if n is not None and n.path not in (*inside, *stray)]
        boxes = _read_boxes(source, listing, shards)
        if stray:
            expected = "one set of shards"
            boxes.findings.append(Finding("duplicate-weights", stray[0], expected, f"{len(stray)} more beside {_DIRECTORY}/"))
        if part.manifest or any(n.count is None for n in whole):
            consolidated = read_set(source, listing, [n.path for n in whole], index_file=part.manifest)
            contents = _with_replicas(consolidated, boxes, part.directory)
        else:
            contents = _of_shards(boxes, shards, [n.path for n in whole])
        files = {f.path: f for f in contents.files}
        files |= {f: FileEntry(f, listing.length_bytes(f), "data") for f in inside}
        rest = [FileEntry(f, listing.length_bytes(f), "unreferenced") for f in part.files if f not in files]
        return replace(contents, files=tuple(sorted((*files.values(), *rest), key=lambda f: f.path)))


LAYOUT = DcpHf()


@dataclass(frozen=True, slots=True)
class _Held:
    """A box of a tensor in the file of a rank."""

    entry: SafetensorsEntry
    box: Box
    shard: RankShard

    @property
    def piece(self) -> Piece:
        return piece_of(self.entry, self.shard.path, box=self.box, rank=self.shard.rank)


@dataclass
class _Boxes:
    """What all shards hold, by tensor, and what is wrong with them."""

    held: dict[str, list[_Held]] = field(default_factory=lambda: defaultdict(list))
    findings: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that must have been there."""
    written_by: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Global shapes, where a note states them."""
    mesh: Mesh = field(default_factory=Mesh)
    """As a note states it."""

    def take_note(self, note: LocalBoxes, shard: RankShard) -> None:
        """Learn what a note of ours states; it must be of the same save as those of the other files."""
        where = f"the note in {shard.path}"
        if note.rank != shard.rank or (self.mesh.axes and note.mesh != self.mesh):
            expected = f"rank {shard.rank} of {self.mesh or note.mesh}"
            self.findings.append(Finding("rank-mismatch", where, expected, f"rank {note.rank} of {note.mesh}"))
            return
        self.mesh = note.mesh
        for name, box in note.tensors.items():
            if self.shapes.setdefault(name, box.shape) != box.shape:
                expected, found = f"{list(self.shapes[name])}, as in other files", f"{list(box.shape)}"
                self.findings.append(Finding("rank-mismatch", f"{shown(name)} in {where}", expected, found))

    def as_tensors(self, names: Iterable[str]) -> tuple[tuple[TensorEntry, ...], list[Finding]]:
        """The tensors that the boxes make up, as large as the boxes reach, and where ranks disagree about one."""
        tensors, findings = [], []
        for name in names:
            held = self.held[name]
            agreeing = [h for h in held if _is_alike(h.entry, held[0].entry)]
            findings += [_disagreement(name, h, held[0].entry) for h in held if h not in agreeing]
            reached = tuple(max(stops) for stops in zip(*(h.box.stops for h in agreeing), strict=True))
            shape = self.shapes.get(name, reached)
            is_stated = name in self.shapes and len(shape) == len(reached)
            pieces, replicas = _first_of_each(agreeing)
            spec = TensorSpec(name, held[0].entry.dtype, shape if is_stated else reached)
            tensors.append(TensorEntry(spec, (name,), pieces, replicas, shape_is_declared=is_stated))
        return tuple(tensors), findings


def _is_alike(a: SafetensorsEntry, b: SafetensorsEntry) -> bool:
    return a.dtype == b.dtype and len(a.shape) == len(b.shape)


def _disagreement(name: str, held: _Held, other: SafetensorsEntry) -> Finding:
    expected = f"{other.dtype} with {len(other.shape)} dimensions, as elsewhere"
    return Finding(
        "rank-mismatch", f"{shown(name)} in {held.shard.path}", expected, f"{held.entry.dtype} with {len(held.entry.shape)}"
    )


def _first_of_each(held: Iterable[_Held]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """(pieces, replicas): a box that several ranks wrote is a piece once; boxes that only overlap stay pieces."""
    pieces: dict[Box, Piece] = {}
    replicas = []
    for one in held:
        if not one.entry.is_readable:
            continue
        if one.box in pieces:
            replicas.append(one.piece)
        else:
            pieces[one.box] = one.piece
    return tuple(pieces.values()), tuple(replicas)


def _read_boxes(source: Source, listing: Listing, shards: Sequence[RankShard]) -> _Boxes:
    boxes = _Boxes()
    headers = read_headers(source, listing, [s.path for s in shards])
    for shard in shards:
        header = headers[shard.path]
        boxes.findings += header.findings
        boxes.written_by = boxes.written_by or _written_by(header)
        note = read_note(header, boxes.findings)
        if note is not None:
            boxes.take_note(note, shard)
        if header.entries:
            offsets = _parse_info(header, boxes.findings)
            for entry in header.entries:
                if entry.name in offsets:
                    box = Box(offsets[entry.name], entry.shape)
                    boxes.held[entry.name].append(_Held(entry, box, shard))
                    noted = note.tensors.get(entry.name) if note is not None else None
                    if noted is not None and [box] != [p.box for p in noted.local.parts]:
                        where = f"{shown(entry.name)} in {METADATA_KEY} in {shard.path}"
                        expected = f"offsets {list(box.offsets)}, as in {_INFO_KEY}"
                        found = f"{[list(p.box.offsets) for p in noted.local.parts[:3]]}"
                        boxes.findings.append(Finding("bad-header", where, expected, found))
    _check_ranks(shards, boxes)
    _check_models(shards, boxes)
    return boxes


def _written_by(header: SafetensorsHeader) -> str:
    version = header.metadata.get("DCP_VERSION")
    return f"DCP HuggingFaceStorageWriter {version}" if version else ""


def _parse_info(header: SafetensorsHeader, findings: list[Finding]) -> dict[str, tuple[int, ...]]:
    """Where in its tensor each box of a shard begins; a tensor whose place is not told, or told badly, is left out."""
    where = f"{_INFO_KEY} in {header.file}"
    try:
        info = parse_json(header.metadata.get(_INFO_KEY, "").encode())
    except JsonError as e:
        found = e.message if _INFO_KEY in header.metadata else "none"
        findings.append(Finding("bad-header", where, "JSON with the offsets of each box", found))
        return {}
    if not isinstance(info, dict):
        findings.append(Finding("bad-header", where, "an object", type(info).__name__))
        return {}
    result = {}
    for entry in header.entries:
        told = info.get(entry.name)
        stored = told.get("saved_offsets") if isinstance(told, dict) else None
        offsets = _offsets_in(stored, entry.shape)
        if offsets is not None:
            result[entry.name] = offsets
        else:
            expected = f"saved_offsets: {len(entry.shape)} non-negative integers"
            found = "none" if stored is None else shown(repr(stored))
            findings.append(Finding("bad-header", f"{shown(entry.name)} in {where}", expected, found))
    known = {entry.name for entry in header.entries}
    if not header.findings:
        findings += [
            Finding("bad-header", f"{shown(name)} in {where}", "offsets of tensors of this file", "no such tensor")
            for name in info
            if name not in known
        ]
    return result


def _offsets_in(stored: object, shape: Sequence[int]) -> tuple[int, ...] | None:
    """One count per dimension, such that the box ends before 2^63; None for everything else."""
    if not isinstance(stored, list) or len(stored) != len(shape):
        return None
    is_sound = all(type(o) is int and 0 <= o <= _MAX_COUNT - size for o, size in zip(stored, shape, strict=True))
    return tuple(stored) if is_sound else None


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _sibling(shard: RankShard, rank: int, model: int) -> str:
    directory = _directory(shard.path)
    name = f"shard-{rank + 1:05d}-model-{model:05d}-of-{shard.count:05d}.safetensors"
    return f"{directory}/{name}" if directory else name


def _check_ranks(shards: Sequence[RankShard], boxes: _Boxes) -> None:
    """Ranks are numbered without gaps; a last one that is missing leaves no trace in the names of the others.

    A note of ours states how many there are.
    """
    counts = sorted({s.count for s in shards})
    if len(counts) > 1:
        found = " and ".join(f"-of-{n:05d}" for n in counts)
        boxes.findings.append(Finding("rank-mismatch", shards[-1].path, f"files of one save, all -of-{counts[-1]:05d}", found))
    ranks = {s.rank for s in shards}
    last = max(*ranks, boxes.mesh.ranks - 1) if boxes.mesh.axes else max(ranks)
    gaps = (rank for rank in range(last + 1) if rank not in ranks)
    for i, rank in enumerate(islice(gaps, _MAX_LISTED + 1)):
        path = _sibling(shards[0], rank, min(s.model for s in shards))
        found = (
            f"no file of rank {rank}" if i < _MAX_LISTED else f"no file of rank {rank}, nor of others that are not listed here"
        )
        boxes.missing.append(path)
        boxes.findings.append(Finding("missing-rank", path, f"files of every rank up to {last}", found))


def _check_models(shards: Sequence[RankShard], boxes: _Boxes) -> None:
    """Output files that no rank has a part of, and files that a rank lacks although it shards as ranks that have them.

    A rank without tensors for an output file writes none, as in pipelines. But ranks that hold parts of one tensor
    shard alike, so what one of them has a part of, the others have, too.
    """
    models = {s.model for s in shards}
    absent = (model for model in range(1, shards[0].count + 1) if model not in models)
    wanted = {_sibling(shards[0], shards[0].rank, model): "no rank has a part" for model in islice(absent, _MAX_LISTED)}
    groups = _sharding_groups(boxes.held)
    present = {(s.rank, s.model): s for s in shards}
    split_models: dict[int, set[int]] = defaultdict(set)
    for held in boxes.held.values():
        for one in held:
            if one.entry.shape:  # scalars are held by one rank however the rest is sharded
                split_models[groups[one.shard.rank]].add(one.shard.model)
    for rank in sorted({s.rank for s in shards}):
        for model in sorted(split_models[groups.get(rank, rank)]):
            if (rank, model) not in present:
                wanted[_sibling(shards[0], rank, model)] = f"rank {rank} has parts for other files only"
    for path, found in wanted.items():
        boxes.missing.append(path)
        boxes.findings.append(
            Finding("missing-file", path, "a part of each output file from every rank that shards alike", found)
        )


def _sharding_groups(held: Mapping[str, Sequence[_Held]]) -> dict[int, int]:
    """Per rank the smallest rank that it is joined with by tensors of which both hold a part."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        parent.setdefault(rank, rank)
        while parent[rank] != rank:
            parent[rank] = rank = parent[parent[rank]]
        return rank

    for parts in held.values():
        first = root(parts[0].shard.rank)
        for one in parts[1:]:
            low, high = sorted((first, root(one.shard.rank)))
            parent[high] = first = low
    return {rank: root(rank) for rank in list(parent)}


def _of_shards(boxes: _Boxes, shards: Sequence[RankShard], unfinished: Sequence[str]) -> Contents:
    """The tensors that the shards make up; `unfinished` are files that a consolidation left without an index."""
    tensors, findings = boxes.as_tensors(boxes.held)
    commit = Commit(not boxes.missing, boxes.missing[0] if boxes.missing else "")
    if unfinished:
        expected = "the index, which the consolidation writes last"
        found = f"{len(unfinished)} files beside {_DIRECTORY}/ and no index; the shards are read instead"
        remedy = f"name {_DIRECTORY}/ to use the shards alone, or consolidate them again"
        findings.append(Finding("not-committed", _INDEX, expected, found, remedy))
        commit = Commit(False, _INDEX)
    if not tensors or not all(t.shape_is_declared for t in tensors):
        found = f"boxes from {len({s.rank for s in shards})} ranks; shapes are taken to end where the last of them ends"
        findings.append(Finding("completeness-unproved", shards[-1].path, "global shapes and the number of ranks", found))
    found_all = (*boxes.findings, *findings)
    return Contents(tensors, findings=found_all, mesh=boxes.mesh, written_by=boxes.written_by, commit=commit)


def _with_replicas(whole: SafetensorsSet, boxes: _Boxes, directory: str) -> Contents:
    """The consolidated tensors, each with the shards' boxes of it as replicas; and what only the shards have."""
    findings = [*whole.findings, *boxes.findings]
    tensors, partial = [], []
    for tensor in whole.tensors:
        held = boxes.held.get(tensor.name, [])
        problems = [_misfit(one, tensor.spec) for one in held]
        findings += [problem for problem in problems if problem is not None]
        copies = tuple(h.piece for h, problem in zip(held, problems, strict=True) if problem is None and h.entry.is_readable)
        if cover(tensor.spec.shape, [piece.box for piece in copies]).missing:
            partial.append(tensor.name)
        tensors.append(replace(tensor, replicas=copies))
    if partial:
        expected = f"shards that hold every element of all {len(whole.tensors)} tensors"
        found = f"parts only of {len(partial)}, such as `{shown(partial[0])}`"
        remedy = "compare with another copy: where a shard was missing, the consolidation has written zeros"
        findings.append(Finding("uncovered", f"{directory}/", expected, found, remedy))
    known = {t.name for t in whole.tensors}
    extra, disagreements = boxes.as_tensors([name for name in boxes.held if name not in known])
    remedy = f"consolidate the shards in {directory}/ again"
    findings += disagreements
    findings += [
        Finding("not-in-index", f"{shown(t.name)} in {directory}/", "a consolidated tensor", "shards only", remedy) for t in extra
    ]
    return Contents(
        (*tensors, *extra), files=whole.files, findings=tuple(findings), written_by=boxes.written_by, commit=whole.commit
    )


def _misfit(held: _Held, spec: TensorSpec) -> Finding | None:
    """Why a box cannot be a copy of a part of the consolidated tensor."""
    where = f"{shown(spec.name)} in {held.shard.path}"
    if held.entry.dtype != spec.dtype or len(held.entry.shape) != len(spec.shape):
        found = f"{held.entry.dtype} with {len(held.entry.shape)}"
        return Finding("piece-mismatch", where, f"{spec.dtype} with {len(spec.shape)} dimensions, as consolidated", found)
    if not contains(spec.box, held.box):
        found = f"offsets {list(held.box.offsets)}, sizes {list(held.box.sizes)}"
        return Finding("piece-out-of-bounds", where, f"a box inside {list(spec.shape)}, as consolidated", found)
    return None
