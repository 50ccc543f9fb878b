"""vLLM's sharded state: per tensor-parallel rank the tensors as they are in that rank's model, in parts of a limited size.

vLLM states nowhere what a rank's tensor is a part of. What `arrange_ranks` writes has a note of it in each header, which
vLLM does not look at; with it the files are one checkpoint, and without it each rank's tensors are listed as its own.
Read `read` and `_Ranks` first.

Source: vllm-project/vllm, vllm/model_executor/model_loader/sharded_state_loader.py, 0.11.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ckpttools.containers.jsons import shown
from ckpttools.containers.local_boxes import LocalBoxes, pieces_of
from ckpttools.containers.safetensors_file import SafetensorsEntry, SafetensorsHeader
from ckpttools.containers.safetensors_ranks import arrange_rank_file, in_parts, read_note, unholdable
from ckpttools.containers.safetensors_set import piece_of, read_headers
from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.model import (
    Arrangement,
    Box,
    Commit,
    FileEntry,
    Mesh,
    ObjectEntry,
    Path,
    Piece,
    TensorEntry,
    TensorSpec,
    render_path,
)
from ckpttools.placement.held import held_by, require_axes, require_none
from ckpttools.placement.local import PlacedTensor
from ckpttools.storage.source import Listing, Source

_FILE = re.compile(r"model-rank-(?P<rank>\d{1,9})-part-(?P<part>\d{1,9})\.safetensors")
_GROUPED = re.compile(r"(.*\.)?((self_)?attention\.query_key_value|attention\.wqkv|attn\.c_attn)\.(weight|bias)")
_TRANSPOSED = re.compile(r"(.*\.)?attn\.c_attn\.weight")
_AXIS = "tp"
_MAX_LISTED = 20


def arrange_ranks(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry] = (),
    sequences: Mapping[Path, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    max_part_bytes: int | None = None,
) -> Arrangement:
    """`model-rank-<R>-part-<P>.safetensors` for every tensor-parallel rank. Pure.

    Of tied tensors one is written, as vLLM does, which refuses a file with both; the headers name the others.

    Args: max_part_bytes: of tensors in a file, after which vLLM begins another; one file per rank when None.

    Raises: ConversionError: for a mesh with other axes than `tp`, and naming what these files cannot hold.
    """
    require_axes(mesh, (_AXIS,), "vLLM's sharded state is told apart by the tensor-parallel rank alone")
    require_none(refusals(tensors, mesh, objects=objects), "vLLM's sharded state")
    tied = {alias: kept for alias, kept in (aliases or {}).items() if alias != "format"}
    files = []
    for rank in range(mesh.ranks):
        for part, held in enumerate(in_parts(((h.spec.name, h) for h in held_by(tensors, mesh, rank)), max_part_bytes)):
            metadata = {**tied, "format": "pt"}
            if all(len(one.local.parts) == 1 for one in held.values()):
                info = {name: {"saved_offsets": one.local.parts[0].box.offsets} for name, one in held.items()}
                metadata["DCP_SHARDING_INFO"] = json.dumps(info)
            files.append(arrange_rank_file(f"model-rank-{rank}-part-{part}.safetensors", held, metadata, mesh, rank))
    return Arrangement("vllm", tuple(files))


def refusals(
    tensors: Sequence[PlacedTensor], mesh: Mesh, *, objects: Sequence[ObjectEntry] = (), **_options: object
) -> dict[str, str]:
    """Per name of a tensor or object: why these files cannot hold it. Pure."""
    refused = unholdable(tensors, mesh, objects)
    for tensor in tensors:
        shapes = [h.local.shape for rank in range(mesh.ranks) for h in held_by([tensor], mesh, rank)]
        if len(set(shapes)) > 1:
            each = " and ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            refused[tensor.spec.name] = f"{list(tensor.spec.shape)} over {mesh} gives ranks {each}, and vLLM needs equal shares"
        elif why := _differs(tensor):
            refused[tensor.spec.name] = why
    return refused


def _differs(tensor: PlacedTensor) -> str:
    """Why vLLM has other values under a name than the checkpoint it loads: its loaders put them in another order."""
    shape, is_cut_in_parts = tensor.spec.shape, any(cut.sections for cut in tensor.placement.cuts)
    if _TRANSPOSED.fullmatch(tensor.spec.name) and len(shape) == 2 and shape[1] == 3 * shape[0]:
        return "columns are outputs, as GPT-2 has them, and in vLLM rows are"
    if _GROUPED.fullmatch(tensor.spec.name) and not is_cut_in_parts:
        return "rows of query, key and value are grouped per head, and vLLM has all queries first, then keys and values"
    return ""


@dataclass(frozen=True, slots=True)
class _RankFile:
    path: str
    rank: int
    part: int

    @classmethod
    def parse(cls, path: str) -> _RankFile | None:
        match = _FILE.fullmatch(path)
        return cls(path, int(match["rank"]), int(match["part"])) if match else None


class Vllm:
    """See the module."""

    name = "vllm"
    looks_for = "model-rank-<R>-part-<P>.safetensors"

    arrange_ranks = staticmethod(arrange_ranks)

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """One part: all files of all ranks."""
        files = [f for f in (_RankFile.parse(f.path) for f in listing.in_directory("")) if f is not None]
        files.sort(key=lambda f: (f.rank, f.part))
        return [Part(self.name, "model", tuple(f.path for f in files))] if files else []

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The tensors that the ranks' notes put together; each rank's own where there are none."""
        files = [f for f in map(_RankFile.parse, part.files) if f is not None]
        headers = read_headers(source, listing, part.files)
        ranks = _Ranks(len({f.rank for f in files}) > 1)
        for file in files:
            ranks.take(file, headers[file.path])
        missing = [] if listing.is_one_file else ranks.check_files(files)
        return Contents(
            tensors=tuple(g.entry for g in ranks.tensors.values()),
            files=tuple(FileEntry(path, listing.length_bytes(path), "data") for path in part.files),
            findings=tuple(ranks.findings),
            mesh=ranks.mesh,
            written_by="vLLM's sharded state",
            commit=Commit(not missing, missing[0] if missing else ""),
        )


