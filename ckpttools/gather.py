"""Streams the logical values of a box of a tensor, row-major and little-endian, in bounded memory.

Every operation that needs values (hash, validate, consolidate, reshard, diff) reads them here. A tile of the box is
filled from the pieces that overlap it: rows of a piece are contiguous in its file, so a tile takes one read per piece and
a scatter in memory, and each source byte is read once. Read `Gather.stream` and `Gather._fill` first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttools.average import Averager
from ckpttools.dtypes import DType
from ckpttools.errors import ConversionError, FindingsError
from ckpttools.findings import Finding
from ckpttools.geometry import BoxIndex, factored, is_row_major, is_tiled, row_major_strides, span_elements, tiles
from ckpttools.model import VOID, Box, Encoding, Extent, Piece, TensorEntry
from ckpttools.storage.buffer import Buffer
from ckpttools.storage.decoding import DecodedStream
from ckpttools.storage.source import Source

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

Watch = Callable[[str, "Encoding | None", int, memoryview], None]
"""Is shown every stretch of stored bytes as it is read: file, encoding, offset, bytes."""

_TILE_BYTES = 4 << 20
"""Larger tiles leave the cache and take fresh pages; smaller ones cost more calls (measured: 1 to 8 MiB is best)."""
_STRIDED_TILE_BYTES = 32 << 20
"""A transposed view is read in runs as long as a tile has rows, so there a larger tile means longer runs."""
_SPARSE_READ_BYTES = 64 << 10
"""Below this a read that skips most of its bytes is cheaper than several reads."""
_MAX_DECODERS = 16


class Gather:
    """Reads boxes of tensors from one source. Keeps its buffers; for one thread at a time."""

    def __init__(self, source: Source, *, memory_bytes: int) -> None:
        self._source = source
        self._tile_bytes = max(64 << 10, min(_TILE_BYTES, memory_bytes // 4))
        self._strided_tile_bytes = max(self._tile_bytes, min(_STRIDED_TILE_BYTES, memory_bytes // 3))
        self._tile = Buffer()
        self._scratch = Buffer()
        self._decoders: OrderedDict[tuple[str, Encoding], DecodedStream] = OrderedDict()
        self._averagers: dict[DType, Averager] = {}
        self._watch: Watch | None = None

    def tile_bytes(self, entry: TensorEntry) -> int:
        """The bytes of a tile of a tensor, at most, unless `stream` is told otherwise."""
        is_dense = all(p.extent.strides is None for p in entry.pieces)
        return self._tile_bytes if is_dense else self._strided_tile_bytes

    def stream(
        self, entry: TensorEntry, box: Box | None = None, *, watch: Watch | None = None, tile_bytes: int | None = None
    ) -> Iterator[memoryview]:
        """The values of `box` (the whole tensor unless given), tile after tile; each view is valid until the next.

        Tiles of as many elements of two tensors of one shape are the same boxes.

        Raises:
            FindingsError: when no piece holds some of the elements; nothing is made up.
            StorageError: when a file cannot be read.
        """
        self._watch = watch
        if entry.spec.dtype.is_sub_byte:
            yield from self._whole_bytes(entry, box, tile_bytes or self._tile_bytes)
            return
        whole = entry.spec.length_bytes
        if box is None and _is_one_run(entry) and 0 < whole <= (tile_bytes or self._tile_bytes):
            view = self._tile.view(whole)
            self._read_into(entry.pieces[0].extent, 0, view)
            yield view
            return
        if box in (None, entry.spec.box):  # row-major in one shape is row-major in the other, and tiles are what pieces are
            entry, box = entry.counted, entry.counted.spec.box
        index = BoxIndex([p.box for p in entry.pieces])
        item_bytes = entry.spec.dtype.item_bytes
        most_bytes = tile_bytes or self.tile_bytes(entry)
        copies = max((len(p.mean_with) for p in entry.pieces), default=0)
        if copies:  # each copy of a tile is held as float64 until the mean is taken
            most_bytes //= 8 * (1 + copies)
        for tile in tiles(box, max(1, most_bytes // item_bytes)):
            parts = []
            for part, counted in factored(tile, entry.factors):
                hits = [(entry.pieces[i], shared) for i, shared in index.overlapping(counted)]
                held = sum(shared.volume for _, shared in hits)
                if held != part.volume or (len(hits) > 1 and not is_tiled(counted, [shared for _, shared in hits])):
                    raise _not_tiled(entry, part, held)
                parts.append(_Part(part, counted, hits))
            yield self._read_tile(entry.spec.dtype, tile, parts)

    def _read_tile(self, dtype: DType, tile: Box, parts: Sequence[_Part]) -> memoryview:
        """One tile, put together from the pieces that overlap its parts."""
        view = self._tile.view(tile.volume * dtype.item_bytes)
        first, hits = parts[0], parts[0].hits
        if first.counted is tile and len(hits) == 1 and _is_plain_run(hits[0][0], tile):
            self._read_into(hits[0][0].extent, _flat_start(hits[0][0], tile) * dtype.item_bytes, view)
            return view
        import numpy as np

        whole = np.frombuffer(view, _cell(dtype)).reshape(tile.sizes)
        for part in parts:
            within = whole[_window(part.box, tile)].reshape(part.counted.sizes)  # dimensions are split, so this is no copy
            for piece, shared in part.hits:
                cells = within[_window(shared, part.counted)]
                self._fill_logical(cells, dtype, piece.extent, piece, shared)
                if piece.mean_with:
                    cells[...] = self._mean(np.ascontiguousarray(cells), dtype, piece, shared)
        return view

    def _fill_logical(self, part: Array, dtype: DType, extent: Extent, piece: Piece, shared: Box) -> None:
        """Fill `part` with the elements of a piece that lie in `shared`, as one of its extents holds them."""
        strides = extent.strides or row_major_strides(piece.box.sizes)
        self._fill(part, extent, _start(piece, shared, strides), shared.sizes, strides)
        for transform in extent.transforms:
            _transform(part, dtype, transform)

    def _mean(self, first: Array, dtype: DType, piece: Piece, shared: Box) -> Array:
        """The mean of one copy of a box and the further ones of its piece."""
        import numpy as np

        copies = [first]
        for extent in piece.mean_with:
            copies.append(np.empty(shared.sizes, first.dtype))
            self._fill_logical(copies[-1], dtype, extent, piece, shared)
        averager = self._averagers.setdefault(dtype, Averager(dtype))
        mean = averager.mean([c.reshape(-1).view(np.uint8).data for c in copies])
        return np.frombuffer(mean, first.dtype).reshape(shared.sizes)

    def _fill(self, part: Array, extent: Extent, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Fill `part` from a strided box whose first element is `start` elements into the extent.

        One read where that is dense enough and fits the scratch buffer; else the box is halved along its widest
        stride, which ends at runs that are contiguous in the file.
        """
        import numpy as np

        item_bytes = part.dtype.itemsize
        span_bytes = span_elements(sizes, strides) * item_bytes
        if is_row_major(sizes, strides) and part.flags.c_contiguous and span_bytes == part.nbytes:
            self._read_into(extent, start * item_bytes, part.reshape(-1).view(np.uint8).data)
            return
        useful_bytes = prod(n for n, s in zip(sizes, strides, strict=True) if s) * item_bytes
        fits = span_bytes <= self._strided_tile_bytes // 2
        if fits and (useful_bytes * 8 >= span_bytes or span_bytes <= _SPARSE_READ_BYTES):
            scratch = self._scratch.view(span_bytes)
            self._read_into(extent, start * item_bytes, scratch)
            stored = np.frombuffer(scratch, part.dtype)
            part[...] = np.lib.stride_tricks.as_strided(stored, sizes, tuple(s * item_bytes for s in strides))
            return
        axis = max((d for d, n in enumerate(sizes) if n > 1), key=lambda d: strides[d])
        half = sizes[axis] // 2
        low = (*sizes[:axis], half, *sizes[axis + 1 :])
        high = (*sizes[:axis], sizes[axis] - half, *sizes[axis + 1 :])
        before: Any = (*[slice(None)] * axis, slice(0, half))
        after: Any = (*[slice(None)] * axis, slice(half, None))
        self._fill(part[before], extent, start, low, strides)
        self._fill(part[after], extent, start + half * strides[axis], high, strides)

    def _whole_bytes(self, entry: TensorEntry, box: Box | None, tile_bytes: int) -> Iterator[memoryview]:
        """The bytes of a tensor whose elements are not whole bytes; it can only be read as it was stored."""
        if not entry.pieces and entry.spec.volume:
            raise _not_tiled(entry, entry.spec.box, 0)
        piece = entry.pieces[0] if len(entry.pieces) == 1 else None
        if piece is None or piece.extent.strides or piece.extent.transforms or box not in (None, entry.spec.box):
            raise ConversionError(f"a {entry.spec.dtype} tensor cannot be cut: {entry.name}")
        for offset in range(0, piece.extent.length, tile_bytes):
            view = self._tile.view(min(tile_bytes, piece.extent.length - offset))
            self._read_into(piece.extent, offset, view)
            yield view

    def _read_into(self, extent: Extent, offset_bytes: int, view: memoryview) -> None:
        """Fill `view` from `offset_bytes` into an extent, decoding where it is compressed."""
        offset = extent.offset + offset_bytes
        if extent.encoding is None:
            self._source.read_into(extent.file, offset, view)
        else:
            self._decoder(extent.file, extent.encoding).read_into(offset, view)
        if self._watch is not None:
            self._watch(extent.file, extent.encoding, offset, view)

    def _decoder(self, file: str, encoding: Encoding) -> DecodedStream:
        key = (file, encoding)
        if key not in self._decoders:
            if len(self._decoders) >= _MAX_DECODERS:
                self._decoders.popitem(last=False)
            self._decoders[key] = DecodedStream(self._source, file, encoding)
        self._decoders.move_to_end(key)
        return self._decoders[key]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tile, and the pieces that hold it."""

    box: Box
    counted: Box
    """The same as pieces count."""
    hits: Sequence[tuple[Piece, Box]]
    """Each with the box that it shares with the part, as pieces count."""


def _window(box: Box, outer: Box) -> Any:
    """Where a box lies in the array of another one."""
    window = [slice(o - t, o - t + n) for o, t, n in zip(box.offsets, outer.offsets, box.sizes, strict=True)]
    return (*window, ...)  # the ellipsis keeps rank 0 an array


def _cell(dtype: DType) -> Any:
    """A numpy dtype as wide as an element, by which it is moved without being looked at."""
    import numpy as np

    return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}[dtype.item_bytes])


def _is_one_run(entry: TensorEntry) -> bool:
    """Whether a tensor is stored as it is meant, in one piece; most are, and of small ones there are very many."""
    if len(entry.pieces) != 1:
        return False
    piece = entry.pieces[0]
    return piece.box == entry.spec.box and _is_as_meant(piece)


def _is_as_meant(piece: Piece) -> bool:
    """Whether the stored bytes of a piece are its values, row-major: nothing is to be done to them but read them."""
    return piece.extent.strides is None and not piece.extent.transforms and not piece.mean_with


def _is_plain_run(piece: Piece, tile: Box) -> bool:
    """Whether a tile inside a piece is one run of its stored bytes, needing no transformation."""
    if not _is_as_meant(piece):
        return False
    return is_row_major(tile.sizes, row_major_strides(piece.box.sizes))


def _start(piece: Piece, box: Box, strides: tuple[int, ...]) -> int:
    """Elements from the start of a piece's extent to the first element of `box`."""
    return sum((o - p) * s for o, p, s in zip(box.offsets, piece.box.offsets, strides, strict=True))


