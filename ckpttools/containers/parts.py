"""The extent of a part of a stored tensor: another view of its bytes, or a box of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpttools.dtypes import DType
from ckpttools.geometry import is_row_major, row_major_strides, span_elements
from ckpttools.model import Box, Extent


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as one file holds it."""

    dtype: DType
    shape: tuple[int, ...]
    extent: Extent

    @property
    def is_dense(self) -> bool:
        """Whether it is stored row-major without gaps, so that it can be seen in another shape."""
        return self.extent.strides is None

    def view(self, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0) -> StoredTensor:
        """A dense tensor's bytes from element `offset` on, seen as another shape (row-major unless `strides` say else).

        Raises: ValueError: when the view leaves the tensor, or the tensor is not dense.
        """
        item_bytes = self.dtype.item_bytes
        shape = tuple(shape)
        strides = row_major_strides(shape) if strides is None else tuple(strides)
        span = span_elements(shape, strides)
        if not self.is_dense or min((offset, *strides)) < 0 or (offset + span) * item_bytes > self.extent.length:
            raise ValueError(f"no view {list(shape)} from element {offset} of a tensor {list(self.shape)}")
        extent = replace(
            self.extent,
            offset=self.extent.offset + offset * item_bytes,
            length=span * item_bytes,
            strides=None if is_row_major(shape, strides) else strides,
        )
        return StoredTensor(self.dtype, shape, extent)

    def part(self, box: Box) -> Extent:
        """Where the values of a box of it lie; the box must be inside the shape."""
        strides = row_major_strides(self.shape) if self.extent.strides is None else self.extent.strides
        first = sum(o * s for o, s in zip(box.offsets, strides, strict=True)) if box.volume else 0
        return replace(
            self.extent,
            offset=self.extent.offset + first * self.dtype.item_bytes,
            length=span_elements(box.sizes, strides) * self.dtype.item_bytes,
            strides=None if is_row_major(box.sizes, strides) else strides,
        )
