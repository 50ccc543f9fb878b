"""Holds a weight against its master: where a writer keeps both, one is the rounding of the other, element by element.

That costs no second copy and no seal, and it finds what checksums cannot: a flat buffer cut in the wrong order, a rank's
file of another step, a weight that was changed alone. Where both pass by anyway, a digest of the master as it rounds
(`RoundedDigest`) is held against the weight's own; where the two are not equal, `check_rounding` reads again and tells why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckpttools.cast import DTYPES, Caster
from ckpttools.digest import new_hasher
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


class RoundedDigest:
    """Takes the values of a master in order, and gives the digest that its rounding to another dtype has."""

    def __init__(self, source: DType, target: DType, algorithm: str) -> None:
        self._caster = Caster(source, target)
        self._hasher = new_hasher(algorithm)
        self._step_bytes = _TILE_ELEMENTS * source.item_bytes

    def update(self, tile: memoryview) -> None:
        """Take the next values, whole elements."""
        for start in range(0, len(tile), self._step_bytes):
            self._hasher.update(self._caster.cast(tile[start : start + self._step_bytes])[0])

    def hexdigest(self) -> str:
        """Of all values that were taken."""
        return self._hasher.hexdigest()


def is_rounding(source: DType, target: DType) -> bool:
    """Whether values of one dtype can be rounded to the other, and are not the same bytes. Pure."""
    return source != target and source.name in DTYPES and target.name in DTYPES


def check_roundings(
    gather: Gather,
    pairs: Iterable[tuple[TensorEntry, TensorEntry]],
    digests: Mapping[str, str],
    rounded: Mapping[str, str],
) -> list[Finding]:
    """Findings for the weights that are not what their masters round to; what the digests do not prove is read.

    Args:
        pairs: (weight, its master).
        digests: by name; a pair without one of its two could not be read, and is passed over.
        rounded: by name of a master, the digest of its values as they round to the dtype of the weight.
    """
    found = []
    for weight, master in pairs:
        if weight.name not in digests or master.name not in digests:
            continue
        expected = digests[master.name] if master.spec.dtype == weight.spec.dtype else rounded.get(master.name)
        if expected != digests[weight.name]:
            found.append(check_rounding(gather, weight, master))
    return [f for f in found if f is not None]


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