def _flat_start(piece: Piece, box: Box) -> int:
    return _start(piece, box, row_major_strides(piece.box.sizes))


def _transform(part: Array, dtype: DType, transform: str) -> None:
    """Turn stored elements into logical ones, in place and bit by bit: NaN payloads survive."""
    import numpy as np

    if transform == VOID:
        part[...] = np.zeros((), part.dtype)
        return
    width = dtype.component_bytes
    components = part[..., None].view(f"u{width}")  # complex numbers as (..., 2)
    if transform == "byteswap":
        components.byteswap(inplace=True)
    elif transform == "neg" and dtype.kind in ("int", "uint"):
        np.negative(components, out=components)
    elif transform in ("conj", "neg"):
        chosen = components[..., 1::2] if transform == "conj" else components
        chosen ^= np.array(1 << (8 * width - 1), components.dtype)
    else:
        raise ValueError(f"unknown transform: {transform}")


def _not_tiled(entry: TensorEntry, tile: Box, held: int) -> FindingsError:
    finding = Finding(
        "uncovered" if held < tile.volume else "pieces-overlap",
        f"{entry.name} at {list(tile.offsets)}",
        expected=f"{tile.volume} elements, each in one piece",
        found=f"{held} elements",
    )
    return FindingsError(f"the pieces of a tensor do not tile it: {entry.name}", [finding])
