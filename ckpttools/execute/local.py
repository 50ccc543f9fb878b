"""Writes output files at any offset, tensor after tensor: each tensor is read once and goes to all of its slots.

So the digest of a tensor comes with the copy even when its slots lie in different files, and a source that is cut along
columns is still read in long runs. Tensors are shared out among the workers: large ones one by one, largest first; small
ones in groups, in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ckpttools.execute.checksums import known_runs
from ckpttools.execute.crew import Crew
from ckpttools.execute.flow import Flow
from ckpttools.execute.journal import Journal
from ckpttools.execute.records import Place, Records
from ckpttools.execute.sink import Sink
from ckpttools.model import Carry
from ckpttools.plan import Plan, PlannedTensor
from ckpttools.storage.local_target import LocalTarget

_LARGE_BYTES = 8 << 20
_GROUP_TENSORS = 256
Task = Callable[[Flow], None]


class LocalWriter:
    """Writes the files of a plan to a local target."""

    def __init__(self, plan: Plan, target: LocalTarget, crew: Crew[Flow], journal: Journal) -> None:
        self._plan = plan
        self._target = target
        self._crew = crew
        self._journal = journal

    def close(self) -> None:
        """Let go of the journal, whatever happened."""
        self._journal.close()

    def write(self, files: Sequence[int], tensors: Sequence[PlannedTensor]) -> None:
        """Write these files, and all slots of these tensors; returns when they are on disk."""
        for i in files:
            self._target.create(self._plan.files[i].path, self._plan.files[i].length_bytes)
        with self._journal.flushed():
            self._crew.run(self._tasks(files, tensors))
        self._crew.run(partial(self._complete, i) for i in files)

    def _tasks(self, files: Iterable[int], tensors: Iterable[PlannedTensor]) -> Iterator[Task]:
        done = self._journal.records
        waiting = [t for t in tensors if t.name not in done.tensors]
        large = [t for t in waiting if t.source.spec.length_bytes >= _LARGE_BYTES]
        for tensor in sorted(large, key=lambda t: -t.source.spec.length_bytes):
            yield partial(self._copy, [tensor])
        for i in files:
            for j, segment in enumerate(self._plan.files[i].copied):
                if isinstance(segment, Carry) and (i, j) not in done.segments:
                    yield partial(self._carry, (i, j), segment)
        small = (t for t in waiting if t.source.spec.length_bytes < _LARGE_BYTES)
        yield from (partial(self._copy, group) for group in _groups(small))

    def _copy(self, tensors: Sequence[PlannedTensor], flow: Flow) -> None:
        records = Records()
        for tensor in tensors:
            places = [(placed.file, placed.number) for placed in tensor.slots]
            sinks = [
                (placed.slot.box, self._sink(place, placed.slot.offset, flow))
                for place, placed in zip(places, tensor.slots, strict=True)
            ]
            records.tensors[tensor.name] = flow.copy(tensor, sinks)
            records.segments.update((place, sink.record) for place, (_, sink) in zip(places, sinks, strict=True))
        self._journal.add(records, sum(placed.slot.length for t in tensors for placed in t.slots))

    def _carry(self, place: Place, carry: Carry, flow: Flow) -> None:
        sink = self._sink(place, carry.offset, flow)
        flow.carry(carry.source_file, carry.source_offset, carry.length, sink)
        self._journal.add(Records({place: sink.record}), carry.length)

    def _sink(self, place: Place, offset: int, flow: Flow) -> Sink:
        file = self._plan.files[place[0]]
        return Sink(partial(self._target.write, file.path), offset, flow.new_hasher(), with_crc=bool(file.is_summed[place[1]]))

    def _complete(self, i: int, flow: Flow) -> None:
        """Write what does not come from the source, now that the checksums are known, and bring the file to disk."""
        file = self._plan.files[i]
        for offset, data in known_runs(file, i, self._journal.records.segments):
            flow.require_going()
            self._target.write(file.path, offset, data)
            flow.progress(len(data))
        self._target.sync(file.path)


def _groups(tensors: Iterable[PlannedTensor]) -> Iterator[list[PlannedTensor]]:
    """Runs of tensors that are worth a task."""
    group: list[PlannedTensor] = []
    group_bytes = 0
    for tensor in tensors:
        group.append(tensor)
        group_bytes += tensor.source.spec.length_bytes
        if group_bytes >= _LARGE_BYTES or len(group) >= _GROUP_TENSORS:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group
