"""Writes output files in order, from the first byte to the last, as object stores take them; files are shared out.

A tensor whose slots lie apart is read a second time for its digest: its bytes pass in the order of the slots, not of the
tensor, and a store that is written over the network leaves time for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckpttools.execute.checksums import checksum_value
from ckpttools.execute.crew import Crew
from ckpttools.execute.flow import Flow
from ckpttools.execute.journal import Journal
from ckpttools.execute.records import Records
from ckpttools.execute.sink import Sink, Write
from ckpttools.model import ChecksumSlot, Literal, Slot
from ckpttools.plan import Plan, PlannedTensor
from ckpttools.storage.standing import StandingTarget
from ckpttools.storage.upload import UrlTarget


class RemoteWriter:
    """Writes the files of a plan to a target that takes each file in order."""

    def __init__(self, plan: Plan, target: UrlTarget | StandingTarget, crew: Crew[Flow], journal: Journal) -> None:
        self._plan = plan
        self._target = target
        self._crew = crew
        self._journal = journal

    def close(self) -> None:
        """Let go of the journal, whatever happened."""
        self._journal.close()

    def write(self, files: Sequence[int], tensors: Sequence[PlannedTensor]) -> None:
        """Write these files, and digest these tensors; returns when the store has them."""
        done = self._journal.records
        with self._journal.flushed():
            self._crew.run([partial(self._upload, i) for i in files if i not in done.files])
            self._crew.run([partial(self._digest, t) for t in tensors if t.name not in done.tensors])

    def _upload(self, i: int, flow: Flow) -> None:
        file = self._plan.files[i]
        records = Records(files={i})
        with self._target.append(file.path, file.length_bytes) as append:

            def write(_offset: int, data: memoryview) -> None:
                append(data)

            for j, segment in file.walk():
                flow.require_going()
                if isinstance(segment, Literal):
                    append(memoryview(segment.data))
                    flow.progress(len(segment.data))
                elif isinstance(segment, ChecksumSlot):
                    append(memoryview(checksum_value(file, i, segment, records.segments).to_bytes(4, "little")))
                    flow.progress(4)
                else:
                    self._copy(i, j, write, records, flow)
        self._journal.add(records, file.length_bytes)

    def _copy(self, i: int, j: int, write: Write, records: Records, flow: Flow) -> None:
        file = self._plan.files[i]
        segment = file.copied[j]
        sink = Sink(write, segment.offset, flow.new_hasher(), with_crc=bool(file.is_summed[j]))
        if isinstance(segment, Slot):
            tensor = self._plan.tensors[segment.tensor]
            record = flow.copy(tensor, [(segment.box, sink)], segment.box)
            if len(tensor.slots) == 1:
                records.tensors[tensor.name] = record
        else:
            flow.carry(segment.source_file, segment.source_offset, segment.length, sink)
        records.segments[i, j] = sink.record

    def _digest(self, tensor: PlannedTensor, flow: Flow) -> None:
        self._journal.add(Records(tensors={tensor.name: flow.copy(tensor, [])}), 0)
