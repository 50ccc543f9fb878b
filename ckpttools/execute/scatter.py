"""Cuts the row-major stream of a tensor's values into the boxes of its slots.

A tensor is read once, in order, which gives its digest on the way; each tile holds some of the elements of each slot. Any
flat range is a few boxes that fix the leading dimensions, take a run of one and all of those after it, so what a slot has
of such a box is a run of the slot too: every slot is written from its first byte to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpttools.dtypes import DType
from ckpttools.execute.sink import Sink
from ckpttools.geometry import BoxIndex, flat_range_to_boxes, is_row_major, row_major_strides
from ckpttools.model import Box
from ckpttools.storage.buffer import Buffer


class Scatter:
    """Takes the values of a tensor in order and gives each slot its own, in order."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, sinks: Sequence[tuple[Box, Sink]], scratch: Buffer) -> None:
        self._shape = shape
        self._item_bytes = dtype.item_bytes
        self._index = BoxIndex([box for box, _ in sinks])
        self._sinks = [sink for _, sink in sinks]
        self._scratch = scratch
        self._position = 0

    def put(self, values: memoryview) -> None:
        """Take the next values, whole elements."""
        stop = self._position + len(values) // self._item_bytes
        done = 0
        for box in flat_range_to_boxes(self._shape, self._position, stop):
            part = values[done : done + box.volume * self._item_bytes]
            for i, shared in self._index.overlapping(box):
                self._sinks[i].put(self._cut(part, box, shared))
            done += len(part)
        self._position = stop

    def _cut(self, part: memoryview, box: Box, shared: Box) -> memoryview:
        """The values of `shared` out of those of `box`, row-major."""
        local = tuple(s - b for s, b in zip(shared.offsets, box.offsets, strict=True))
        strides = row_major_strides(box.sizes)
        length = shared.volume * self._item_bytes
        if is_row_major(shared.sizes, strides):
            start = sum(i * s for i, s in zip(local, strides, strict=True)) * self._item_bytes
            return part[start : start + length]
        import numpy as np

        scratch = self._scratch.view(length)
        cell = np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}[self._item_bytes])
        window: Any = tuple(slice(i, i + n) for i, n in zip(local, shared.sizes, strict=True))
        out = np.frombuffer(scratch, cell).reshape(shared.sizes)
        out[...] = np.frombuffer(part, cell).reshape(box.sizes)[window]
        return scratch
