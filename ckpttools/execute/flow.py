"""Flow: one worker's way of a tensor from its source pieces, through digest and cast, into its slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ckpttools.cast import CastCounts, Caster
from ckpttools.digest import Hasher, new_hasher
from ckpttools.dtypes import DType
from ckpttools.execute.crew import StoppedError
from ckpttools.execute.records import TensorRecord
from ckpttools.execute.scatter import Scatter
from ckpttools.execute.sink import Sink
from ckpttools.gather import Gather, Watch
from ckpttools.model import Box
from ckpttools.plan import PlannedTensor
from ckpttools.rounding import RoundedDigest
from ckpttools.storage.buffer import Buffer
from ckpttools.storage.source import Source

_BUFFER_BYTES = 1 << 20
_CAST_BYTES = 1 << 20
"""What is cast at once: float8 to float64 makes eight times as much of it."""


class Flow:
    """Moves bytes for one thread, and keeps the buffers for it."""

    def __init__(
        self,
        source: Source,
        *,
        memory_bytes: int,
        algorithm: str,
        stop: threading.Event,
        progress: Callable[[int], None],
        watch: Watch | None = None,
        roundings: Mapping[str, DType] | None = None,
    ) -> None:
        self._source = source
        self._gather = Gather(source, memory_bytes=memory_bytes)
        self._algorithm = algorithm
        self._watch = watch
        self._roundings = roundings or {}
        self._stop = stop
        self._casters: dict[tuple[DType, DType], Caster] = {}
        self._buffer = Buffer()
        self._scratch = Buffer()
        self.progress = progress
        """To be told how many bytes were written (or read back)."""

    def new_hasher(self) -> Hasher:
        """An empty hasher of the run's algorithm."""
        return new_hasher(self._algorithm)

    def buffer(self, length_bytes: int) -> memoryview:
        """At most so many bytes of memory for what the worker does at the moment."""
        return self._buffer.view(min(length_bytes, _BUFFER_BYTES))

    def require_going(self) -> None:
        """Raise StoppedError when the run is to end."""
        if self._stop.is_set():
            raise StoppedError

    def copy(self, tensor: PlannedTensor, sinks: Sequence[tuple[Box, Sink]], box: Box | None = None) -> TensorRecord:
        """Read the values of `box` (the whole tensor unless given) once and give each sink those of its box.

        Each sink digests what it gets. With one sink that is all there is to digest; with none, or several, or with a
        cast, the values are digested here too, as they were read and as they are written; and as they round, where asked for.
        """
        source = tensor.source.spec
        is_whole = len(sinks) == 1
        of_source = self.new_hasher() if tensor.is_cast or not is_whole else None
        of_values = self.new_hasher() if tensor.is_cast and not is_whole else None
        put = sinks[0][1].put if is_whole else Scatter(source.shape, tensor.dtype, sinks, self._scratch).put
        caster = self._caster(source.dtype, tensor.dtype) if tensor.is_cast else None
        counts = CastCounts()
        target = self._roundings.get(tensor.name)
        rounded = RoundedDigest(source.dtype, target, self._algorithm) if target else None
        for tile in self._gather.stream(tensor.source, box, watch=self._watch):
            self.require_going()
            if of_source is not None:
                of_source.update(tile)
            if rounded is not None:
                rounded.update(tile)
            for start in range(0, len(tile), _CAST_BYTES if caster else max(1, len(tile))):
                values = tile
                if caster:
                    values, lost = caster.cast(tile[start : start + _CAST_BYTES])
                    counts += lost
                if of_values is not None:
                    of_values.update(values)
                if sinks:
                    put(values)
                    self.progress(len(values))
        digest = sinks[0][1].record.digest if is_whole else (of_values or of_source or self.new_hasher()).hexdigest()
        read = of_source.hexdigest() if of_source else digest
        return TensorRecord(read, digest, counts if caster else None, rounded.hexdigest() if rounded else "")

    def _caster(self, source: DType, target: DType) -> Caster:
        if (source, target) not in self._casters:
            self._casters[source, target] = Caster(source, target)
        return self._casters[source, target]

    def carry(self, file: str, offset: int, length: int, sink: Sink) -> None:
        """Give a sink a stretch of a source file as it is."""
        done = 0
        while done < length:
            self.require_going()
            view = self.buffer(length - done)
            self._source.read_into(file, offset + done, view)
            sink.put(view)
            self.progress(len(view))
            done += len(view)
