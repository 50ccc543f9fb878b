"""Are the tensors of two sides the same? A side is a snapshot's digests, a seal or a hash list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpttools.containers.copies import with_roots
from ckpttools.digest import TensorDigest
from ckpttools.errors import FindingsError, NotRecognisedError
from ckpttools.findings import NOTE, WARNING, Finding
from ckpttools.layouts import SEAL_NAME, open_snapshot
from ckpttools.operations.scan import scan
from ckpttools.seals import Seal, SealError, parse_seal
from ckpttools.storage.source import open_source, read

_MAX_LIST_BYTES = 1 << 30


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    label: str
    algorithm: str
    tensors: tuple[TensorDigest, ...]
    aliases: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one tensor, though only one of them may be stored."""
    unread: frozenset[str] = frozenset()
    """Names that are there and could not be read; what is wrong with them was said."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with this side itself."""

    @classmethod
    def of_seal(cls, seal: Seal, label: str) -> Side:
        """What a seal or a hash list states."""
        return cls(label, seal.algorithm, seal.tensors, seal.aliases)


def open_side(location: str, *, roots: Sequence[str] = (), algorithm: str, jobs: int, memory_bytes: int) -> Side:
    """What is at a location: a seal or hash list as it is, a snapshot's tensors with digests by `algorithm`.

    A snapshot that is damaged is compared all the same, and what is wrong with it is told as a warning.

    Raises: FindingsError: for a seal that was changed. NotFoundError, StorageError, NotRecognisedError: when it is neither.
    """
    listed = read_list(location) if not roots else None
    if listed is not None:
        return Side.of_seal(listed, location)
    snapshot = open_snapshot(location, roots=roots, is_located=True)
    scanned = scan(
        snapshot.source,
        snapshot.checkpoint,
        algorithm=algorithm,
        checksums=True,
        replicas=True,
        jobs=jobs,
        memory_bytes=memory_bytes,
    )
    errors = [f for f in (*snapshot.checkpoint.findings, *scanned.findings) if f.is_error]
    located = with_roots(errors, snapshot.checkpoint.files)
    told = tuple(replace(f, where=f"{f.where} of {location}", severity=WARNING) for f in located)
    digests = tuple(scanned.digests.values())
    unread = frozenset(t.name for t in snapshot.checkpoint.tensors if t.name not in scanned.digests)
    return Side(location, algorithm, digests, snapshot.checkpoint.aliases, unread, told)


def read_list(location: str) -> Seal | None:
    """The seal or hash list in a file; None for a directory or a file that is a container of tensors."""
    source, file = open_source(location)
    if not file:
        return None
    length = source.listing().length_bytes(file)
    if length > _MAX_LIST_BYTES:
        return None
    head = read(source, file, 0, min(length, 64))
    is_text = all(32 <= byte or byte in b"\t\r\n" for byte in head)
    if not is_text or not length:
        return None
    try:
        return parse_seal(read(source, file, 0, length))
    except SealError as e:
        if e.is_broken:
            raise FindingsError(f"the seal was changed: {location}", [Finding("seal-broken", location, found=str(e))]) from e
        if file.endswith((".json", ".txt", SEAL_NAME)) and ".index" not in file:
            raise NotRecognisedError(f"neither a seal nor a hash list: {location}", found=str(e)) from e
        return None


def compare(mine: Side, other: Side, *, allow_missing: bool = False) -> list[Finding]:
    """What differs between two sides, by name. Pure.

    A name that only one side has is no difference where that side says which other name is the same tensor and the
    other side has that one.
    """
    here, there = _by_name(mine.tensors), _by_name(other.tensors)
    groups = (*mine.aliases, *other.aliases)
    findings: list[Finding] = []
    for name, expected in there.items():
        found = here.get(name) or _under_alias(name, here, groups)
        if found is not None:
            findings += _differences(name, expected, found)
        elif name not in mine.unread:
            findings.append(Finding("missing-tensor", name, f"{_what(expected)}, as in {other.label}", f"not in {mine.label}"))
    for name, found in here.items():
        if name not in there and name not in other.unread and _under_alias(name, there, groups) is None:
            findings.append(Finding("extra-tensor", name, f"nothing, as in {other.label}", f"{_what(found)} in {mine.label}"))
    if allow_missing:
        one_sided = ("missing-tensor", "extra-tensor")
        findings = [replace(f, severity=NOTE, remedy="allowed") if f.code in one_sided else f for f in findings]
        if not set(here) & set(there) and here and there:
            findings.append(Finding("missing-tensor", other.label, "at least one tensor that both sides name", "none"))
    return findings


def _by_name(tensors: Iterable[TensorDigest]) -> dict[str, TensorDigest]:
    return {t.name: t for t in tensors}


def _under_alias(name: str, side: dict[str, TensorDigest], groups: Sequence[Sequence[str]]) -> TensorDigest | None:
    """The tensor of a side that is declared to be the same one under another name."""
    return next((side[other] for group in groups if name in group for other in group if other in side), None)


def _what(tensor: TensorDigest) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _differences(name: str, expected: TensorDigest, found: TensorDigest) -> list[Finding]:
    if expected.dtype != found.dtype:
        return [Finding("dtype-mismatch", name, expected.dtype, found.dtype)]
    if expected.shape != found.shape:
        return [Finding("shape-mismatch", name, str(list(expected.shape)), str(list(found.shape)))]
    if expected.digest != found.digest:
        return [Finding("digest-mismatch", name, expected.digest, found.digest)]
    return []
