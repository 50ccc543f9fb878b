"""Casts between floating-point dtypes: the one place where values are computed, and only when asked for.

One rule for every pair, the same whatever libraries are installed (torch and ml_dtypes disagree on NaN, infinity and
overflow, and torch with itself from version to version):

- round to nearest, ties to even, in one step; a widening cast is exact;
- a finite value too large for the target becomes infinity, or the largest finite value where the target has no infinity;
- infinity stays infinity, and becomes NaN where the target has none: what was not finite never looks finite afterwards;
- NaN stays NaN, with its sign and as much of its payload as the target has room for;
- the sign of zero is kept where the target has two zeros.

Whatever of this loses something is counted (`CastCounts`). All is integer arithmetic and tables in numpy, so that the
torch-free installation casts too. Read `_translate`, which does any pair slowly and defines the rest, then `Caster`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckpttools.dtypes import DType
from ckpttools.errors import ConversionError
from ckpttools.storage.buffer import Buffer

if TYPE_CHECKING:
    import numpy as np

    Codes = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 1 << 16
"""Elements per step: the temporaries of a step stay in the cache."""
_PLAIN, _OVERFLOWED, _SATURATED, _INFINITY_LOST, _NAN_CHANGED = range(5)


@dataclass(frozen=True, slots=True)
class CastCounts:
    """What a cast could not keep, in elements; all zero when only rounding happened."""

    overflowed: int = 0
    """Finite values that became infinite."""
    saturated: int = 0
    """Finite values that became the largest finite value, in a target without infinity."""
    infinities_lost: int = 0
    """Infinities that became NaN, in a target without infinity."""
    nans_changed: int = 0
    """NaNs whose sign or payload a cast back would not restore."""

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class _Format:
    """The bits of a floating-point dtype."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool = True
    nans: str = "ieee"
    """`ieee`: the highest exponent; `signed`: all ones; `single`: the code that would be -0."""

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def code_type(self) -> str:
        return f"<u{self.bits // 8}"

    @property
    def largest(self) -> int:
        """The code of the largest finite value."""
        if self.nans == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return (1 << (self.bits - 1)) - (2 if self.nans == "signed" else 1)


_FORMATS = {
    "float64": _Format(11, 52, 1023),
    "float32": _Format(8, 23, 127),
    "float16": _Format(5, 10, 15),
    "bfloat16": _Format(8, 7, 127),
    "float8_e5m2": _Format(5, 2, 15),
    "float8_e4m3fn": _Format(4, 3, 7, has_infinity=False, nans="signed"),
    "float8_e4m3fnuz": _Format(4, 3, 8, has_infinity=False, nans="single"),
    "float8_e5m2fnuz": _Format(5, 2, 16, has_infinity=False, nans="single"),
}
DTYPES = tuple(_FORMATS)
"""Names of the dtypes that casts go between. Block formats (float8_e8m0fnu, float4, float6) are not numbers by themselves."""


def require_castable(name: str, source: DType, target: DType) -> None:
    """Raise ConversionError unless values of `source` can be cast to `target`; `name` is the tensor's, for the message."""
    for dtype in (source, target):
        if dtype.name not in _FORMATS:
            raise ConversionError(
                f"no cast from {source} to {target}: {name}", expected=f"two of {', '.join(DTYPES)}", found=dtype.name
            )


def cast(view: memoryview, source: DType, target: DType) -> tuple[memoryview, CastCounts]:
    """The little-endian values of `view` as `target`, in memory of their own, and what was lost. Pure."""
    return Caster(source, target).cast(view)


class Caster:
    """Casts tiles between two dtypes. Keeps its buffer; for one thread at a time.

    A source of at most 16 bits is looked up in a table of all its codes. Of float32 and float64, numpy casts the pairs
    it has; where a step holds a value that overflows, an infinity or a NaN, it is done again by `_translate`, because
    processors quiet NaNs and numpy does not count. float32 to 8 bits goes over bfloat16 rounded to odd, which makes
    rounding twice exact.
    """

    def __init__(self, source: DType, target: DType) -> None:
        require_castable("a tile", source, target)
        self._source = _FORMATS[source.name]
        self._target = _FORMATS[target.name]
        self._step = _step(source.name, target.name)
        self._memory = Buffer()

    def cast(self, view: memoryview) -> tuple[memoryview, CastCounts]:
        """The values of `view` in the target dtype, valid until the next call, and what was lost."""
        import numpy as np

        counts = CastCounts()
        codes = np.frombuffer(view, self._source.code_type)
        length_bytes = codes.size * self._target.bits // 8
        made = self._memory.view(length_bytes)
        out = np.frombuffer(made, self._target.code_type, codes.size)
        for start in range(0, codes.size, _CHUNK):
            kinds = self._step(codes[start : start + _CHUNK], out[start : start + _CHUNK])
            if kinds is not None and kinds.any():
                counts += CastCounts(*(int(np.count_nonzero(kinds == kind)) for kind in range(_OVERFLOWED, 5)))
        return made, counts


