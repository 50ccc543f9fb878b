"""Files that several roots of a snapshot hold: copies are replicas, and must hold the same bytes.

Of the tensors in a copied file every copy is a replica, which whoever reads values compares. The bytes around them (headers,
pickles, manifests) are compared here. Start with `with_copies` and `compare_rest`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckpttools.containers.region import Region
from ckpttools.containers.torch_file import read_torch_file
from ckpttools.errors import StorageError
from ckpttools.findings import WARNING, Finding
from ckpttools.model import Checkpoint, FileEntry, ObjectEntry, Piece, StoredChecksum, TensorEntry
from ckpttools.storage.source import Listing, Source, read

_BLOCK_BYTES = 1 << 20
_NEAR_BYTES = 64 << 10
"""Reading so many bytes for nothing is cheaper than another round trip: a DCP file has a gap per item."""


def distinct_copies(source: Source, listing: Listing, path: str) -> dict[str, list[str]]:
    """The different contents that a file and its copies have: the first path with each, and all paths with it.

    Raises: StorageError: when one of them cannot be read.
    """
    distinct = {path: [path]}
    for copy in listing.copies.get(path, ()):
        length = copy.length_bytes
        alike = (p for p in distinct if listing.length_bytes(p) == length)
        first = next((p for p in alike if _first_difference(source, p, copy.path, [(0, length)]) is None), copy.path)
        distinct.setdefault(first, []).append(copy.path)
    return distinct


def with_copies(source: Source, checkpoint: Checkpoint, listing: Listing) -> Checkpoint:
    """The checkpoint with the copies of its files: their tensors as replicas, and a finding where a copy is laid out otherwise.

    A copy that the layout read as a file of its own (the data that a node's own manifest names) is not touched.

    Raises: StorageError: when the storage fails.
    """
    if not listing.copies:
        return checkpoint
    known = {f.path: f for f in checkpoint.files}
    unclaimed = [
        FileEntry(c.path, c.length_bytes, "replica", known[path].family, c.root, path)
        for path, copies in listing.copies.items()
        for c in copies
        if c.path not in known
    ]
    alike: dict[str, list[str]] = defaultdict(list)
    findings: list[Finding] = []
    for copy in (*unclaimed, *checkpoint.files):
        if not copy.copy_of:
            continue
        listed = listing.find(copy.path)
        if copy.length_bytes == listing.length_bytes(copy.copy_of) and listed is not None and listed.is_regular:
            alike[copy.copy_of].append(copy.path)
        else:
            findings.append(_other_length(known[copy.copy_of], copy, is_regular=listed is not None and listed.is_regular))
    checksums, bad = _own_checksums(source, checkpoint, alike)
    return replace(
        checkpoint,
        tensors=tuple(_with_replicas(t, alike) for t in checkpoint.tensors),
        objects=tuple(_with_extents(o, alike) for o in checkpoint.objects),
        files=tuple(sorted((*checkpoint.files, *unclaimed), key=lambda f: f.path)),
        findings=(*checkpoint.findings, *findings, *bad),
        checksums=(*checkpoint.checksums, *checksums),
    )


def _other_length(file: FileEntry, copy: FileEntry, *, is_regular: bool) -> Finding:
    found = f"{copy.length_bytes} bytes" if is_regular else "no regular file"
    where = f"{file.place} and {copy.place}"
    return Finding("replica-mismatch", where, f"{file.length_bytes} bytes", found, severity=_severity(file))


def _severity(entry: FileEntry) -> str:
    """Logs and configuration that each node wrote for itself do not keep anyone from the tensors."""
    return WARNING if entry.role in ("companion", "unreferenced", "seal") else ""


def _with_replicas(entry: TensorEntry, alike: dict[str, list[str]]) -> TensorEntry:
    """Copies of a file may never differ, replicas of ranks sometimes: then the bytes are compared with the rest of the file."""
    if entry.replicas_may_differ:
        return entry
    further = [
        Piece(piece.box, replace(piece.extent, file=path), piece.rank)
        for piece in (*entry.pieces, *entry.replicas)
        for path in alike.get(piece.extent.file, ())
    ]
    return replace(entry, replicas=(*entry.replicas, *further)) if further else entry


def _with_extents(entry: ObjectEntry, alike: dict[str, list[str]]) -> ObjectEntry:
    extent = entry.extent
    copies = [replace(extent, file=path) for path in alike.get(extent.file, ())] if extent is not None else []
    return replace(entry, copies=tuple(copies)) if copies else entry


def _own_checksums(
    source: Source, checkpoint: Checkpoint, alike: dict[str, list[str]]
) -> tuple[list[StoredChecksum], list[Finding]]:
    """The checksums that copies of torch files store themselves, so that each copy is judged by its own.

    A copy whose records lie elsewhere than those of the file is taken out of `alike`, with a finding.
    """
    entries = {f.path: f for f in checkpoint.files}
    stored: dict[str, list[StoredChecksum]] = defaultdict(list)
    for checksum in checkpoint.checksums:
        if checksum.file in alike:
            stored[checksum.file].append(checksum)
    found: list[StoredChecksum] = []
    findings: list[Finding] = []
    for path, expected in stored.items():
        for copy in list(alike[path]):
            file = read_torch_file(Region(source, copy, 0, entries[path].length_bytes))
            if sorted(map(_place, file.checksums)) == sorted(map(_place, expected)):
                found += file.checksums
                continue
            alike[path].remove(copy)
            what = next((f"{f.code}: {f.found}" for f in file.findings if f.is_error), "records in other places")
            where = f"{entries[path].place} and {copy}"
            findings.append(Finding("replica-mismatch", where, f"{len(expected)} records in the same places", what))
    return found, findings


def _place(checksum: StoredChecksum) -> tuple[str, int, int, str]:
    return checksum.label, checksum.offset, checksum.length, repr(checksum.encoding)


def compare_rest(source: Source, checkpoint: Checkpoint) -> list[Finding]:
    """A finding per copy of a file whose bytes outside of tensors are not those of the file: the first that differs.

    Tensors are left out, because they are compared as replicas; so of a large file little is read.
    """
    entries = {f.path: f for f in checkpoint.files}
    pairs = [(entries[c.copy_of], c) for c in checkpoint.files if c.copy_of]
    pairs = [(file, copy) for file, copy in pairs if file.length_bytes == copy.length_bytes]
    gaps = _gaps(checkpoint, pairs) if pairs else {}
    findings: list[Finding] = []
    for file, copy in pairs:
        try:
            at = _first_difference(source, file.path, copy.path, gaps[file.path])
        except StorageError as e:
            findings.append(Finding(e.finding_code, e.where or copy.path, e.expected or "readable bytes", e.found or e.message))
            continue
        if at is not None:
            where = f"{file.place} and {copy.place} at byte {at}"
            expected, found = (f"byte {read(source, f.path, at, 1).hex()}" for f in (file, copy))
            findings.append(Finding("replica-mismatch", where, expected, found, severity=_severity(file)))
    return findings


def _gaps(checkpoint: Checkpoint, pairs: Iterable[tuple[FileEntry, FileEntry]]) -> dict[str, list[tuple[int, int]]]:
    """Per copied file the stretches [start, stop) that no tensor lies in which is compared as a replica."""
    lengths = {file.path: file.length_bytes for file, _ in pairs}
    copies: dict[str, list[str]] = defaultdict(list)
    for file, copy in pairs:
        copies[file.path].append(copy.path)
    taken: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for entry in checkpoint.tensors:
        replicated = {(r.box, r.extent.file) for r in entry.replicas}
        for piece in (*entry.pieces, *entry.replicas) if replicated else ():
            place = piece.extent.encoding or piece.extent
            if all((piece.box, path) in replicated for path in copies.get(piece.extent.file, ())):
                taken[piece.extent.file].append((place.offset, place.offset + place.length))
    gaps: dict[str, list[tuple[int, int]]] = {}
    for path, length in lengths.items():
        gaps[path], position = [], 0
        for start, stop in sorted(taken[path]):
            if start > position:
                gaps[path].append((position, start))
            position = max(position, stop)
        gaps[path].append((position, length))
    return gaps


def _first_difference(source: Source, one: str, other: str, stretches: Sequence[tuple[int, int]]) -> int | None:
    """The first byte of some stretches [start, stop), in order, at which two files differ. Raises StorageError."""
    for block in _blocks(stretches):
        offset, count = block[0][0], block[-1][1] - block[0][0]
        a, b = read(source, one, offset, count), read(source, other, offset, count)
        for start, stop in block if a != b else ():
            mine, theirs = a[start - offset : stop - offset], b[start - offset : stop - offset]
            if mine != theirs:
                return start + next(i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y)
    return None


def _blocks(stretches: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Stretches that are read together: close to each other, at most a block from first to last. Long ones are cut."""
    block: list[tuple[int, int]] = []
    for start, stop in stretches:
        for at in range(start, stop, _BLOCK_BYTES):
            part = (at, min(stop, at + _BLOCK_BYTES))
            if block and (part[0] - block[-1][1] > _NEAR_BYTES or part[1] - block[0][0] > _BLOCK_BYTES):
                yield block
                block = []
            block.append(part)
    if block:
        yield block


def with_roots(findings: Iterable[Finding], files: Iterable[FileEntry]) -> tuple[Finding, ...]:
    """The findings with each file that they name told by its root too, so that people know on which node to look. Pure."""
    full = {f.path: f.place for f in files if f.root}
    if not full:
        return tuple(findings)
    return tuple(replace(f, where=re.sub(r"[^\s`]+", lambda m: full.get(m[0], m[0]), f.where)) for f in findings)
