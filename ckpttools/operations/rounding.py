"""Holds a weight against its master: where a writer keeps both, one is the rounding of the other, element by element.

That costs no second copy and no seal, and it finds what checksums cannot: a flat buffer cut in the wrong order, a rank's
file of another step, a weight that was changed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttools.cast import Caster
from ckpttools.dtypes import DType
from ckpttools.findings import Finding
from ckpttools.gather import Gather
from ckpttools.geometry import tiles
from ckpttools.model import Box, TensorEntry

if TYPE_CHECKING:
    import numpy as np

    Codes = np.ndarray[Any, np.dtype[Any]]

_TILE_ELEMENTS = 1 << 18
_NAN_ABOVE = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10, "bfloat16": 0xFF << 7}
"""A code whose bits but the sign are greater is NaN; processors give NaNs a payload of their own when they round."""


def check_rounding(gather: Gather, entry: TensorEntry, master: TensorEntry) -> Finding | None:
    """A finding when the values of a tensor are not those of its master, rounded to its dtype; NaN for NaN will do.

    Raises: FindingsError, StorageError: when either cannot be read. ConversionError: for dtypes that are not cast.
    """
    import numpy as np

    source, target = master.spec.dtype, entry.spec.dtype
    caster = Caster(source, target) if source != target else None
    differing, first = 0, ""
    for tile in tiles(entry.spec.box, _TILE_ELEMENTS):
        rounded = _read(gather, master, tile)
        if caster is not None:
            rounded = bytes(caster.cast(memoryview(rounded))[0])
        found = np.frombuffer(_read(gather, entry, tile), f"u{target.item_bytes}")
        expected = np.frombuffer(rounded, found.dtype)
        differs = (found != expected) & ~(_is_nan(found, target) & _is_nan(expected, target))
        if differs.any():
            at = int(differs.argmax())
            if not differing:
                first = f"{_index(tile, at)}: bits {int(found[at]):#x}, and {int(expected[at]):#x} rounded from the master"
            differing += int(np.count_nonzero(differs))
    if not differing:
        return None
    files = ", ".join(dict.fromkeys(p.extent.file for p in (*entry.pieces[:1], *master.pieces[:8])))
    found_text = f"{differing} of {entry.spec.volume} elements differ, the first at {first}"
    return Finding("rounding-mismatch", f"{entry.name} in {files}", f"{master.name} rounded to {target}", found_text)


def _read(gather: Gather, entry: TensorEntry, box: Box) -> bytes:
    return b"".join(bytes(view) for view in gather.stream(entry, box))


def _is_nan(codes: Codes, dtype: DType) -> Codes:
    import numpy as np

    magnitude = codes & codes.dtype.type((1 << (dtype.bits - 1)) - 1)
    above = _NAN_ABOVE.get(dtype.name)
    return magnitude > codes.dtype.type(above) if above is not None else np.zeros(codes.shape, bool)


def _index(tile: Box, at: int) -> list[int]:
    """The index in the tensor of an element of a tile, by its row-major place in it."""
    found = []
    for offset, size in zip(reversed(tile.offsets), reversed(tile.sizes), strict=True):
        found.append(offset + at % size)
        at //= size
    return found[::-1]
