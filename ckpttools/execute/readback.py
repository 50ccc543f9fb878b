"""Reads the output back before it becomes visible, and compares it with what was meant to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ckpttools.errors import StorageError
from ckpttools.execute.checksums import known_runs
from ckpttools.execute.crew import Crew
from ckpttools.execute.flow import Flow
from ckpttools.execute.records import Place, SegmentRecord
from ckpttools.plan import Plan
from ckpttools.storage.target import Target

_TASK_BYTES = 64 << 20


def read_back(
    plan: Plan, files: Sequence[int], target: Target, crew: Crew[Flow], segments: Mapping[Place, SegmentRecord]
) -> None:
    """Read every byte of these files and compare it with the digest taken, or the bytes known, when it was written.

    Raises: StorageError: they differ. What was written is then not taken for done by the next run.
    """
    try:
        crew.run(partial(_check_copied, plan, target, segments, group) for i in files for group in _groups(plan, i))
        crew.run(partial(_check_known, plan, target, segments, i) for i in files)
    except _DiffersError:
        target.reset_journal()
        raise


class _DiffersError(StorageError):
    """What was read back is not what was written."""


def _groups(plan: Plan, i: int) -> Iterator[list[Place]]:
    """The copied segments of a file, in runs that are worth a task."""
    group: list[Place] = []
    group_bytes = 0
    for j, segment in enumerate(plan.files[i].copied):
        group.append((i, j))
        group_bytes += segment.length
        if group_bytes >= _TASK_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _check_copied(
    plan: Plan, target: Target, segments: Mapping[Place, SegmentRecord], places: Sequence[Place], flow: Flow
) -> None:
    for i, j in places:
        file, segment = plan.files[i], plan.files[i].copied[j]
        length, done = segment.length, 0
        hasher = flow.new_hasher()
        while done < length:
            flow.require_going()
            view = flow.buffer(length - done)
            target.read_into(file.path, segment.offset + done, view)
            hasher.update(view)
            flow.progress(len(view))
            done += len(view)
        expected, found = segments[i, j].digest, hasher.hexdigest()
        if found != expected:
            raise _differs(file.path, segment.offset, f"digest {expected}", f"digest {found}")


def _check_known(plan: Plan, target: Target, segments: Mapping[Place, SegmentRecord], i: int, flow: Flow) -> None:
    file = plan.files[i]
    for offset, data in known_runs(file, i, segments):
        for start in range(0, len(data), 1 << 20):
            flow.require_going()
            expected = memoryview(data)[start : start + (1 << 20)]
            view = flow.buffer(len(expected))
            target.read_into(file.path, offset + start, view)
            flow.progress(len(view))
            if view != expected:
                raise _differs(file.path, offset + start, f"the {len(view)} bytes written", "other bytes")


def _differs(path: str, offset: int, expected: str, found: str) -> StorageError:
    return _DiffersError(
        "what was read back is not what was written",
        where=f"{path} at byte {offset}",
        expected=expected,
        found=found,
        hints=[
            "the storage or the memory of this machine is faulty; the output was not finished, and the next run starts afresh"
        ],
    )
