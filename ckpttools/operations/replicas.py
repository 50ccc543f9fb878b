"""What a conversion does where copies of the same box differ: stop, take the first that is sound, or take their mean.

Copies are what ranks of a replicated mesh axis wrote, and what several roots of a snapshot hold. Unless a user says otherwise
they must be equal, which `operations.prove` sees to while the values pass. For the other rules the copies are read and
compared here, before the plan is made, and what was decided is recorded in the seal. Read `settle` first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock, local

from ckpttools.average import has_mean
from ckpttools.checksums import ChecksumIndex, ChecksumWatch
from ckpttools.containers.copies import compare_rest
from ckpttools.digest import new_hasher
from ckpttools.errors import ConversionError, FindingsError, StorageError
from ckpttools.gather import Gather
from ckpttools.layouts import Snapshot
from ckpttools.model import Box, Piece, TensorEntry

COMPARE, FIRST, MEAN = "compare", "first", "mean"
RULES = (COMPARE, FIRST, MEAN)
REPLICA_HINT = "--replicas first takes the first copy that its checksums do not contradict; --replicas mean the mean of all"


def allowed(rule: str, codes: Sequence[str]) -> tuple[str, ...]:
    """The codes of errors in the source to go on in spite of, that a rule settles among them. Pure."""
    return tuple(codes) if rule == COMPARE else (*codes, "replica-mismatch")


@dataclass(frozen=True)
class Settled:
    """Tensors without replicas, and how that came about."""

    tensors: dict[str, TensorEntry]
    """By output name, in their order."""
    record: Mapping[str, object]
    """For the seal: the rule, the boxes of which copies differed and what was taken, and files that differ elsewhere."""


def settle(snapshot: Snapshot, tensors: Mapping[str, TensorEntry], rule: str, *, jobs: int, memory_bytes: int) -> Settled:
    """Choose among the copies of every box that has several, by a rule; reads each copy once.

    A copy that cannot be read, or that a stored checksum contradicts, is not taken while there is another. With `compare`
    nothing is read and nothing changes.

    Raises: ConversionError: when a mean is asked for of values that have none.
    """
    if rule == COMPARE:
        return Settled(dict(tensors), {})
    names = {f.path: f.place for f in snapshot.checkpoint.files}
    judge = _Judge(snapshot, memory_bytes // max(jobs, 1))
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        rulings = list(pool.map(lambda entry: _settle_tensor(entry, rule, judge), tensors.values()))
    rows = [row.described(names) for ruling in rulings for row in ruling.rows]
    rest = compare_rest(snapshot.source, snapshot.checkpoint)
    lengths = [f for f in snapshot.checkpoint.findings if f.code == "replica-mismatch"]
    record = {"rule": rule, "boxes": rows, "files": [f.where for f in (*lengths, *rest) if f.is_error]}
    return Settled(dict(zip(tensors, (r.entry for r in rulings), strict=True)), record)


@dataclass(frozen=True, slots=True)
class _Row:
    """A box of which copies differ."""

    tensor: str
    box: Box
    copies: tuple[str, ...]
    """Files, in the order in which they are preferred."""
    taken: tuple[str, ...]
    """The file whose copy is written, or all those of which the mean is."""

    def described(self, names: Mapping[str, str]) -> dict[str, object]:
        """For the seal and for JSON, files told by their roots."""
        return {
            "tensor": self.tensor,
            "offsets": list(self.box.offsets),
            "sizes": list(self.box.sizes),
            "copies": [names.get(file, file) for file in self.copies],
            "taken": [names.get(file, file) for file in self.taken],
        }


@dataclass(frozen=True)
class _Ruling:
    entry: TensorEntry
    rows: list[_Row]


def _settle_tensor(entry: TensorEntry, rule: str, judge: _Judge) -> _Ruling:
    copies_of: dict[Box, list[Piece]] = defaultdict(list)
    for replica in entry.replicas:
        copies_of[replica.box].append(replica)
    pieces = {p.box: p for p in entry.pieces}
    rows: list[_Row] = []
    for box, replicas in copies_of.items():
        piece = pieces.get(box)
        if piece is None:
            _require_equal(entry, box, replicas, rule, judge, rows)
            continue
        copies = [piece, *replicas]
        digests = [judge.digest(entry, copy) for copy in copies]
        if len(set(digests)) == 1 and digests[0] is not None:
            continue
        sound = [c for c, digest in zip(copies, digests, strict=True) if digest is not None and judge.is_sound(c)]
        if not sound:
            continue  # the proof of the source says what is wrong with the one that is read then
        taken = sound[:1]
        if rule == MEAN and len({d for c, d in zip(copies, digests, strict=True) if c in sound}) > 1:
            _require_mean(entry, box)
            taken = sound
        pieces[box] = replace(taken[0], mean_with=tuple(c.extent for c in taken[1:]))
        rows.append(_Row(entry.name, box, tuple(c.extent.file for c in copies), tuple(c.extent.file for c in taken)))
    settled = tuple(pieces[p.box] for p in entry.pieces)
    return _Ruling(replace(entry, pieces=settled, replicas=()), rows)


def _require_equal(entry: TensorEntry, box: Box, replicas: Sequence[Piece], rule: str, judge: _Judge, rows: list[_Row]) -> None:
    """Copies that are cut otherwise than the pieces: the pieces come first, and have no mean with them."""
    whole = judge.digest_of(entry, box)
    differing = [r for r in replicas if judge.digest(entry, r) != whole]
    if not differing:
        return
    if rule == MEAN:
        raise ConversionError(f"no mean of copies that are cut in different ways: {entry.name}", hints=["--replicas first"])
    firsts = tuple(dict.fromkeys(p.extent.file for p in entry.pieces))
    rows.append(_Row(entry.name, box, (*firsts, *(r.extent.file for r in differing)), firsts))


def _require_mean(entry: TensorEntry, box: Box) -> None:
    if not has_mean(entry.spec.dtype):
        raise ConversionError(
            f"no mean of {entry.spec.dtype} values: {entry.name} at {list(box.offsets)}",
            hints=["--replicas first takes the first copy of each box"],
        )


class _Judge:
    """Digests of copies, and whether stored checksums contradict them."""

    def __init__(self, snapshot: Snapshot, memory_bytes: int) -> None:
        self._source = snapshot.source
        self._stored = snapshot.checkpoint.checksums
        self._index = ChecksumIndex(self._stored)
        self._memory_bytes = memory_bytes
        self._verdicts: dict[int, bool] = {}
        self._lock = Lock()
        self._threads = local()

    def _gather(self) -> Gather:
        if not hasattr(self._threads, "gather"):
            self._threads.gather = Gather(self._source, memory_bytes=self._memory_bytes)
        gather: Gather = self._threads.gather
        return gather

    def digest(self, entry: TensorEntry, copy: Piece) -> str | None:
        """The digest of one copy of a box; None when it cannot be read."""
        return self.digest_of(replace(entry, pieces=(copy,), replicas=()), copy.box)

    def digest_of(self, entry: TensorEntry, box: Box) -> str | None:
        """The digest of a box as the pieces of a tensor hold it; None when they cannot be read."""
        hasher = new_hasher()
        try:
            for tile in self._gather().stream(entry.counted, box):  # copies have boxes as pieces count
                hasher.update(tile)
        except (FindingsError, StorageError):
            return None
        return hasher.hexdigest()

    def is_sound(self, copy: Piece) -> bool:
        """Whether no stored checksum contradicts the bytes of a copy; each is looked at once."""
        number = self._index.holding(copy.extent)
        if number is None:
            return True
        with self._lock:
            known = self._verdicts.get(number)
        if known is None:
            known = not ChecksumWatch([self._stored[number]]).finish(self._gather())
            with self._lock:
                self._verdicts[number] = known
        return known
