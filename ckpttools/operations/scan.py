"""One pass over a checkpoint's bytes: every tensor's digest, every stored checksum, every replica, each byte read once.

Work is cut into groups of tensors that share stored records, so that one thread reads a record from its first byte to its
last and its CRC-32 falls out of the reads that the digests need. A record that was not read that way is read by itself.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import local

from ckpttools.checksums import ChecksumIndex, ChecksumWatch, ChosenChecksums
from ckpttools.digest import Hasher, TensorDigest, new_hasher
from ckpttools.dtypes import DType
from ckpttools.errors import FindingsError, StorageError
from ckpttools.findings import WARNING, Finding
from ckpttools.gather import Gather
from ckpttools.model import Box, Checkpoint, Extent, Piece, StoredChecksum, TensorEntry
from ckpttools.operations.values import ValueReport, count_unusual
from ckpttools.rounding import RoundedDigest, check_roundings, is_rounding
from ckpttools.storage.source import Source

_STALE = "none needed; the copy that training reads was taken"

Progress = Callable[[int], None]
"""Is told how many further bytes were done."""

_BATCH_BYTES, _BATCH_GROUPS = 4 << 20, 256


@dataclass(slots=True)
class Scan:
    """What one pass brought to light."""

    digests: dict[str, TensorDigest] = field(default_factory=dict)
    """By tensor name."""
    piece_digests: dict[tuple[str, Box], str] = field(default_factory=dict)
    """By tensor name and box, where pieces were asked for."""
    rounded_digests: dict[str, str] = field(default_factory=dict)
    """By name of a master, of its values as they round."""
    findings: list[Finding] = field(default_factory=list)
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Want:
    algorithm: str
    has_pieces: bool
    has_checksums: bool
    has_replicas: bool
    looks_at_values: bool
    rounded: Mapping[str, DType]
    """Name of a master -> the dtype of a weight for which its rounding is digested."""


def scan(
    source: Source,
    checkpoint: Checkpoint,
    *,
    tensors: Sequence[TensorEntry] | None = None,
    algorithm: str = "blake3",
    pieces: bool = False,
    checksums: bool = False,
    replicas: bool = False,
    roundings: bool = False,
    values: bool = False,
    jobs: int = 1,
    memory_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> Scan:
    """Read the tensors (all of them unless given) once and return their digests and what is wrong.

    Args:
        pieces: also a digest per stored piece, as a seal has it.
        checksums: hold every stored CRC-32 against the bytes.
        replicas: hold every replica against the pieces.
        roundings: hold every weight against the master that it was rounded from, where both are read.
        values: look for NaN, infinity and bools other than 0 and 1.
        memory_bytes: bound on all buffers together.

    Raises: StorageError: never for one bad file (that is a finding), only for a missing codec.
    """
    chosen = checkpoint.tensors if tensors is None else tensors
    pairs = _pairs(checkpoint, chosen) if roundings else []
    rounded = {m.name: w.spec.dtype for w, m in pairs if is_rounding(m.spec.dtype, w.spec.dtype)}
    want = _Want(algorithm, pieces, checksums, replicas, values, rounded)
    stored = checkpoint.checksums if checksums else ()
    groups = _groups(chosen, stored)
    threads = local()

    def run(batch: Sequence[_Group]) -> Scan:
        if not hasattr(threads, "gather"):
            threads.gather = Gather(source, memory_bytes=memory_bytes // max(jobs, 1))
        worker = _Worker(source, threads.gather, want, stored, progress)
        for group in batch:
            worker.run(group)
        return worker.result

    result = Scan()
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        for part in pool.map(run, _batches(groups, stored)):
            result.digests.update(part.digests)
            result.piece_digests.update(part.piece_digests)
            result.rounded_digests.update(part.rounded_digests)
            result.findings += part.findings
            result.bytes_read += part.bytes_read
    result.digests = {t.name: result.digests[t.name] for t in chosen if t.name in result.digests}
    digests = {name: d.digest for name, d in result.digests.items()}
    result.findings += check_roundings(Gather(source, memory_bytes=memory_bytes), pairs, digests, result.rounded_digests)
    return result


def _pairs(checkpoint: Checkpoint, chosen: Sequence[TensorEntry]) -> list[tuple[TensorEntry, TensorEntry]]:
    """(weight, the master that it was rounded from), where both are read."""
    by_name = {t.name: t for t in chosen}
    return [(t, by_name[t.rounded_from]) for t in chosen if t.rounded_from and t.rounded_from in by_name]


@dataclass(slots=True)
class _Group:
    """Tensors and checksums that one thread handles together, because they share stored bytes."""

    tensors: list[TensorEntry] = field(default_factory=list)
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    """By their numbers."""

    def place(self, stored: Sequence[StoredChecksum]) -> tuple[str, int]:
        """Where it begins."""
        first: Extent | StoredChecksum | None = next((t.pieces[0].extent for t in self.tensors[:1] if t.pieces), None)
        if first is None and self.checksums:
            first = stored[self.checksums[0]]
        return (first.file, _position(first)) if first is not None else ("", 0)


def _position(place: Extent | StoredChecksum) -> int:
    return place.encoding.offset if place.encoding else place.offset


def _groups(tensors: Sequence[TensorEntry], checksums: Sequence[StoredChecksum]) -> list[_Group]:
    """Connected components of tensors and checksummed records, in file order; names of one stored tensor go together."""
    index = ChecksumIndex(checksums)
    union = _Union(len(tensors) + len(checksums))
    first: dict[tuple[str, int, int], int] = {}  # names of one stored tensor begin at one place, which is quicker to look up
    for i, entry in enumerate(tensors):
        if entry.pieces:
            begin = entry.pieces[0].extent
            union.join(first.setdefault((begin.file, _position(begin), begin.offset), i), i)
        for piece in entry.pieces:
            holding = index.holding(piece.extent)
            if holding is not None:
                union.join(i, len(tensors) + holding)
    groups: dict[int, _Group] = defaultdict(_Group)
    for i, entry in enumerate(tensors):
        groups[union.root(i)].tensors.append(entry)
    loose: dict[str, _Group] = defaultdict(_Group)
    for number, checksum in enumerate(checksums):
        root = union.root(len(tensors) + number)
        group = groups[root] if root in groups else loose[checksum.file]
        group.checksums.append(number)
    for group in groups.values():
        group.tensors.sort(key=lambda t: [(p.extent.file, p.extent.offset) for p in t.pieces[:1]])
    return sorted((*groups.values(), *loose.values()), key=lambda g: g.place(checksums))


def _batches(groups: Sequence[_Group], stored: Sequence[StoredChecksum]) -> Iterator[list[_Group]]:
    """Groups in their order, small ones together: handing a piece of work to a thread costs more than hashing a bias."""
    batch: list[_Group] = []
    length_bytes = 0
    for group in groups:
        batch.append(group)
        length_bytes += sum(t.spec.length_bytes for t in group.tensors) + sum(stored[n].length for n in group.checksums)
        if length_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_GROUPS:
            yield batch
            batch, length_bytes = [], 0
    if batch:
        yield batch


class _Union:
    """Disjoint sets of numbers."""

    def __init__(self, count: int) -> None:
        self._parent = array("Q", range(count))

    def root(self, i: int) -> int:
        while self._parent[i] != i:
            self._parent[i] = self._parent[self._parent[i]]
            i = self._parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        self._parent[self.root(j)] = self.root(i)


class _Worker:
    """Handles some groups with one thread's buffers."""

    def __init__(
        self,
        source: Source,
        gather: Gather,
        want: _Want,
        stored: Sequence[StoredChecksum],
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._stored = stored
        self._gather = gather
        self._want = want
        self._progress = progress
        self._checksums = ChecksumWatch(())
        self.result = Scan()

    def run(self, group: _Group) -> None:
        """Handle a group; what it brought to light is in `result`."""
        self._checksums = ChecksumWatch(ChosenChecksums(self._stored, group.checksums))
        known: dict[object, str] = {}
        for entry in group.tensors:
            identity = (entry.spec.dtype, entry.spec.shape, entry.pieces)
            digest = known.get(identity) if not self._want.has_pieces else None
            if digest is None:
                digest = self._digest(entry)
            if digest is not None:
                known[identity] = digest
                self.result.digests[entry.name] = TensorDigest.of(entry.spec, digest)
            if self._want.has_replicas:
                self._compare_copies(entry, entry.replicas, may_differ=entry.replicas_may_differ)
                self._compare_copies(entry, entry.stale_copies, may_differ=True, remedy=_STALE)
        self.result.findings += self._checksums.finish(self._gather, self._done)

    def _digest(self, entry: TensorEntry) -> str | None:
        """The digest of a whole tensor, with its pieces' where wanted; None with a finding when it cannot be read."""
        hasher = new_hasher(self._want.algorithm)
        report = ValueReport() if self._want.looks_at_values else None
        target = self._want.rounded.get(entry.name)
        rounded = RoundedDigest(entry.spec.dtype, target, self._want.algorithm) if target else None
        try:
            for tile in self._gather.stream(entry, watch=self._checksums.watch if self._checksums else None):
                hasher.update(tile)
                if rounded is not None:
                    rounded.update(tile)
                if report is not None:
                    count_unusual(tile, entry.spec.dtype, report)
                self._done(len(tile))
            if self._want.has_pieces:
                self._digest_pieces(entry, hasher)
        except FindingsError as e:
            self.result.findings += e.findings
            return None
        except StorageError as e:
            found = e.found or e.message
            self.result.findings.append(
                Finding(e.finding_code, f"{entry.name} in {e.where}", e.expected or "readable bytes", found)
            )
            return None
        if report is not None:
            self.result.findings += report.findings(entry.name)
        if rounded is not None:
            self.result.rounded_digests[entry.name] = rounded.hexdigest()
        return hasher.hexdigest()

    def _digest_pieces(self, entry: TensorEntry, whole: Hasher) -> None:
        """A digest per piece; a tensor in one piece has it already, others are read box by box."""
        if len(entry.pieces) == 1:
            self.result.piece_digests[entry.name, entry.pieces[0].box] = whole.hexdigest()
            return
        for piece in entry.pieces:
            self.result.piece_digests[entry.name, piece.box] = self._digest_box(entry, piece.box)

    def _digest_box(self, entry: TensorEntry, box: Box) -> str:
        hasher = new_hasher(self._want.algorithm)
        for tile in self._gather.stream(entry, box):
            hasher.update(tile)
        return hasher.hexdigest()

    def _compare_copies(self, entry: TensorEntry, copies: Sequence[Piece], *, may_differ: bool, remedy: str = "") -> None:
        """Every copy against the same box of the pieces."""
        entry = entry.counted
        expected: dict[Box, str] = {}
        for replica in copies:
            try:
                if replica.box not in expected:
                    expected[replica.box] = self._digest_box(entry, replica.box)
                found = self._digest_box(_alone(entry, replica), replica.box)
            except FindingsError as e:
                self.result.findings += e.findings
                continue
            except StorageError as e:
                where = f"a copy of {entry.name} in {e.where}"
                self.result.findings.append(Finding(e.finding_code, where, e.expected or "readable bytes", e.found or e.message))
                continue
            if found != expected[replica.box]:
                first = next((p for p in entry.pieces if p.box == replica.box), entry.pieces[0])
                where = f"{entry.name} at {list(replica.box.offsets)} in {_copy_name(first)} and {_copy_name(replica)}"
                self.result.findings.append(
                    Finding("replica-mismatch", where, expected[replica.box], found, remedy, WARNING if may_differ else "")
                )

    def _done(self, length_bytes: int) -> None:
        self.result.bytes_read += length_bytes
        if self._progress is not None:
            self._progress(length_bytes)


def _alone(entry: TensorEntry, piece: Piece) -> TensorEntry:
    """The tensor as if a replica were the only piece of it."""
    return TensorEntry(entry.spec, entry.path, (piece,), family=entry.family)


def _copy_name(piece: Piece) -> str:
    return piece.extent.file if piece.rank is None else f"{piece.extent.file} (rank {piece.rank})"
