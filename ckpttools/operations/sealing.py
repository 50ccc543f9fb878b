"""Digests of a snapshot: the hash list, and the seal made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.containers.copies import compare_rest, with_roots
from ckpttools.digest import TensorDigest, fingerprint
from ckpttools.errors import FindingsError
from ckpttools.layouts import SEAL_NAME, Snapshot, open_snapshot
from ckpttools.operations.scan import Progress, Scan, scan
from ckpttools.operations.validate import digest_file
from ckpttools.seals import Seal, SealedFile, SealedPiece, render_seal
from ckpttools.storage.document import write_document


@dataclass(frozen=True)
class HashList:
    """One line per tensor, and the fingerprint of all."""

    algorithm: str
    tensors: tuple[TensorDigest, ...]
    fingerprint: str
    snapshot: Snapshot


def hash_tensors(
    location: str,
    *,
    roots: Sequence[str] = (),
    algorithm: str = "blake3",
    jobs: int = 1,
    memory_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> HashList:
    """The digest of every tensor of the snapshot at a location (and further roots), in its order.

    Raises: FindingsError: when a tensor cannot be read whole; there is no list of a part.
    """
    snapshot, scanned = _read_all(
        location, algorithm, roots=roots, pieces=False, jobs=jobs, memory_bytes=memory_bytes, progress=progress
    )
    digests = tuple(scanned.digests.values())
    return HashList(algorithm, digests, fingerprint(digests, algorithm), snapshot)


def make_seal(
    location: str,
    *,
    algorithm: str = "blake3",
    jobs: int = 1,
    memory_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> tuple[Snapshot, Seal]:
    """The seal of the snapshot at a location; stored checksums and replicas are held against the bytes on the way.

    Raises: FindingsError: when anything is wrong: a seal says that this is how it is meant to be.
    """
    snapshot, scanned = _read_all(location, algorithm, pieces=True, jobs=jobs, memory_bytes=memory_bytes, progress=progress)
    return snapshot, seal_of(snapshot, scanned, algorithm)


def seal(
    location: str,
    *,
    output: str | None = None,
    is_overwriting: bool = False,
    algorithm: str = "blake3",
    jobs: int = 1,
    memory_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> tuple[str, Seal]:
    """Make the seal of the snapshot at a location and write it: (where, the seal).

    Raises: FindingsError: when anything is wrong with the snapshot. DestinationError: when a seal is there already.
    """
    snapshot, made = make_seal(location, algorithm=algorithm, jobs=jobs, memory_bytes=memory_bytes, progress=progress)
    return write_seal(snapshot, made, output=output, is_overwriting=is_overwriting), made


def seal_of(snapshot: Snapshot, scanned: Scan, algorithm: str) -> Seal:
    """The seal of a snapshot whose tensors were scanned with digests per piece."""
    checkpoint = snapshot.checkpoint
    pieces = {
        t.name: tuple(
            SealedPiece(p.extent.file, p.extent.offset, p.extent.length, p.box, scanned.piece_digests[t.name, p.box])
            for p in t.pieces
            if (t.name, p.box) in scanned.piece_digests
        )
        for t in checkpoint.tensors
    }
    with_tensors = {p.extent.file for t in checkpoint.tensors for p in t.pieces}
    files = tuple(
        SealedFile(
            f.path,
            f.length_bytes,
            "" if f.path in with_tensors else digest_file(snapshot.source, f.path, f.length_bytes, algorithm),
        )
        for f in checkpoint.files
        if f.path != SEAL_NAME and snapshot.listing.files[f.path].is_regular
    )
    tensors = tuple(scanned.digests.values())
    return Seal(algorithm, tensors, pieces, files, checkpoint.layout, checkpoint.step, checkpoint.aliases)


def _read_all(
    location: str,
    algorithm: str,
    *,
    roots: Sequence[str] = (),
    pieces: bool,
    jobs: int,
    memory_bytes: int,
    progress: Progress | None,
) -> tuple[Snapshot, Scan]:
    snapshot = open_snapshot(location, roots=roots, is_located=True)
    errors = [f for f in snapshot.checkpoint.findings if f.is_error]
    if errors:
        raise FindingsError(f"not whole, so not hashed: {location}", errors, hints=[f"ckpttools validate {location}"])
    scanned = scan(
        snapshot.source,
        snapshot.checkpoint,
        algorithm=algorithm,
        pieces=pieces,
        checksums=True,
        replicas=pieces or bool(roots),
        jobs=jobs,
        memory_bytes=memory_bytes,
        progress=progress,
    )
    rest = compare_rest(snapshot.source, snapshot.checkpoint)
    errors = [f for f in with_roots((*scanned.findings, *rest), snapshot.checkpoint.files) if f.is_error]
    if errors:
        raise FindingsError(f"not whole, so not hashed: {location}", errors, hints=[f"ckpttools validate {location}"])
    return snapshot, scanned


def write_seal(snapshot: Snapshot, seal: Seal, *, output: str | None = None, is_overwriting: bool = False) -> str:
    """Write a seal into its snapshot (beside it, for a single file) or to `output`, whole or not at all; says where.

    Raises: DestinationError: when a file is there and may not be replaced. StorageError: when it cannot be written.
    """
    location = output or seal_location(snapshot)
    write_document(location, render_seal(seal), is_overwriting=is_overwriting)
    return location


def seal_location(snapshot: Snapshot) -> str:
    """Where the seal of a snapshot lies."""
    path = snapshot.checkpoint.path.rstrip("/")
    return f"{path}.{SEAL_NAME}" if snapshot.is_single_file else f"{path}/{SEAL_NAME}"
