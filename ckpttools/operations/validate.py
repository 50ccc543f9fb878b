"""Is a snapshot whole, and is it what its seal (or another list, or another snapshot) says? Read only.

`commit` and `structure` come from manifests and headers; `full` reads every byte once. What is wrong is a list of
findings, and the verdict follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpttools.containers.copies import compare_rest, with_roots
from ckpttools.digest import new_hasher
from ckpttools.errors import NotFoundError, StorageError
from ckpttools.findings import ERROR, WARNING, Finding
from ckpttools.layouts import SEAL_NAME, Snapshot, open_snapshot
from ckpttools.model import Checkpoint
from ckpttools.operations.compare import Side, compare, open_side
from ckpttools.operations.scan import Progress, Scan, scan
from ckpttools.seals import Seal, SealedFile, SealError, parse_seal
from ckpttools.storage.source import Source, open_source, read

DEPTHS = ("commit", "structure", "full")
_DIFFERENCES = frozenset({"digest-mismatch", "dtype-mismatch", "shape-mismatch", "missing-tensor", "extra-tensor"})
_MAX_SEAL_BYTES = 1 << 30
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Validation:
    """What was found and how much was looked at."""

    verdict: str
    """`ok`, `incomplete`, `damaged` or `different`."""
    depth: str
    checkpoint: Checkpoint
    findings: tuple[Finding, ...]
    """Errors first."""
    tensors_read: int
    bytes_read: int
    checksums: int
    """Stored checksums that were held against the bytes."""
    is_sealed: bool


def validate(
    location: str,
    *,
    roots: Sequence[str] = (),
    known: Sequence[Finding] = (),
    depth: str = "full",
    against: str | None = None,
    against_roots: Sequence[str] = (),
    allow_missing: bool = False,
    finite: bool = False,
    jobs: int = 1,
    memory_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> Validation:
    """Check the snapshot at a location as deep as asked, against its seal if it has one, and against another if given.

    Args:
        roots: further places that hold files of the same snapshot.
        known: what was found wrong on the way to it; part of the verdict.
        depth: `commit` (names and lengths), `structure` (every container opened), `full` (every byte read).
        against: a seal, a hash list, or another snapshot in any layout; compared at depth `full`.
        against_roots: further places that hold files of that other snapshot.
        allow_missing: a tensor that only one side has is a note, not an error.
        finite: also look for NaN and infinity.

    Raises: NotFoundError, NotRecognisedError, StorageError: when it cannot be looked at at all.
    """
    snapshot = open_snapshot(location, roots=roots, is_located=depth != "commit")
    findings = list(snapshot.checkpoint.findings)
    seal = read_seal(snapshot, findings)
    other: Side | None = None
    algorithm = seal.algorithm if seal else "blake3"
    if against is not None:
        other = open_side(against, roots=against_roots, algorithm=algorithm, jobs=jobs, memory_bytes=memory_bytes)

    read_all = partial(scan, snapshot.source, snapshot.checkpoint, jobs=jobs, memory_bytes=memory_bytes, progress=progress)
    scanned = Scan()
    if depth == "full":
        scanned = read_all(algorithm=algorithm, checksums=True, replicas=True, roundings=True, values=finite)
    is_told = any(f.is_error for f in findings)  # then what is uncovered was said, or follows from what was
    findings += [f for f in scanned.findings if not (is_told and f.code in ("uncovered", "pieces-overlap"))]
    findings += compare_rest(snapshot.source, snapshot.checkpoint) if depth == "full" else []
    if seal is not None:
        findings += _check_seal(snapshot, seal, scanned, depth, memory_bytes)
    if other is not None:  # sealed by one algorithm and compared by another takes a second pass
        again = scanned if other.algorithm == algorithm else read_all(algorithm=other.algorithm)
        findings += other.findings
        findings += compare(_side(snapshot, again, other.algorithm, seal), other, allow_missing=allow_missing)
    told = (*known, *with_roots(findings, snapshot.checkpoint.files))
    return _validation(snapshot.checkpoint, depth, told, scanned, is_sealed=seal is not None)


def _validation(checkpoint: Checkpoint, depth: str, findings: Sequence[Finding], scanned: Scan, *, is_sealed: bool) -> Validation:
    """The verdict on what was found; each finding once, errors first."""
    order = {ERROR: 0, WARNING: 1}
    unique = tuple(sorted(dict.fromkeys(findings), key=lambda f: order.get(f.severity, 2)))
    checksums = len(checkpoint.checksums) if depth == "full" else 0
    return Validation(verdict(unique), depth, checkpoint, unique, len(scanned.digests), scanned.bytes_read, checksums, is_sealed)


def verdict(findings: Sequence[Finding]) -> str:
    """`damaged` before `different` before `incomplete`; warnings and notes leave it `ok`. Pure."""
    errors = [f for f in findings if f.is_error]
    if any(not f.is_incompleteness and f.code not in _DIFFERENCES for f in errors):
        return "damaged"
    if any(f.code in _DIFFERENCES for f in errors):
        return "different"
    return "incomplete" if errors else "ok"


def read_seal(snapshot: Snapshot, findings: list[Finding]) -> Seal | None:
    """The seal of a snapshot; None when there is none, or with a finding when it is not one."""
    try:
        if snapshot.is_single_file:
            source, name = open_source(f"{snapshot.checkpoint.path}.{SEAL_NAME}")
            length = source.listing().length_bytes(name)
        elif SEAL_NAME in snapshot.listing and snapshot.listing.files[SEAL_NAME].is_regular:
            source, name, length = snapshot.source, SEAL_NAME, snapshot.listing.length_bytes(SEAL_NAME)
        else:
            return None
    except NotFoundError:
        return None
    if length > _MAX_SEAL_BYTES:
        findings.append(Finding("seal-broken", name, f"at most {_MAX_SEAL_BYTES} bytes", f"{length} bytes"))
        return None
    try:
        return parse_seal(read(source, name, 0, length))
    except SealError as e:
        findings.append(Finding("seal-broken", name, "a seal with its own digest", str(e)))
        return None


def _side(snapshot: Snapshot, scanned: Scan, algorithm: str, seal: Seal | None) -> Side:
    """The snapshot's side of a comparison; names that could not be read have findings of their own."""
    names = {t.name for t in snapshot.checkpoint.tensors}
    aliases = (*snapshot.checkpoint.aliases, *(seal.aliases if seal else ()))
    unread = frozenset(names - scanned.digests.keys())
    return Side(snapshot.checkpoint.path, algorithm, tuple(scanned.digests.values()), aliases, unread)


