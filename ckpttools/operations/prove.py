"""Proves a source while it is converted: against the checksums its writer stored, its seal, its replicas, and its masters.

Without this a conversion would launder damage: the copy of a flipped bit has a right checksum of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.checksums import ChecksumIndex, ChecksumWatch, ChosenChecksums
from ckpttools.containers.copies import compare_rest, with_roots
from ckpttools.digest import TensorDigest
from ckpttools.dtypes import DType
from ckpttools.errors import FindingsError
from ckpttools.findings import Finding
from ckpttools.gather import Gather
from ckpttools.layouts import Snapshot
from ckpttools.model import VOID, Box, Encoding, ObjectEntry, TensorEntry
from ckpttools.operations.replicas import REPLICA_HINT
from ckpttools.operations.scan import scan
from ckpttools.operations.validate import read_seal
from ckpttools.rounding import check_roundings, is_rounding


class SourceProof:
    """What must hold of the tensors that a conversion reads; errors with an allowed code pass."""

    def __init__(
        self,
        snapshot: Snapshot,
        tensors: Sequence[TensorEntry],
        allowed: Sequence[str],
        *,
        objects: Sequence[ObjectEntry] = (),
        derived: Sequence[TensorEntry] = (),
        jobs: int,
        memory_bytes: int,
    ) -> None:
        self._snapshot = snapshot
        self._tensors = tensors
        entries = {t.name: t for t in tensors}
        of_master = [w for w in (*tensors, *derived) if w.rounded_from and w.rounded_from in entries]
        self._masters = {w.name: entries[w.rounded_from] for w in of_master}
        self._left = [w for w in derived if w.name in self._masters]
        self._allowed = allowed
        self._jobs = jobs
        self._memory_bytes = memory_bytes
        self._findings: list[Finding] = []
        self._seal = read_seal(snapshot, self._findings)
        stored = snapshot.checkpoint.checksums
        index = ChecksumIndex(stored)
        needed = {n for t in tensors for p in t.pieces if (n := index.holding(p.extent)) is not None}
        needed |= {n for o in objects if o.extent is not None for n in index.inside(o.extent)}
        self._needed = ChosenChecksums(stored, sorted(needed))
        self._checksums = ChecksumWatch(self._needed)

    def watch(self, file: str, encoding: Encoding | None, offset: int, view: memoryview) -> None:
        """See source bytes pass on their way to the output."""
        self._checksums.watch(file, encoding, offset, view)

    def roundings(self) -> dict[str, DType]:
        """Name of a master that is read -> the dtype of a weight for which its rounding is to be digested on the way."""
        weights = [w for w in (*self._tensors, *self._left) if w.name in self._masters]
        dtypes = {self._masters[w.name].name: w.spec.dtype for w in weights}
        return {t.name: dtypes[t.name] for t in self._masters.values() if is_rounding(t.spec.dtype, dtypes[t.name])}

    def read_first(self) -> None:
        """Prove the source by a pass of its own. Raises FindingsError."""
        self._require(self._scan((*self._tensors, *self._left), checksums=True, roundings=True), [])

    def require(self, digests: Mapping[str, str], rounded: Mapping[str, str]) -> None:
        """Raise FindingsError unless all that was read is what the source says it is.

        Args: digests: by name, of what was read. rounded: by name of a master, of its values as they round.
        """
        gather = Gather(self._snapshot.source, memory_bytes=self._memory_bytes)
        self._require(digests, self._checksums.finish(gather) + self._misrounded(digests, rounded))

    def _require(self, digests: Mapping[str, str], findings: list[Finding]) -> None:
        if self._seal is not None:
            findings += self._differences(digests)
        findings += compare_rest(self._snapshot.source, self._snapshot.checkpoint)
        replicated = [t for t in self._tensors if t.replicas]
        if replicated:
            self._scan(replicated, replicas=True)
        errors = [f for f in dict.fromkeys((*findings, *self._findings)) if f.is_error and f.code not in self._allowed]
        if errors:
            path = self._snapshot.checkpoint.path
            hints = [REPLICA_HINT] if any(f.code == "replica-mismatch" for f in errors) else [f"ckpttools validate {path}"]
            errors = list(with_roots(errors, self._snapshot.checkpoint.files))
            raise FindingsError(f"the source is damaged, so nothing was written: {path}", errors, hints=hints)

    def _misrounded(self, digests: Mapping[str, str], rounded: Mapping[str, str]) -> list[Finding]:
        """The weights that are not what their masters round to; those are read that are not written."""
        digests = {**digests, **{d.name: d.digest for d in self.digests_of(self._left)}}
        gather = Gather(self._snapshot.source, memory_bytes=self._memory_bytes)
        pairs = [(w, self._masters[w.name]) for w in (*self._tensors, *self._left) if w.name in self._masters]
        return check_roundings(gather, pairs, digests, rounded)

    def digests_of(self, tensors: Sequence[TensorEntry]) -> list[TensorDigest]:
        """Digests of further tensors of the source, read for it alone. Raises FindingsError where one cannot be read."""
        if not tensors:
            return []
        scanned = scan(self._snapshot.source, self._snapshot.checkpoint, tensors=tensors, memory_bytes=self._memory_bytes)
        errors = [f for f in scanned.findings if f.is_error]
        if errors:
            raise FindingsError(f"the source is damaged, so nothing was written: {self._snapshot.checkpoint.path}", errors)
        return list(scanned.digests.values())

    def _differences(self, digests: Mapping[str, str]) -> list[Finding]:
        """Where the values are not as sealed."""
        if self._seal is None:
            return []
        if self._seal.algorithm != "blake3":
            digests = self._scan(self._tensors, algorithm=self._seal.algorithm)
        stored = self._snapshot.checkpoint.by_name
        blanked = {t.name for t in self._tensors if t.name in stored and _voids(t) != _voids(stored[t.name])}
        shapes = {
            t.name: t.spec.shape for t in self._tensors
        }  # of a part of a tensor, or one with zeros in it, nothing was sealed
        whole = (t for t in self._seal.tensors if shapes.get(t.name, t.shape) == t.shape and t.name not in blanked)
        sealed = {t.name: t.digest for t in whole}
        return [
            Finding("digest-mismatch", name, f"{sealed[name]}, as sealed", digest)
            for name, digest in digests.items()
            if sealed.get(name, digest) != digest
        ]

    def _scan(
        self,
        tensors: Sequence[TensorEntry],
        *,
        algorithm: str = "blake3",
        checksums: bool = False,
        replicas: bool = False,
        roundings: bool = False,
    ) -> dict[str, str]:
        scanned = scan(
            self._snapshot.source,
            replace(self._snapshot.checkpoint, checksums=self._needed),
            tensors=tensors,
            algorithm=algorithm,
            checksums=checksums,
            replicas=replicas,
            roundings=roundings,
            jobs=self._jobs,
            memory_bytes=self._memory_bytes,
        )
        self._findings += scanned.findings
        return {name: t.digest for name, t in scanned.digests.items()}


def _voids(entry: TensorEntry) -> list[Box]:
    """Boxes of a tensor that nothing was stored of."""
    return [piece.box for piece in entry.pieces if VOID in piece.extent.transforms]
