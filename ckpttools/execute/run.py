"""`run`: from a plan to an output that is complete, or not there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from ckpttools.dtypes import DType
from ckpttools.errors import ConversionError
from ckpttools.execute.crew import Crew
from ckpttools.execute.flow import Flow
from ckpttools.execute.journal import Journal, resume
from ckpttools.execute.local import LocalWriter
from ckpttools.execute.readback import read_back
from ckpttools.execute.records import Executed, Records, summarise
from ckpttools.execute.remote import RemoteWriter
from ckpttools.execute.space import require_space
from ckpttools.gather import Watch
from ckpttools.plan import Plan, PlannedTensor
from ckpttools.storage.local_target import LocalTarget
from ckpttools.storage.source import Source
from ckpttools.storage.standing import StandingTarget
from ckpttools.storage.upload import UrlTarget

Finish = Callable[[Executed], Mapping[str, Iterable[bytes]]]
"""Path -> content of small files to add to the output once all digests are known: the seal."""


def run(
    plan: Plan,
    source: Source,
    target: LocalTarget | UrlTarget | StandingTarget,
    *,
    jobs: int = 2,
    memory_bytes: int = 256 << 20,
    progress: Callable[[int], None] | None = None,
    algorithm: str = "blake3",
    overwrite: bool = False,
    verify: bool = False,
    finish: Finish | None = None,
    watch: Watch | None = None,
    roundings: Mapping[str, DType] | None = None,
) -> Executed:
    """Carry out a plan. The output is the same for any number of jobs, and for any number of interruptions.

    On any exception, an interruption included, nothing becomes visible at the destination; what was written stays for
    the next run of the same plan. Files that make the output readable are written when all others are on disk; on an
    object store the files of `finish` come after them, since there the output is whole with the commit record, and a
    seal without it would speak for a snapshot that is not there.

    Args:
        jobs: threads; each has `memory_bytes / jobs`.
        progress: told the bytes written (those of an earlier run first), in all `plan.bytes_written`, and as much again
            read back with `verify`; called by one thread at a time.
        finish: asked before anything becomes visible (on a local disk); what it raises stops that.
        watch: shown every stretch of source bytes as it is read.
        roundings: output name -> dtype for which the digest of the rounded source values is wanted too.
        verify: read the output back and compare digests before it becomes visible; takes about one read of it. What is
            still in the page cache is read from there: this finds bytes that went wrong on the way, not a failing disk.

    Raises:
        DestinationError: the destination exists (and not `overwrite`), cannot be written, or overlaps the source.
        LockedError: another run is writing to it.
        StorageError: no space, a read or write failed, a source file shrank, or `verify` found a difference.
        FindingsError: the pieces of a source tensor do not hold all of it.
    """
    _require_fitting(plan, target)
    stop, report, jobs = threading.Event(), _one_at_a_time(progress), max(1, jobs)
    with contextlib.ExitStack() as ending:
        ending.callback(target.close)
        target.begin(overwrite=overwrite, sources=plan.roots or (plan.source,))
        records = _resume(plan, target, algorithm)
        resumed = records.copy()
        report(sum(plan.files[i].copied[j].length for i, j in resumed.segments))
        share_bytes = memory_bytes // jobs // 2  # the other half is for casts, scattered slots and uploads
        flow = partial(Flow, source, algorithm=algorithm, stop=stop, progress=report, watch=watch, roundings=roundings)
        flows = [flow(memory_bytes=share_bytes) for _ in range(jobs)]
        crew = Crew(flows, stop)
        writer = _writer(plan, target, crew, records)
        ending.callback(writer.close)
        for files, tensors in _phases(plan):
            writer.write(files, tensors)
            if verify:
                read_back(plan, files, target, crew, records.segments)
        executed = summarise(plan, records, resumed, algorithm=algorithm, is_verified=verify)
        _add_files(plan, target, finish(executed) if finish else {})
        target.commit()
    return executed


def _require_fitting(plan: Plan, target: LocalTarget | UrlTarget | StandingTarget) -> None:
    if target.is_file and len(plan.files) != 1:
        raise ConversionError(
            f"{len(plan.files)} files do not fit into one: {target.location}",
            hints=["name a directory, or allow one larger file"],
        )


def _resume(plan: Plan, target: LocalTarget | UrlTarget | StandingTarget, algorithm: str) -> Records:
    """What an earlier run has done, with room for the rest."""
    records = resume(plan, target, algorithm)
    if isinstance(target, LocalTarget):
        target.keep_only([file.path for file in plan.files])
        require_space(plan, target.space())
    return records


def _writer(
    plan: Plan, target: LocalTarget | UrlTarget | StandingTarget, crew: Crew[Flow], records: Records
) -> LocalWriter | RemoteWriter:
    if isinstance(target, LocalTarget):
        return LocalWriter(plan, target, crew, Journal(plan, target, records, target.sync))
    return RemoteWriter(plan, target, crew, Journal(plan, target, records))


def _one_at_a_time(progress: Callable[[int], None] | None) -> Callable[[int], None]:
    lock = threading.Lock()

    def report(length_bytes: int) -> None:
        if progress is not None and length_bytes:
            with lock:
                progress(length_bytes)

    return report


def _phases(plan: Plan) -> Iterator[tuple[Sequence[int], Sequence[PlannedTensor]]]:
    """(files, tensors) to be written together: first what does not touch a commit record, then the rest."""
    committing = {i for i, file in enumerate(plan.files) if file.is_commit_record}
    late = {t.name for t in plan.tensors.values() if any(placed.file in committing for placed in t.slots)}
    yield (
        [i for i in range(len(plan.files)) if i not in committing],
        [t for t in plan.tensors.values() if t.name not in late],
    )
    yield sorted(committing), [t for t in plan.tensors.values() if t.name in late]


def _add_files(plan: Plan, target: LocalTarget | UrlTarget | StandingTarget, files: Mapping[str, Iterable[bytes]]) -> None:
    taken = {file.path for file in plan.files}
    for path, data in files.items():
        if path in taken:
            raise ConversionError(f"two output files have the same name: {path}")
        target.put(path, data)