def _check_seal(snapshot: Snapshot, seal: Seal, scanned: Scan, depth: str, memory_bytes: int) -> list[Finding]:
    """The snapshot against its own seal: files and lengths at any depth, tensors and digests as deep as was read."""
    findings = _check_sealed_files(snapshot, seal, depth)
    if depth != "full":
        there = {t.name for t in snapshot.checkpoint.tensors}
        absent = [t for t in seal.tensors if t.name not in there]
        return findings + [Finding("missing-tensor", t.name, f"{t.dtype} {list(t.shape)}, as sealed", "none") for t in absent]
    sealed = Side.of_seal(seal, "its seal")
    for finding in compare(_side(snapshot, scanned, seal.algorithm, seal), sealed):
        findings += _pinned(snapshot, seal, finding, memory_bytes)
    return findings


def _check_sealed_files(snapshot: Snapshot, seal: Seal, depth: str) -> list[Finding]:
    findings: list[Finding] = []
    for file in seal.files:
        if file.path not in snapshot.listing:
            findings.append(Finding("missing-file", file.path, f"{file.length_bytes} bytes, as sealed", "no such file"))
            continue
        length = snapshot.listing.length_bytes(file.path)
        if length != file.length_bytes:
            code = "file-too-short" if length < file.length_bytes else "trailing-bytes"
            findings.append(Finding(code, file.path, f"{file.length_bytes} bytes, as sealed", f"{length} bytes"))
        elif file.digest and depth == "full":
            findings += _check_file_digest(snapshot.source, file, seal.algorithm)
    known = {f.path for f in seal.files} | {SEAL_NAME}
    return findings + [
        Finding("unlisted-file", f.path, "a file of the seal", "none") for f in snapshot.listing if f.path not in known
    ]


def _check_file_digest(source: Source, file: SealedFile, algorithm: str) -> list[Finding]:
    try:
        digest = digest_file(source, file.path, file.length_bytes, algorithm)
    except StorageError as e:
        return [Finding(e.finding_code, file.path, e.expected or "readable bytes", e.found or e.message)]
    return [] if digest == file.digest else [Finding("digest-mismatch", file.path, file.digest, digest)]


def digest_file(source: Source, path: str, length_bytes: int, algorithm: str) -> str:
    """The digest of a whole file, read in blocks. Raises StorageError."""
    hasher, buffer = new_hasher(algorithm), memoryview(bytearray(min(length_bytes, _BLOCK_BYTES)))
    for offset in range(0, length_bytes, _BLOCK_BYTES):
        block = buffer[: min(_BLOCK_BYTES, length_bytes - offset)]
        source.read_into(path, offset, block)
        hasher.update(block)
    return hasher.hexdigest()


def _pinned(snapshot: Snapshot, seal: Seal, finding: Finding, memory_bytes: int) -> list[Finding]:
    """A tensor that is not as sealed, told by the stored pieces (so by the files and ranks) that are not."""
    pieces = {p.box: p for p in seal.pieces.get(finding.where, ())}
    entry = snapshot.checkpoint.by_name.get(finding.where)
    if finding.code != "digest-mismatch" or entry is None or not pieces:
        return [finding]
    again = scan(
        snapshot.source, snapshot.checkpoint, tensors=[entry], algorithm=seal.algorithm, pieces=True, memory_bytes=memory_bytes
    )
    found = [
        replace(
            finding,
            where=f"{entry.name} at {list(p.box.offsets)} in {p.extent.file}",
            expected=pieces[p.box].digest,
            found=digest,
        )
        for p in entry.pieces
        if p.box in pieces and (digest := again.piece_digests.get((entry.name, p.box), "")) != pieces[p.box].digest
    ]
    return found or [finding]
