"""How do two checkpoints differ? Tensor by tensor and object by object, whatever their layouts are. Read only.

Entries are matched by name, and both sides are streamed tile by tile through `Elementwise`. Stored checksums and replicas of
what is read are held against the bytes, so that damage is told and not taken for a difference. Read `diff` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from threading import local

from ckpttools.checksums import ChecksumIndex, ChecksumWatch, ChosenChecksums
from ckpttools.containers.copies import with_roots
from ckpttools.errors import ConversionError, FindingsError, NotRecognisedError, StorageError, UsageError
from ckpttools.findings import ERROR, WARNING, Finding
from ckpttools.gather import Gather
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.model import Checkpoint, ObjectEntry, TensorEntry, TensorSpec
from ckpttools.operations.compare import read_list
from ckpttools.operations.elementwise import Difference, Elementwise
from ckpttools.operations.match import ObjectPair, TensorPair, match_objects, match_tensors
from ckpttools.operations.measure import Tolerance
from ckpttools.operations.scan import Progress, scan
from ckpttools.operations.select import Choice
from ckpttools.pickles.differences import Place, differences
from ckpttools.pickles.limits import PickleError

SAME, CLOSE, CHANGED, DTYPE, SHAPE = "same", "close", "changed", "dtype", "shape"
ONLY_IN_A, ONLY_IN_B, UNREAD = "only_in_a", "only_in_b", "unread"
STATUSES = (SAME, CLOSE, CHANGED, DTYPE, SHAPE, ONLY_IN_A, ONLY_IN_B, UNREAD)
"""What can be said of an entry. `close`: changed, and equal by the tolerance. `unread`: a side could not be read, or lacks it
and has errors from which that may follow."""

_DIFFERENT = frozenset({CHANGED, DTYPE, SHAPE})
_ONE_SIDED = frozenset({ONLY_IN_A, ONLY_IN_B})
_MAX_PLACES = 20
_BATCH_BYTES, _BATCH_TENSORS = 16 << 20, 256


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """What was found about the tensors that one name means."""

    name: str
    """As compared: that of B, and that of A after renaming."""
    status: str
    a: TensorSpec | None
    """Under the name that it has in A; None when A has none."""
    b: TensorSpec | None
    difference: Difference | None = None
    """None where no elements were compared."""


@dataclass(frozen=True, slots=True)
class ObjectDiff:
    """What was found about the objects that one name means."""

    name: str
    status: str
    a: ObjectEntry | None
    b: ObjectEntry | None
    places: tuple[Place, ...] = ()
    """Where they differ, at most the first 20 places."""


@dataclass(frozen=True)
class Diff:
    """How two checkpoints differ."""

    a: Checkpoint
    b: Checkpoint
    tensors: tuple[TensorDiff, ...]
    objects: tuple[ObjectDiff, ...]
    findings: tuple[Finding, ...]
    """What is wrong with either side, errors first."""
    tolerance: Tolerance | None
    allow_missing: bool
    bytes_read: int
    """Of values, on both sides together."""

    @property
    def verdict(self) -> str:
        """`damaged` (a side is) before `different` before `incomplete` before `close` before `same`."""
        errors = [f for f in self.findings if f.is_error]
        statuses = {t.status for t in self.tensors} | {o.status for o in self.objects}
        if any(not f.is_incompleteness for f in errors):
            return "damaged"
        if statuses & _DIFFERENT or (statuses & _ONE_SIDED and not self.allow_missing) or not statuses - _ONE_SIDED:
            return "different"
        if errors or UNREAD in statuses:
            return "incomplete"
        return CLOSE if CLOSE in statuses else SAME

    @property
    def tensor_counts(self) -> dict[str, int]:
        """Tensors by status."""
        return _counts(t.status for t in self.tensors)

    @property
    def object_counts(self) -> dict[str, int]:
        """Objects by status."""
        return _counts(o.status for o in self.objects)


def _counts(statuses: Iterable[str]) -> dict[str, int]:
    counter = Counter(statuses)
    return {status: counter[status] for status in STATUSES}


def diff(
    a: str,
    b: str,
    *,
    roots: tuple[Sequence[str], Sequence[str]] = ((), ()),
    choice: Choice | None = None,
    tolerance: Tolerance | None = None,
    allow_missing: bool = False,
    jobs: int = 1,
    memory_bytes: int = 256 << 20,
    progress: Progress | None = None,
    on_plan: Callable[[int], None] | None = None,
) -> Diff:
    """Compare the snapshots at two locations.

    Args:
        roots: of each side, further places that hold files of the same snapshot.
        choice: which entries, by their names as they are compared, and how names of A change; all as they are unless given.
        tolerance: elements within it count as equal; without one, every bit counts.
        allow_missing: an entry that only one side has is no difference.
        on_plan: is told how many bytes will be read.

    Raises:
        NotFoundError, NotRecognisedError, StorageError: when a side cannot be looked at at all.
        ConversionError: when nothing is chosen, or two entries of A get one name.
    """
    choice = choice or Choice()
    sides = _Side(a, _opened(a, roots[0], b)), _Side(b, _opened(b, roots[1], a))
    checkpoints = sides[0].checkpoint, sides[1].checkpoint
    pairs, object_pairs = match_tensors(*checkpoints, choice), match_objects(*checkpoints, choice)
    if not pairs and not object_pairs:
        raise ConversionError(
            "nothing to compare is selected", hints=["ckpttools inspect --tensors --objects lists what is there"]
        )
    comparison = _Comparison(sides, tolerance, jobs=jobs, memory_bytes=memory_bytes, progress=progress)
    found = comparison.run([p for p in pairs if p.a is not None and p.b is not None], on_plan)
    tensors = tuple(_tensor_diff(p, found.get(_identity(p)), sides) for p in pairs)
    objects = tuple(_object_diff(p, sides) for p in object_pairs)
    for number, side in enumerate(sides):
        side.check([t for p in pairs if (t := (p.a, p.b)[number]) is not None and _identity(p) in found], jobs, memory_bytes)
    order = {ERROR: 0, WARNING: 1}
    findings = sorted(dict.fromkeys(f for s in sides for f in s.told()), key=lambda f: order.get(f.severity, 2))
    return Diff(*checkpoints, tensors, objects, tuple(findings), tolerance, allow_missing, comparison.bytes_read)


def _opened(location: str, roots: Sequence[str], other: str) -> Snapshot:
    try:
        return open_snapshot(location, roots=roots, is_located=True)
    except NotRecognisedError as e:
        if read_list(location) is None:
            raise
        hint = f"ckpttools validate {other} --against {location}"
        raise UsageError(f"a seal or a hash list has digests and no values: {location}", hints=[hint]) from e


class _Side:
    """One of the two, and what turned out to be wrong with it."""

    def __init__(self, label: str, snapshot: Snapshot) -> None:
        self.label = label
        self.source = snapshot.source
        self.checkpoint = snapshot.checkpoint
        self.findings: list[Finding] = []
        self._watch = ChecksumWatch(())

    def watch_over(self, tensors: Sequence[TensorEntry]) -> None:
        """Hold the stored checksums of these tensors against what is read from now on."""
        stored = self.checkpoint.checksums
        index = ChecksumIndex(stored)
        needed = {n for t in tensors for p in t.pieces if (n := index.holding(p.extent)) is not None}
        self._watch = ChecksumWatch(ChosenChecksums(stored, sorted(needed)))

    def tiles(self, gather: Gather, entry: TensorEntry, tile_bytes: int) -> Iterator[memoryview]:
        """The values of a tensor. Raises _UnreadError, and a finding says why."""
        try:
            yield from gather.stream(entry, watch=self._watch.watch if self._watch else None, tile_bytes=tile_bytes)
        except FindingsError as e:
            self.findings += e.findings
            raise _UnreadError from e
        except StorageError as e:
            where = f"{entry.name} in {e.where}"
            self.findings.append(Finding(e.finding_code, where, e.expected or "readable bytes", e.found or e.message))
            raise _UnreadError from e

    def check(self, tensors: Sequence[TensorEntry], jobs: int, memory_bytes: int) -> None:
        """What is left to prove of the tensors that were read: checksums of what did not pass in order, and replicas."""
        self.findings += self._watch.finish(Gather(self.source, memory_bytes=memory_bytes))
        replicated = list({id(t): t for t in tensors if t.replicas or t.stale_copies}.values())
        if replicated:
            scanned = scan(self.source, self.checkpoint, tensors=replicated, replicas=True, jobs=jobs, memory_bytes=memory_bytes)
            self.findings += scanned.findings

    def told(self) -> Iterator[Finding]:
        """All that is wrong with this side, each with the side's name; what follows from what was told is not told again."""
        is_told = any(f.is_error for f in self.checkpoint.findings)
        follows = [f for f in self.findings if is_told and f.code in ("uncovered", "pieces-overlap")]
        told = [f for f in (*self.checkpoint.findings, *self.findings) if f not in follows]
        for f in with_roots(told, self.checkpoint.files):
            yield replace(f, where=f"{f.where} of {self.label}")


