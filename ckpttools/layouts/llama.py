"""Meta's own files of Llama: `consolidated.NN.pth`, one per tensor-parallel rank, and `params.json`.

The files hold local tensors and say nothing of the others; which dimension a tensor is cut along follows from its name, and
for the token embeddings from the shapes, because it changed with Llama 3. Files that `arrange_ranks` wrote have a note of ours
that states it. Read `read` and `_Joiner` first.

Source: meta-llama/llama, llama/generation.py and llama/model.py; meta-llama/llama3, llama/model.py;
huggingface/transformers, src/transformers/models/llama/convert_llama_weights_to_hf.py, 4.57.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ckpttools.containers.jsons import JsonError, parse_json
from ckpttools.containers.local_boxes import render_local_boxes
from ckpttools.containers.torch_archive import arrange_archive, tensor_record
from ckpttools.containers.torch_entries import Entries, RankFile, open_rank_file, read_entries
from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.model import (
    ArrangedFile,
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
from ckpttools.placement.held import held_by, require_axes, require_none, uncuttable
from ckpttools.placement.local import Cut, PlacedTensor, Placement, local_tensor
from ckpttools.storage.source import Listing, Source, read

_FILE = re.compile(r"consolidated\.(?P<rank>\d{2,6})\.pth")
_PARAMS = "params.json"
_MAX_PARAMS_BYTES = 1 << 20
_MAX_RANKS = 1 << 12
_MAX_LISTED = 20
_AXIS = "tp"
_RULES = (
    (re.compile(r"(.*\.)?(attention\.w[qkv]|feed_forward\.w[13]|output)\.(weight|bias)"), 0),
    (re.compile(r"(.*\.)?(attention\.wo|feed_forward\.w2)\.weight"), 1),
    (re.compile(r"(.*\.)?([a-z_]*norm\.(weight|bias)|rope\.(inv_)?freqs?|attention\.wo\.bias|feed_forward\.w2\.bias)"), None),
)
"""Name -> the dimension that the ranks cut; None for a tensor that every rank has whole."""
_EMBEDDINGS = re.compile(r"(.*\.)?tok_embeddings\.weight")
_KEYS_AND_VALUES = re.compile(r"(.*\.)?attention\.w[kv]\.(weight|bias)")
_QUERIES = re.compile(r"(.*\.)?attention\.wq\.weight")


def arrange_ranks(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry] = (),
    sequences: Mapping[Path, str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Arrangement:
    """`consolidated.<NN>.pth` for every tensor-parallel rank: a flat dict of the rank's tensors. Pure.

    Args: aliases: further name -> the name of the tensor that it is, which is stored once.

    Raises: ConversionError: for a mesh with other axes than `tp`, and naming what is not cut as Meta's loader expects it.
    """
    require_axes(mesh, (_AXIS,), "Llama's files are told apart by the tensor-parallel rank alone")
    refused = refusals(tensors, mesh, objects=objects)
    hints = ["these files have Meta's names and cuts: rename the tensors first"] if len(refused) == len(tensors) else []
    require_none(refused, "Llama's consolidated.NN.pth", hints=hints)
    files = [_arrange_file(tensors, mesh, rank, aliases or {}) for rank in range(mesh.ranks)]
    return Arrangement("llama", tuple(files))


def _arrange_file(tensors: Sequence[PlacedTensor], mesh: Mesh, rank: int, aliases: Mapping[str, str]) -> ArrangedFile:
    held = {one.spec.name: one for one in held_by(tensors, mesh, rank)}
    value = {name: tensor_record(one.spec, str(i)) for i, (name, one) in enumerate(held.items())}
    named = held | {alias: held[kept] for alias, kept in aliases.items()}
    value |= {alias: value[kept] for alias, kept in aliases.items()}
    note = render_local_boxes(named.items(), mesh, rank)
    storages = {str(i): one for i, one in enumerate(held.values())}
    return arrange_archive(f"consolidated.{rank:02d}.pth", value, storages, note=note)


def refusals(
    tensors: Sequence[PlacedTensor], mesh: Mesh, *, objects: Sequence[ObjectEntry] = (), **_options: object
) -> dict[str, str]:
    """Per name of a tensor or object: why these files cannot hold it. Pure."""
    refused = {o.name: f"{o.kind}: the files hold tensors only" for o in objects} | uncuttable(tensors, mesh)
    is_llama = any(_is_known(t.spec.name) for t in tensors)
    for tensor in tensors:
        spec = tensor.spec
        if spec.dtype.kind == "quantized" or spec.dtype.is_sub_byte:
            refused[spec.name] = f"torch has no plain tensor of {spec.dtype}"
        elif not _is_known(spec.name):
            if mesh.ranks > 1 or not is_llama:
                refused[spec.name] = "not a name of Llama's own files"
        elif not any(_is_cut_along(tensor, mesh, dim) for dim in _allowed(spec.name)):
            refused[spec.name] = _misfit(tensor, mesh)
    return refused


def _allowed(name: str) -> tuple[int | None, ...]:
    return (0, 1) if _EMBEDDINGS.fullmatch(name) else tuple(dim for pattern, dim in _RULES if pattern.fullmatch(name))


def _is_known(name: str) -> bool:
    return bool(_allowed(name))


def _is_cut_along(tensor: PlacedTensor, mesh: Mesh, dim: int | None) -> bool:
    """Whether every rank has the share that Meta's loader expects."""
    shape, is_head = tensor.spec.shape, _KEYS_AND_VALUES.fullmatch(tensor.spec.name)
    copies = next((cut.copies for cut in tensor.placement.cuts), ()) if is_head else ()
    if dim is not None and (dim >= len(shape) or shape[dim] * max(copies, default=1) % mesh.ranks):
        return False
    meant = Placement((Cut(_AXIS, dim, copies=copies),)) if dim is not None else Placement()
    return all(tensor.local(mesh, rank) == local_tensor(shape, meant, mesh, rank) for rank in range(mesh.ranks))