_Step = Callable[["Codes", "Codes"], "Codes | None"]
"""Casts codes into the array given second; returns the kind of each, or None when all are plain."""


def _step(source: str, target: str) -> _Step:
    """The fastest exact way from one dtype to another."""
    if (source, target) == ("bfloat16", "float32"):
        return _widen_bfloat16
    if _FORMATS[source].bits <= 16:
        return lambda codes, out: _look_up(source, target, codes, out)
    if (source, target) == ("float32", "bfloat16"):
        return _with_limit(source, target, _round_to_bfloat16)
    if source == "float32" and _FORMATS[target].bits == 8:
        return lambda codes, out: _look_up("bfloat16", target, _bfloat16_rounded_to_odd(codes), out)
    if target in ("float16", "float32", "float64"):
        return _with_limit(source, target, lambda codes, out: _numpy_cast(source, target, codes, out))

    def translate(codes: Codes, out: Codes) -> Codes:
        out[...], kinds = _translate(codes, _FORMATS[source], _FORMATS[target])
        return kinds

    return translate


def _widen_bfloat16(codes: Codes, out: Codes) -> None:
    out[...] = codes
    out <<= 16


def _look_up(source: str, target: str, codes: Codes, out: Codes) -> Codes | None:
    table, kinds, limit = _table(source, target)
    table.take(codes, out=out, mode="clip")  # every code is in the table; `clip` spares the copy that `raise` makes
    if (codes & _magnitude_mask(_FORMATS[source])).max(initial=0) < limit:
        return None
    return kinds.take(codes, mode="clip")


@lru_cache(maxsize=16)
def _table(source: str, target: str) -> tuple[Codes, Codes, int]:
    """Of a source of at most 16 bits: the target's code for every code, the kind of each, the least magnitude not plain."""
    import numpy as np

    form = _FORMATS[source]
    codes = np.arange(1 << form.bits, dtype=form.code_type)
    table, kinds = _translate(codes, form, _FORMATS[target])
    return table, kinds, int((codes & _magnitude_mask(form))[kinds != _PLAIN].min(initial=1 << (form.bits - 1)))


def _magnitude_mask(form: _Format) -> Codes:
    """All bits of a code but its sign."""
    import numpy as np

    return np.array((1 << (form.bits - 1)) - 1, form.code_type)


def _with_limit(source: str, target: str, fast: Callable[[Codes, Codes], None]) -> _Step:
    """`fast` where no code reaches the first that overflows or is not finite, else `_translate`."""
    form, to = _FORMATS[source], _FORMATS[target]
    magnitude = _magnitude_mask(form)
    limit = min(form.largest + 1, int(_encode_exactly(form, *_overflow_midpoint(to))))

    def step(codes: Codes, out: Codes) -> Codes | None:
        if (codes & magnitude).max(initial=0) < limit:
            fast(codes, out)
            return None
        out[...], kinds = _translate(codes, form, to)
        return kinds

    return step


def _overflow_midpoint(form: _Format) -> tuple[int, int]:
    """(m, e): m * 2**e is half-way from the largest finite value of a format with infinity to where the next would be."""
    highest = (1 << form.exponent_bits) - 2 - form.bias
    return (1 << (form.mantissa_bits + 2)) - 1, highest - form.mantissa_bits - 1


def _encode_exactly(form: _Format, mantissa: int, exponent: int) -> int:
    """The code of mantissa * 2**exponent, or the one past the largest finite where the format does not have it."""
    drop = mantissa.bit_length() - 1 - form.mantissa_bits
    biased = exponent + mantissa.bit_length() - 1 + form.bias
    if drop > 0 or biased > (1 << form.exponent_bits) - 2:
        return form.largest + 1
    return ((biased - 1) << form.mantissa_bits) + (mantissa << -drop)


def _numpy_cast(source: str, target: str, codes: Codes, out: Codes) -> None:
    out.view(target)[...] = codes.view(source)


def _round_to_bfloat16(codes: Codes, out: Codes) -> None:
    """float32 to the nearest bfloat16, ties to even, for finite values; the carry runs into the exponent as it should."""
    import numpy as np

    rounded = codes >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += codes
    rounded >>= np.uint32(16)
    out[...] = rounded