class _UnreadError(Exception):
    """A side could not be read; its findings say why."""


_Identity = tuple[object, ...]


def _identity(pair: TensorPair) -> _Identity:
    """Equal for pairs of the same stored values, as tied tensors are."""
    if pair.a is None or pair.b is None:
        return ()
    return (pair.a.spec.dtype, pair.b.spec.dtype, pair.a.spec.shape, pair.b.spec.shape, pair.a.pieces, pair.b.pieces)


class _Comparison:
    """Compares the values of pairs of tensors, several pairs at a time."""

    def __init__(
        self,
        sides: tuple[_Side, _Side],
        tolerance: Tolerance | None,
        *,
        jobs: int,
        memory_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._sides = sides
        self._tolerance = tolerance
        self._jobs = jobs
        self._share_bytes = memory_bytes // jobs // 2
        self._progress = progress
        self._threads = local()
        self.bytes_read = 0

    def run(self, pairs: Sequence[TensorPair], on_plan: Callable[[int], None] | None) -> dict[_Identity, Difference | None]:
        """How the values of pairs that have comparable ones differ; None where a side could not be read."""
        chosen = {_identity(p): (p.a, p.b) for p in pairs if p.a is not None and p.b is not None and _has_values(p.a, p.b)}
        for number, side in enumerate(self._sides):
            side.watch_over([entries[number] for entries in chosen.values()])
        if on_plan is not None:
            on_plan(sum(t.spec.length_bytes for entries in chosen.values() for t in entries))
        found: dict[_Identity, Difference | None] = {}
        with ThreadPoolExecutor(self._jobs) as pool:
            for part, bytes_read in pool.map(self._run_batch, _batches(chosen)):
                found |= part
                self.bytes_read += bytes_read
        return found

    def _run_batch(self, batch: _Batch) -> tuple[dict[_Identity, Difference | None], int]:
        if not hasattr(self._threads, "gathers"):
            self._threads.gathers = [Gather(s.source, memory_bytes=self._share_bytes) for s in self._sides]
        found: dict[_Identity, Difference | None] = {}
        bytes_read = 0
        for identity, (a, b) in batch:
            elementwise = Elementwise(a.spec.dtype, b.spec.dtype, self._tolerance)
            try:
                for tile_a, tile_b in self._tiles(self._threads.gathers, a, b):
                    elementwise.add(tile_a, tile_b)
                    count = len(tile_a) + len(tile_b)
                    bytes_read += count
                    if self._progress is not None:
                        self._progress(count)
                found[identity] = elementwise.result(a.spec.shape)
            except _UnreadError:
                found[identity] = None
        return found, bytes_read

    def _tiles(self, gathers: Sequence[Gather], a: TensorEntry, b: TensorEntry) -> Iterator[tuple[memoryview, memoryview]]:
        """The same boxes of both tensors; elements of less than a byte in whole groups of them."""
        wanted = max(gather.tile_bytes(entry) for gather, entry in zip(gathers, (a, b), strict=True))
        if a.spec.dtype.is_sub_byte:
            lengths = [wanted - wanted % 12] * 2
        else:
            widths = [t.spec.dtype.item_bytes for t in (a, b)]
            lengths = [wanted // max(widths) * width for width in widths]
        streams = [s.tiles(g, t, n) for s, g, t, n in zip(self._sides, gathers, (a, b), lengths, strict=True)]
        return zip(*streams, strict=True)


_Batch = list[tuple[_Identity, tuple[TensorEntry, TensorEntry]]]


def _batches(chosen: dict[_Identity, tuple[TensorEntry, TensorEntry]]) -> Iterator[_Batch]:
    """Pairs in the order of A's files, small ones together."""

    def place(item: tuple[_Identity, tuple[TensorEntry, TensorEntry]]) -> tuple[str, int, int]:
        extents = [p.extent for p in item[1][0].pieces[:1]]
        return next(((e.file, e.encoding.offset if e.encoding else 0, e.offset) for e in extents), ("", 0, 0))

    batch: _Batch = []
    length_bytes = 0
    for identity, entries in sorted(chosen.items(), key=place):
        batch.append((identity, entries))
        length_bytes += entries[0].spec.length_bytes
        if length_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_TENSORS:
            yield batch
            batch, length_bytes = [], 0
    if batch:
        yield batch


def _has_values(a: TensorEntry, b: TensorEntry) -> bool:
    return a.spec.shape == b.spec.shape and Elementwise(a.spec.dtype, b.spec.dtype).is_possible


def _is_unopened(entry: ObjectEntry) -> bool:
    """Whether an object's item did not open, which a finding says; what was in it is not known."""
    return entry.kind == "object" and entry.extent is not None and bool(entry.extent.container)


def _one_sided(is_in_a: bool, sides: Sequence[_Side]) -> str:
    """The status of a name that one side has; the other may have lost it, if something is wrong there."""
    lacking = sides[1 if is_in_a else 0].checkpoint
    if any(f.is_error for f in lacking.findings):
        return UNREAD
    return ONLY_IN_A if is_in_a else ONLY_IN_B


def _tensor_diff(pair: TensorPair, difference: Difference | None, sides: Sequence[_Side]) -> TensorDiff:
    a, b = pair.a, pair.b
    specs = a.spec if a else None, b.spec if b else None
    if a is None or b is None:
        return TensorDiff(pair.name, _one_sided(b is None, sides), *specs)
    if a.spec.shape != b.spec.shape:
        return TensorDiff(pair.name, SHAPE, *specs)
    if a.spec.dtype != b.spec.dtype:
        return TensorDiff(pair.name, DTYPE, *specs, difference)
    if difference is None:
        return TensorDiff(pair.name, UNREAD, *specs)
    status = SAME if difference.is_same else CLOSE if difference.is_close else CHANGED
    return TensorDiff(pair.name, status, *specs, difference)


def _object_diff(pair: ObjectPair, sides: Sequence[_Side]) -> ObjectDiff:
    a, b = pair.a, pair.b
    if a is None or b is None:
        return ObjectDiff(pair.name, _one_sided(b is None, sides), a, b)
    if _is_unopened(a) or _is_unopened(b):
        return ObjectDiff(pair.name, UNREAD, a, b)
    if a.record is None and b.record is None:
        return ObjectDiff(pair.name, SAME if a.kind == b.kind else CHANGED, a, b)
    try:
        places = tuple(islice(differences(a.record, b.record), _MAX_PLACES))
    except PickleError as e:
        sides[0].findings.append(Finding(e.code, pair.name, found=e.message))
        return ObjectDiff(pair.name, UNREAD, a, b)
    return ObjectDiff(pair.name, CHANGED if places else SAME, a, b, places)