LAYOUT = Vllm()


@dataclass
class _Gathered:
    """What the ranks hold of one tensor."""

    spec: TensorSpec
    path: Path
    is_stated: bool
    pieces: dict[Box, Piece] = field(default_factory=dict)
    replicas: list[Piece] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)

    @property
    def entry(self) -> TensorEntry:
        pieces = tuple(self.pieces.values())
        return TensorEntry(self.spec, self.path, pieces, tuple(self.replicas), shape_is_declared=self.is_stated)


class _Ranks:
    """Collects what the files of all ranks hold."""

    def __init__(self, is_several: bool) -> None:
        self.tensors: dict[Path, _Gathered] = {}
        self.findings: list[Finding] = []
        self.mesh = Mesh()
        self._is_several = is_several
        self._is_noted = False

    def take(self, file: _RankFile, header: SafetensorsHeader) -> None:
        """Add the tensors of one file."""
        self.findings += header.findings
        note = read_note(header, self.findings)
        if note is not None:
            self._take_note(file, note)
        for entry in header.entries:
            noted = note.tensors.get(entry.name) if note is not None else None
            path: Path = (entry.name,) if noted is not None or not self._is_several else (f"rank_{file.rank}", entry.name)
            spec = TensorSpec(render_path(path), entry.dtype, noted.shape if noted is not None else entry.shape)
            gathered = self.tensors.setdefault(path, _Gathered(spec, path, noted is not None))
            gathered.ranks.add(file.rank)
            if gathered.spec != spec:
                expected = f"{gathered.spec.dtype} {list(gathered.spec.shape)}, as in other files"
                found = f"{spec.dtype} {list(spec.shape)}"
                self.findings.append(Finding("rank-mismatch", f"{shown(entry.name)} in {file.path}", expected, found))
            elif entry.is_readable:
                self._add(gathered, [piece_of(entry, file.path, rank=file.rank)] if noted is None else _pieces(entry, note, file))

    def _take_note(self, file: _RankFile, note: LocalBoxes) -> None:
        if note.rank != file.rank or (self._is_noted and note.mesh != self.mesh):
            expected = f"rank {file.rank} of {self.mesh if self._is_noted else note.mesh}"
            self.findings.append(
                Finding("rank-mismatch", f"the note in {file.path}", expected, f"rank {note.rank} of {note.mesh}")
            )
        self.mesh = self.mesh if self._is_noted else note.mesh
        self._is_noted = True

    def _add(self, gathered: _Gathered, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.box in gathered.pieces:
                gathered.replicas.append(piece)
            else:
                gathered.pieces[piece.box] = piece

    def check_files(self, files: Sequence[_RankFile]) -> list[str]:
        """Findings for ranks, parts and tensors of a rank that are absent; returns the names of the absent files."""
        present = {(f.rank, f.part) for f in files}
        ranks = max(max(f.rank for f in files) + 1, self.mesh.ranks)
        missing = [f"model-rank-{r}-part-0.safetensors" for r in islice(_absent(ranks, {f.rank for f in files}), _MAX_LISTED)]
        found = f"files of {len({f.rank for f in files})} ranks"
        self.findings += [Finding("missing-rank", path, f"files of {ranks} ranks", found) for path in missing]
        last = {rank: max(p for r, p in present if r == rank) for rank in {f.rank for f in files}}
        gaps = ((r, p) for r in sorted(last) for p in _absent(last[r], {part for rank, part in present if rank == r}))
        for rank, part in islice(gaps, _MAX_LISTED):
            missing.append(f"model-rank-{rank}-part-{part}.safetensors")
            self.findings.append(Finding("missing-file", missing[-1], f"parts up to {last[rank]}", "none"))
        for gathered in islice((g for g in self.tensors.values() if g.is_stated and len(g.ranks) < len(last)), _MAX_LISTED):
            lacking = sorted(set(last) - gathered.ranks)[0]
            where = f"{shown(gathered.spec.name)} of rank {lacking}"
            self.findings.append(Finding("missing-file", where, "every tensor in the files of every rank", "none"))
        if not all(g.is_stated for g in self.tensors.values()) or not self.tensors:
            expected, told = "which parts of which tensors the ranks hold", "nothing that says it"
            self.findings.append(Finding("completeness-unproved", files[-1].path, expected, told))
        return missing


def _absent(count: int, present: set[int]) -> Iterator[int]:
    return (n for n in range(count) if n not in present)


def _pieces(entry: SafetensorsEntry, note: LocalBoxes | None, file: _RankFile) -> list[Piece]:
    """The boxes of the global tensor that a rank's tensor is made of."""
    noted = note.tensors[entry.name] if note is not None else None
    spec = TensorSpec(entry.name, entry.dtype, entry.shape)
    return pieces_of(noted.local, spec, file.path, entry.offset, file.rank) if noted is not None else []