def _bfloat16_rounded_to_odd(codes: Codes) -> Codes:
    """float32 cut to bfloat16, its last bit set when anything was cut off.

    Rounding that to a format with two bits less of precision gives what rounding the float32 would (Boldo and
    Melquiond, 2008), NaN and infinity included.
    """
    import numpy as np

    odd: Codes = (codes >> np.uint32(16)).astype(np.uint16)
    odd |= (codes & np.uint32(0xFFFF)) != 0
    return odd


def _translate(codes: Codes, source: _Format, target: _Format) -> tuple[Codes, Codes]:
    """Any pair by its definition: (target's codes, the kind of each). Pure."""
    import numpy as np

    sign = codes >> np.array(source.bits - 1, codes.dtype) != 0
    magnitude = codes & _magnitude_mask(source)
    is_infinite = (magnitude == source.largest + 1) & source.has_infinity
    is_nan = (magnitude > source.largest) & ~is_infinite
    if source.nans == "single":
        is_nan = sign & (magnitude == 0)
        sign &= ~is_nan  # it has no sign; it widens to the positive one
    finite = np.where(is_nan | is_infinite, 0, magnitude).astype(np.int64)
    rounded = _round(finite, source, target)
    is_too_large = rounded > target.largest
    beyond = target.largest + 1 if target.has_infinity else target.largest
    rounded[is_too_large] = beyond
    kinds = np.zeros(codes.shape, np.uint8)
    kinds[is_too_large] = _OVERFLOWED if target.has_infinity else _SATURATED
    if target.has_infinity:
        rounded[is_infinite] = beyond
    elif is_infinite.any():
        rounded[is_infinite] = _nan(np.zeros(1, np.int64), target)
        kinds[is_infinite] = _INFINITY_LOST
    payload = _payload(magnitude[is_nan].astype(np.int64), source)
    rounded[is_nan] = _nan(payload, target)
    has_sign = sign & (rounded != 0) if target.nans == "single" else sign
    out = rounded.astype(np.uint64) | (has_sign.astype(np.uint64) << np.uint64(target.bits - 1))
    is_restored = _payload(_nan(payload, target) & ((1 << (target.bits - 1)) - 1), target) == payload
    if target.nans == "single":
        is_restored &= ~sign[is_nan]
    kinds[is_nan] = np.where(is_restored, _PLAIN, _NAN_CHANGED)
    return out.astype(target.code_type), kinds


def _round(magnitude: Codes, source: _Format, target: _Format) -> Codes:
    """Codes of the nearest values of `target` for finite non-negative codes of `source`; may pass the largest finite."""
    import numpy as np

    exponent = np.maximum(magnitude >> source.mantissa_bits, 1)
    mantissa = magnitude - ((exponent - 1) << source.mantissa_bits)
    # the value is mantissa * 2**(exponent - bias - mantissa_bits); as a double it is exact
    value = np.ldexp(mantissa.astype(np.float64), (exponent - source.bias - source.mantissa_bits).astype(np.int32))
    lowest = 1 - target.bias
    power = np.where(value == 0, lowest, np.maximum(np.frexp(value)[1] - 1, lowest))
    rounded: Codes = np.rint(np.ldexp(value, target.mantissa_bits - power)).astype(np.int64)
    rounded += (power - lowest).astype(np.int64) << target.mantissa_bits
    return rounded


_PAYLOAD_BITS = 52
_QUIET = 1 << (_PAYLOAD_BITS - 1)
"""The payload of the NaN that hardware makes; formats without payloads mean this one."""


def _payload(magnitude: Codes, form: _Format) -> Codes:
    """The payload of NaN codes, aligned to the 52 bits of a double's."""
    import numpy as np

    if form.nans != "ieee":
        return np.full(magnitude.shape, _QUIET, np.int64)
    return (magnitude & ((1 << form.mantissa_bits) - 1)) << (_PAYLOAD_BITS - form.mantissa_bits)


def _nan(payload: Codes, form: _Format) -> Codes:
    """NaN codes, without a sign, that hold the leading bits of the payloads; quiet where none of those is set."""
    import numpy as np

    if form.nans != "ieee":
        code = (1 << (form.bits - 1)) - (1 if form.nans == "signed" else 0)
        return np.full(payload.shape, code, np.int64)
    leading = payload >> (_PAYLOAD_BITS - form.mantissa_bits)
    quiet = 1 << (form.mantissa_bits - 1)
    return np.where(leading == 0, quiet, leading) + form.largest + 1
