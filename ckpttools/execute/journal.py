"""The journal: what of an output is on disk, so that the next run goes on where this one stopped.

The first line names the plan (its fingerprint), the tool and the digest algorithm; each further one holds the records of
work whose bytes were flushed to disk before the line was written. A line is a promise about the disk, not about memory:
after a power cut it is still true.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field

from ckpttools import __version__
from ckpttools.cast import CastCounts
from ckpttools.errors import StorageError
from ckpttools.execute.records import Records, SegmentRecord, SegmentTable, TensorRecord
from ckpttools.plan import Plan
from ckpttools.storage.target import Target

_FORMAT = 2
_MIN_BATCH_BYTES = 256 << 20
_BATCHES = 64
"""Flushing every file that was touched has a cost per file, so a run is cut into this many batches at most."""
_APPENDED_LINES = 256


def resume(plan: Plan, target: Target, algorithm: str) -> Records:
    """What an earlier run of the same plan has on disk. Work of any other plan is thrown away."""
    header = json.dumps({"ckpttools-journal": _FORMAT, "version": __version__, "plan": plan.fingerprint, "algorithm": algorithm})
    lines = target.journal_lines()
    records = Records(SegmentTable())
    if not lines or lines[0] != header:
        target.start_journal(header)
        return records
    for line in lines[1:]:
        try:
            records.add(_parse(line))
        except (ValueError, KeyError, TypeError):  # not as we wrote it: what it spoke of is done again
            continue
    return _without_files(plan, records, {i for i in records.touched if not _is_whole(plan, target, i)})


def _is_whole(plan: Plan, target: Target, i: int) -> bool:
    """Whether a file still has the length it was made with."""
    return i < len(plan.files) and target.length_bytes(plan.files[i].path) == plan.files[i].length_bytes


def _without_files(plan: Plan, records: Records, lost: set[int]) -> Records:
    """Records without those of files that are gone, and of tensors that have a slot in one of them."""
    if not lost:
        return records
    broken = {name for name, t in plan.tensors.items() if any(placed.file in lost for placed in t.slots)}
    places = {(placed.file, placed.number) for name in broken for placed in plan.tensors[name].slots}
    return Records(
        SegmentTable({place: r for place, r in records.segments.items() if place[0] not in lost and place not in places}),
        {name: r for name, r in records.tensors.items() if name not in broken},
        records.files - lost - {i for i, _ in places},
    )


class Journal:
    """Takes the records of finished work from all threads, and writes them when the bytes are on disk.

    Flushing goes on in a thread of its own beside the copying: the disk is busy from the first batch on, instead of
    having all to do at the end.
    """

    def __init__(self, plan: Plan, target: Target, records: Records, sync: Callable[[str], None] | None = None) -> None:
        self._plan = plan
        self._target = target
        self._sync = sync
        self._batch_bytes = max(_MIN_BATCH_BYTES, plan.bytes_written // _BATCHES) if sync else 0
        self._lock = threading.Lock()
        self._pending = _Batch()
        self._flusher = ThreadPoolExecutor(1, "ckpttools-flush")
        self._flushing: Future[None] | None = None
        self.records = records
        """All that is known so far, on disk or not yet."""

    def add(self, records: Records, length_bytes: int) -> None:
        """Take the records of finished work that wrote so many bytes. Raises StorageError when flushing failed."""
        with self._lock:
            self.records.add(records)
            self._pending.lines.append(_render(records))
            self._pending.touched |= records.touched
            self._pending.length_bytes += length_bytes
            if self._pending.length_bytes < self._batch_bytes or (self._flushing is not None and not self._flushing.done()):
                return
            failed = self._flushing
            self._flushing = self._flusher.submit(self._write, self._take())
        if failed is not None:
            failed.result()

    def flush(self) -> None:
        """Return when all records are written. Raises StorageError when the disk could not take them."""
        with self._lock:
            if self._flushing is not None:
                self._flushing.result()
                self._flushing = None
            self._write(self._take())

    @contextlib.contextmanager
    def flushed(self) -> Iterator[None]:
        """Write all that is added in this context at its end; also when it fails, as far as that can be done."""
        try:
            yield
        except BaseException:  # Ctrl-C too: what is done is recorded, and what went wrong first is told
            with contextlib.suppress(StorageError):
                self.flush()
            raise
        self.flush()

    def close(self) -> None:
        """Return when nothing is being written any more; what was not flushed is forgotten."""
        self._flusher.shutdown()

    def _take(self) -> _Batch:
        batch, self._pending = self._pending, _Batch()
        return batch

    def _write(self, batch: _Batch) -> None:
        if self._sync is not None:
            for i in sorted(batch.touched):
                self._sync(self._plan.files[i].path)
        for start in range(0, len(batch.lines), _APPENDED_LINES):
            self._target.append_journal("\n".join(batch.lines[start : start + _APPENDED_LINES]))


@dataclass(slots=True)
class _Batch:
    """Lines that are not written yet; as text, which takes a fraction of the records' memory."""

    lines: list[str] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    """Positions of the files whose bytes they speak of."""
    length_bytes: int = 0


def _render(records: Records) -> str:
    return json.dumps(
        {
            "segments": [[i, j, r.digest, r.crc] for (i, j), r in records.segments.items()],
            "tensors": [
                [name, r.source_digest, r.digest, astuple(r.counts) if r.counts else None, r.rounded_digest]
                for name, r in records.tensors.items()
            ],
            "files": sorted(records.files),
        },
        separators=(",", ":"),
    )


def _parse(line: str) -> Records:
    content = json.loads(line)
    return Records(
        {(i, j): SegmentRecord(digest, crc) for i, j, digest, crc in content["segments"]},
        {
            name: TensorRecord(source_digest, digest, CastCounts(*counts) if counts is not None else None, rounded)
            for name, source_digest, digest, counts, rounded in content["tensors"]
        },
        set(content["files"]),
    )
