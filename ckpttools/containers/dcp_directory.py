"""One directory of DCP: what its manifests state, held against the files that are there. Opens no item.

Each box is an item: a whole torch file at an offset of a `.distcp` file, possibly compressed; in the safetensors dialect
the file is one safetensors blob instead. `.metadata` is written last and renamed, so its presence is the commit record;
that every file it names is there and long enough is checked all the same. Start with `find_directory` and
`read_directory`.

Source: pytorch/pytorch, torch/distributed/checkpoint/{filesystem,default_planner,planner_helpers}.py, v2.13.0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.containers.copies import distinct_copies
from ckpttools.containers.dcp_manifest import Item, Manifest, ManifestTensor, parse_manifest
from ckpttools.containers.dcp_nodes import NodeManifests
from ckpttools.containers.safetensors_file import SafetensorsHeader, read_header
from ckpttools.containers.shard_index import is_plain_reference
from ckpttools.findings import NOTE, Finding
from ckpttools.model import Box, Commit, Encoding, Extent, FileEntry, ObjectEntry, Piece, TensorEntry, TensorSpec
from ckpttools.storage.source import Listing, Source, read

_RANK_MANIFEST = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r".*__(\d+)_(\d+)\.distcp")
_ZSTD = re.compile(r"stream\.zstd/1")


@dataclass(frozen=True, slots=True)
class DcpDirectory:
    """The files of a directory that DCP wrote."""

    directory: str
    """Where in the snapshot; empty for its root."""
    manifests: tuple[str, ...]
    """`.metadata`, those of ranks, `.metadata.tmp`."""
    data: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.manifests, *self.data)

    @property
    def manifest(self) -> str:
        """`.metadata`, if it is there."""
        return next((m for m in self.manifests if m.rpartition("/")[2] == ".metadata"), "")


@dataclass(frozen=True)
class DcpContents:
    """What a directory holds, under the names as stored."""

    tensors: tuple[TensorEntry, ...] = ()
    objects: tuple[ObjectEntry, ...] = ()
    files: tuple[FileEntry, ...] = ()
    findings: tuple[Finding, ...] = ()
    written_by: str = "torch DCP"
    commit: Commit = field(default_factory=lambda: Commit(True))
    others: Mapping[str, object] = field(default_factory=dict)
    """What else a manifest states, by the name of the member: megatron-core adds `mcore_data`."""


def find_directory(listing: Listing, directory: str) -> DcpDirectory | None:
    """The files of DCP directly in a directory; None when there are none. Pure."""
    prefix = f"{directory}/" if directory else ""
    names = [f.path[len(prefix) :] for f in listing.in_directory(directory)]
    data = [n for n in names if n.endswith(".distcp")]
    manifests = [n for n in names if n in (".metadata", ".metadata.tmp") or _RANK_MANIFEST.fullmatch(n)]
    if not data and ".metadata" not in manifests:
        return None
    return DcpDirectory(directory, tuple(prefix + n for n in manifests), tuple(prefix + n for n in data))


def find_rank_directories(listing: Listing) -> DcpDirectory | None:
    """The files of directories that are named by ranks (`0`, `1`, ...), each with a manifest of its own. Pure."""
    found = {d: one for d in listing.subdirectories() if d.isdecimal() and (one := find_directory(listing, d)) and one.manifest}
    if not found:
        return None
    manifests = tuple(m for one in found.values() for m in one.manifests)
    return DcpDirectory("", manifests, tuple(p for one in found.values() for p in one.data))


def read_directory(source: Source, listing: Listing, found: DcpDirectory, family: str) -> DcpContents:
    """Everything the manifests state, and what is wrong with the files that they name. Raises StorageError."""
    prefix = f"{found.directory}/" if found.directory else ""
    whole = [p for p in found.manifests if p.rpartition("/")[2] == ".metadata"]
    stated = whole or [p for p in found.manifests if _rank_of_manifest(p) >= 0]
    if not stated:
        seen = f"{len(found.data)} data files" + (" and `.metadata.tmp`" if prefix + ".metadata.tmp" in listing else "")
        finding = Finding("not-committed", f"{prefix}.metadata", "`.metadata`, which is written last", seen)
        files = tuple(FileEntry(p, listing.length_bytes(p), "data", family) for p in found.data)
        return DcpContents(files=files, findings=(finding,), commit=Commit(False, "no .metadata"))
    reader = _Reader(source, listing, prefix, family)
    names: list[str] = []
    for place in sorted(stated, key=_rank_of_manifest):
        versions = distinct_copies(source, listing, place)  # several where nodes wrote manifests of their own
        manifests = {p: parse_manifest(read(source, p, 0, listing.length_bytes(p)), p) for p in versions}
        nodes = NodeManifests(listing, place, versions, manifests)
        for name, manifest in manifests.items():
            reader.take(manifest, name, nodes)
            reader.twins |= dict.fromkeys(versions[name][1:], name)
        names += versions
    reader.check_ranks(names, found.data)
    return reader.result(names, found.data)


def _rank_of_manifest(path: str) -> int:
    match = _RANK_MANIFEST.fullmatch(path.rpartition("/")[2])
    return int(match.group(1)) if match else -1


def _rank_of_data(path: str) -> int | None:
    match = _DATA_FILE.fullmatch(path.rpartition("/")[2])
    return int(match.group(1)) if match else None


class _Reader:
    """Puts the rows of one manifest, or of one per rank, together with the files."""

    def __init__(self, source: Source, listing: Listing, prefix: str, family: str) -> None:
        self._source = source
        self._listing = listing
        self._prefix = prefix
        self._manifest = ""
        self._nodes: NodeManifests | None = None
        self._family = family
        self._findings: list[Finding] = []
        self._tensors: dict[str, ManifestTensor] = {}
        self._pieces: dict[str, dict[Box, Piece]] = defaultdict(dict)
        self._replicas: dict[str, list[Piece]] = defaultdict(list)
        self._objects: dict[str, ObjectEntry] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._bad_files: set[str] = set()
        self._used: set[str] = set()
        self.twins: dict[str, str] = {}
        """Files that a further root of a node's manifest holds -> the file of the first."""
        self._headers: dict[str, SafetensorsHeader | None] = {}
        self._version = ""
        self._others: dict[str, object] = {}

    def take(self, manifest: Manifest, where: str, nodes: NodeManifests) -> None:
        """Add the rows of the manifest in a file, which may be one of several that nodes wrote."""
        self._manifest = where
        self._nodes = nodes
        self._findings += manifest.findings
        self._version = self._version or manifest.version
        self._others |= manifest.others
        self._paths.update(manifest.paths)  # type: ignore[arg-type]  # the keys of a planner are str and int
        self._check_files(manifest)
        self._check_apart(manifest)
        for name, tensor in manifest.tensors.items():
            known = self._tensors.setdefault(name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                expected, found = f"{known.dtype} {list(known.shape)}", f"{tensor.dtype} {list(tensor.shape)}"
                self._findings.append(Finding("rank-mismatch", name, expected, found))
                continue
            for chunk in tensor.chunks:
                self._take_chunk(name, tensor, chunk, manifest.items.get((name, chunk.offsets)))
        for name in manifest.objects:
            item = manifest.items.get((name, None))
            extent = self._item_extent(item, name) if item else None
            if item is None:
                self._findings.append(Finding("index-mismatch", name, "a place in storage_data", "none"))
            elif extent is not None:
                path = self._paths.get(name, (name,))
                self._objects.setdefault(name, ObjectEntry(name, path, "object", None, extent, self._family))

    def _take_chunk(self, name: str, tensor: ManifestTensor, chunk: Box, item: Item | None) -> None:
        if item is None:
            if chunk.volume:
                found = f"none for the box at {list(chunk.offsets)}"
                self._findings.append(Finding("index-mismatch", name, "a place in storage_data for each chunk", found))
            return
        extent = self._tensor_extent(name, tensor, chunk, item)
        if extent is None:
            return
        piece = Piece(chunk, extent, _rank_of_data(item.file))
        if self._pieces[name].setdefault(chunk, piece).extent != extent:  # two manifests may name one and the same item
            self._replicas[name].append(piece)

    def _path(self, file: str) -> str:
        """What a reference in the manifest that is being taken leads to: a file beside it."""
        return self._nodes.file_of(self._manifest, file) if self._nodes is not None else file

    def _check_files(self, manifest: Manifest) -> None:
        """References that leave the directory, files that are absent, files shorter than their items need."""
        needed: dict[str, int] = defaultdict(int)
        for item in manifest.items.values():
            needed[item.file] = max(needed[item.file], item.offset + item.length)
        for file in sorted(needed):
            path = self._path(file)
            if self._nodes is not None:
                self.twins |= dict.fromkeys(self._nodes.copies_of(self._manifest, file), path)
            if not is_plain_reference(file):
                self._findings.append(Finding("reference-outside", self._manifest, "a file beside it", f"`{file}`"))
            elif (listed := self._listing.find(path)) is None or not listed.is_regular:
                self._findings.append(Finding("missing-file", path, f"a file of at least {needed[file]} bytes", "no such file"))
            elif listed.length_bytes < needed[file]:
                code = "file-too-short" if listed.length_bytes else "empty-file"
                self._findings.append(Finding(code, path, f"at least {needed[file]} bytes", f"{listed.length_bytes} bytes"))
                self._used.add(path)
                continue
            else:
                self._used.add(path)
                continue
            self._bad_files.add(path)

    def _check_apart(self, manifest: Manifest) -> None:
        """Items that share bytes, which no writer makes (the safetensors dialect states offsets that are no places)."""
        by_file: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for (name, _), item in manifest.items.items():
            by_file[item.file].append((item.offset, item.length, name))
        for file, places in by_file.items():
            if sum(1 for offset, _, _ in places if offset == 0) > 1:
                continue
            end, before = 0, ""
            for offset, length, name in sorted(set(places)):
                if offset < end and length:
                    found = f"{before} up to byte {end}"
                    self._findings.append(
                        Finding("extent-overlap", f"{name} in {self._path(file)} at byte {offset}", "items apart", found)
                    )
                if offset + length > end:
                    end, before = offset + length, name

    def _item_extent(self, item: Item, name: str) -> Extent | None:
        """The stretch of an item that is a torch file; None when it cannot be read."""
        path = self._path(item.file)
        if path in self._bad_files or item.offset + item.length > self._listing.length_bytes(path):
            return None
        if not item.transforms:
            return Extent(path, item.offset, item.length, container="torch")
        if len(item.transforms) == 1 and _ZSTD.fullmatch(item.transforms[0]):
            return Extent(path, 0, item.length, encoding=Encoding("zstd", item.offset, item.length), container="torch")
        where = f"{name} in {path} at byte {item.offset}"
        self._findings.append(
            Finding("unsupported-container", where, "no transform, or stream.zstd/1", ", ".join(item.transforms))
        )
        return None

    def _tensor_extent(self, name: str, tensor: ManifestTensor, chunk: Box, item: Item) -> Extent | None:
        """Like `_item_extent`, but for a file that is one safetensors blob the exact place of the box in it.

        An item that is exactly as long as its values has no torch file around it; then its file's header says where.
        """
        extent = self._item_extent(item, name)
        if extent is None or item.transforms or item.length != tensor.dtype.length_bytes(chunk.volume):
            return extent
        header = self._safetensors_header(extent.file)
        if header is None:
            return extent
        found = next((e for e in header.entries if e.name == name), None)
        if found is None or not found.is_readable or (found.dtype, found.shape) != (tensor.dtype, chunk.sizes):
            stated = f"{found.dtype} {list(found.shape)}" if found else "none of this name"
            expected = f"{tensor.dtype} {list(chunk.sizes)}"
            self._findings.append(Finding("piece-mismatch", f"{name} in {extent.file}", expected, stated))
            return None
        return Extent(extent.file, found.offset, found.length)

    def _safetensors_header(self, path: str) -> SafetensorsHeader | None:
        if path not in self._headers:
            length = self._listing.length_bytes(path)
            head = read(self._source, path, 0, min(length, 9))
            header = read_header(self._source, path, 0, length) if head[8:9] == b"{" else None
            if header is not None:
                self._findings += header.findings
            self._headers[path] = header
        return self._headers[path]

    def check_ranks(self, manifests: Sequence[str], data_files: Sequence[str]) -> None:
        """With one manifest per rank, a rank whose data is there and whose manifest is not was not finished."""
        ranks = {_rank_of_manifest(m) for m in manifests}
        if ranks == {-1}:
            self._check_rank_directories(manifests)
            return
        wanted = {r for f in data_files if (r := _rank_of_data(f)) is not None} | set(range(max(ranks) + 1))
        for rank in sorted(wanted - ranks):
            where = f"{self._prefix}__{rank}.metadata"
            self._findings.append(Finding("missing-rank", where, f"a manifest for each of {len(wanted)} ranks", "no such file"))

    def _check_rank_directories(self, manifests: Sequence[str]) -> None:
        """Where each rank has a directory, there is one for each number up to the highest."""
        ranks = {int(d) for m in manifests if (d := m.rpartition("/")[0]).isdecimal()}
        for rank in sorted(set(range(max(ranks, default=-1) + 1)) - ranks):
            found = f"{len(ranks)} of {max(ranks) + 1} directories"
            self._findings.append(Finding("missing-rank", str(rank), f"a directory for each of {max(ranks) + 1} ranks", found))

    def result(self, manifests: Sequence[str], data_files: Sequence[str]) -> DcpContents:
        """Everything taken."""
        tensors = []
        for name, tensor in self._tensors.items():
            spec = TensorSpec(name, tensor.dtype, tensor.shape)
            pieces, replicas = tuple(self._pieces[name].values()), tuple(self._replicas[name])
            tensors.append(TensorEntry(spec, self._paths.get(name, (name,)), pieces, replicas, family=self._family))
        files = [FileEntry(m, self._listing.length_bytes(m), "manifest", self._family) for m in manifests]
        copies = {c.path for path in data_files for c in self._listing.copies.get(path, ())}
        copies.update(data_files)
        for path in sorted(copies.intersection((*data_files, *self._used)) - set(self.twins)):
            length = self._listing.length_bytes(path)
            is_stale = path not in self._used and length > 0
            files.append(FileEntry(path, length, "unreferenced" if is_stale else "data", self._family))
            if is_stale:
                self._findings.append(Finding("unreferenced-file", path, "a manifest that names it", "none", severity=NOTE))
        for path, first in sorted(self.twins.items()):
            files.append(FileEntry(path, self._listing.length_bytes(path), "replica", self._family, copy_of=first))
        return DcpContents(
            tensors=tuple(tensors),
            objects=tuple(self._objects.values()),
            files=tuple(files),
            findings=tuple(dict.fromkeys(self._findings)),
            written_by=f"torch DCP {self._version}".strip(),
            commit=Commit(True, manifests[0]),
            others=self._others,
        )