def _misfit(tensor: PlacedTensor, mesh: Mesh) -> str:
    """Why a tensor is not what the loader expects, with its numbers."""
    shape, allowed = tensor.spec.shape, _allowed(tensor.spec.name)
    odd = [d for d in allowed if d is not None and d < len(shape) and shape[d] % mesh.ranks]
    if odd:
        return f"{list(shape)}: {shape[odd[0]]} along dimension {odd[0]} is not divisible by {mesh.ranks}"
    cuts = ", ".join(f"{c.axis} along {c.dim}" for c in tensor.placement.cuts) or "whole on every rank"
    meant = " or ".join("whole" if d is None else f"cut along {d}" for d in allowed)
    return f"{list(shape)}: it is {cuts}, and Meta's loader has it {meant}"


class Llama:
    """See the module."""

    name = "llama"
    looks_for = "consolidated.NN.pth, one per tensor-parallel rank"

    arrange_ranks = staticmethod(arrange_ranks)

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """One part; a single file that was named by itself is a torch file like any other."""
        files = [f.path for f in listing.in_directory("") if _FILE.fullmatch(f.path) and f.is_regular]
        if not files or listing.is_one_file:
            return []
        return [Part(self.name, "model", tuple(sorted(files, key=_rank)))]

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The tensors that the ranks' own make up, by notes of ours or by Meta's rules."""
        files = [open_rank_file(source, path, listing.length_bytes(path), _rank(path)) for path in part.files]
        if all(f.torch.note is not None for f in files):
            joined = _by_notes(files)
        else:
            params, findings = _params(source, listing)
            joined = _Joiner(files, params).join()
            joined.findings[:0] = findings
        missing = _missing(part.files, joined.ranks)
        return Contents(
            tensors=tuple(joined.tensors),
            objects=tuple(joined.objects),
            files=tuple(FileEntry(path, listing.length_bytes(path), "data") for path in part.files),
            findings=(*missing, *joined.findings),
            mesh=joined.mesh,
            written_by="Meta's Llama",
            commit=Commit(not missing, missing[0].where if missing else ""),
            checksums=tuple(joined.checksums),
            trees=joined.trees,
        )


LAYOUT = Llama()


def _rank(path: str) -> int:
    match = _FILE.fullmatch(path)
    return int(match["rank"]) if match else 0


def _missing(files: Sequence[str], ranks: int) -> list[Finding]:
    there = {_rank(path) for path in files}
    absent = islice((r for r in range(max(ranks, max(there) + 1)) if r not in there), _MAX_LISTED)
    found = f"{len(there)} files"
    return [Finding("missing-rank", f"consolidated.{r:02d}.pth", f"a file for each of {ranks} ranks", found) for r in absent]


def _by_notes(files: Sequence[RankFile]) -> Entries:
    entries = read_entries(files)
    for file in files:
        note = file.torch.note
        if note is not None and (note.rank != file.rank or note.mesh.ranks != entries.ranks):
            expected, found = f"rank {file.rank} of {entries.ranks}", f"what rank {note.rank} of {note.mesh} holds"
            entries.findings.append(Finding("rank-mismatch", file.path, expected, found))
    return entries


def _params(source: Source, listing: Listing) -> tuple[dict[str, int], list[Finding]]:
    """The numbers of `params.json`; none where it is not there, and a finding where it does not parse."""
    if _PARAMS not in listing or not listing.files[_PARAMS].is_regular:
        return {}, []
    try:
        stated = parse_json(read(source, _PARAMS, 0, min(listing.length_bytes(_PARAMS), _MAX_PARAMS_BYTES)))
    except JsonError as e:
        return {}, [Finding("bad-json", _PARAMS, "the model's parameters", e.message)]
    numbers = stated.items() if isinstance(stated, dict) else ()
    return {key: value for key, value in numbers if type(value) is int and value > 0}, []


@dataclass
class _Joiner:
    """Puts the tensors of files without notes together."""

    files: Sequence[RankFile]
    params: Mapping[str, int]
    joined: Entries = field(default_factory=Entries)
    held: dict[str, dict[int, TensorEntry]] = field(default_factory=lambda: defaultdict(dict))
    """Name -> rank -> the rank's own tensor."""

    def join(self) -> Entries:
        """The tensors of all files, with findings for what does not fit together."""
        for file in self.files:
            file.torch.note = None
            entries = read_entries([file])
            self.joined.findings += entries.findings
            self.joined.checksums += entries.checksums
            if not self.joined.trees:
                self.joined.trees, self.joined.objects = entries.trees, entries.objects
            for entry in entries.tensors:
                self.held[entry.name][file.rank] = entry
        self.joined.ranks = self._ranks()
        self.joined.mesh = Mesh(((_AXIS, self.joined.ranks),))
        for name, own in self.held.items():
            self._join(name, own)
        rows = self._query_rows()
        if "dim" not in self.params and (len(self.files) > 1 or (rows and rows != self._width())):
            expected, found = f"{_PARAMS}, which tells how many ranks there are", "none, or without `dim`"
            self.joined.findings.append(Finding("completeness-unproved", self.files[-1].path, expected, found))
        return self.joined

    def _ranks(self) -> int:
        """How many ranks there are: as many as queries of all heads need, where the parameters tell how many those have."""
        found = max(f.rank for f in self.files) + 1
        rows, dim = self._query_rows(), self.params.get("dim", 0)
        heads = self.params.get("n_heads", 0)
        total = heads * self.params["head_dim"] if heads and "head_dim" in self.params else dim
        if not rows or not total or total % rows or total // rows > _MAX_RANKS:
            return found
        if total // rows < found:
            expected, stated = f"{total // rows} files, for {total} rows of queries in parts of {rows}", f"{found} files"
            self.joined.findings.append(Finding("rank-mismatch", self.files[-1].path, expected, stated))
        return max(found, total // rows)

    def _query_rows(self) -> int:
        """Rows of queries that a rank has in its first layer; 0 where there is no such tensor."""
        queries = next((own for name, own in self.held.items() if _QUERIES.fullmatch(name)), None)
        shape = next(iter(queries.values())).spec.shape if queries else ()
        return shape[0] if shape else 0

    def _join(self, name: str, own: Mapping[int, TensorEntry]) -> None:
        """One tensor from what each rank has of it."""
        first = next(iter(own.values()))
        alike = {rank: entry for rank, entry in own.items() if entry.spec == first.spec}
        for rank in own.keys() - alike.keys():
            spec = own[rank].spec
            expected = f"{first.spec.dtype} {list(first.spec.shape)}, as in the other files"
            where = f"{name} in {self._path(rank)}"
            self.joined.findings.append(Finding("rank-mismatch", where, expected, f"{spec.dtype} {list(spec.shape)}"))
        lacking = [f for f in self.files if f.rank not in own]
        for file in lacking[:1]:
            expected = f"`{name}` in every file"
            self.joined.findings.append(
                Finding("rank-mismatch", file.path, expected, f"none in {len(lacking)} of {len(self.files)}")
            )
        dim, copies = self._rule(name, first.spec)
        if dim == _UNKNOWN:
            expected = "a name that tells which part of the tensor each rank holds"
            self.joined.findings.append(Finding("no-rule", name, expected, f"{list(first.spec.shape)} in each file"))
            self.joined.tensors += [_renamed(entry, (f"rank_{rank}", *entry.path)) for rank, entry in own.items()]
            return
        pieces: dict[Box, Piece] = {}
        replicas = []
        for rank, entry in alike.items():
            for piece in entry.pieces:
                box = piece.box
                if dim is not None and dim >= 0:
                    box = _shifted(box, dim, rank // copies * first.spec.shape[dim])
                placed = replace(piece, box=box, rank=rank)
                if box in pieces:
                    replicas.append(placed)
                else:
                    pieces[box] = placed
        shape = first.spec.shape
        if dim is not None and dim >= 0:
            shape = (*shape[:dim], shape[dim] * (self.joined.ranks // copies), *shape[dim + 1 :])
        spec = TensorSpec(name, first.spec.dtype, shape)
        self.joined.tensors.append(replace(first, spec=spec, pieces=tuple(pieces.values()), replicas=tuple(replicas)))

    def _rule(self, name: str, spec: TensorSpec) -> tuple[int | None, int]:
        """(the dimension that ranks cut, how many ranks hold each part); None for a tensor that all have whole."""
        if self.joined.ranks == 1:
            return None, 1
        if _EMBEDDINGS.fullmatch(name):
            return self._embedding_rule(spec), 1
        dim = next((dim for pattern, dim in _RULES if pattern.fullmatch(name)), _UNKNOWN)
        if dim is None or dim == _UNKNOWN:
            return dim, 1
        if dim >= len(spec.shape):
            return _UNKNOWN, 1
        if _KEYS_AND_VALUES.fullmatch(name) and "n_heads" in self.params and "n_kv_heads" in self.params:
            head = self.params.get("head_dim", self.params.get("dim", 0) // self.params["n_heads"])
            total = self.params["n_kv_heads"] * head
            stored = spec.shape[0] * self.joined.ranks
            if total and stored > total and stored % total == 0:  # fewer heads than ranks: neighbours have the same ones
                return dim, stored // total
        return dim, 1

    def _embedding_rule(self, spec: TensorSpec) -> int | None:
        """Llama 1 and 2 cut the width of the embeddings, Llama 3 the vocabulary; by the shapes, whoever wrote them."""
        width = self.params.get("dim") or self._width()
        ranks, vocabulary = self.joined.ranks, self.params.get("vocab_size")
        if len(spec.shape) != 2 or not width:
            return _UNKNOWN
        rows, columns = spec.shape
        if columns * ranks == width:
            return 1
        if columns != width:
            return _UNKNOWN
        output = next((own for name, own in self.held.items() if re.fullmatch(r"(.*\.)?output\.weight", name)), None)
        part = next(iter(output.values())).spec.shape[:1] if output else ()
        if (vocabulary and rows * ranks == vocabulary) or part == (rows,):
            return 0
        if rows == vocabulary or (part and part[0] * ranks == rows):
            return None
        return _UNKNOWN

    def _width(self) -> int:
        """The model's width, from the norm that every rank has whole."""
        norm = next((own for name, own in self.held.items() if name == "norm.weight"), None)
        shape = next(iter(norm.values())).spec.shape if norm else ()
        return shape[0] if len(shape) == 1 else 0

    def _path(self, rank: int) -> str:
        return next(f.path for f in self.files if f.rank == rank)


_UNKNOWN = -1


def _shifted(box: Box, dim: int, by: int) -> Box:
    offsets = box.offsets
    return Box((*offsets[:dim], offsets[dim] + by, *offsets[dim + 1 :]), box.sizes)


def _renamed(entry: TensorEntry, path: Path) -> TensorEntry:
    return replace(entry, spec=replace(entry.spec, name=render_path(path)), path=path)
