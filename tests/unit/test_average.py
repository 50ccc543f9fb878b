"""The mean of copies: rounded once, equal bits kept, no overflow on the way, the same bits on every machine."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.average import Averager, has_mean
from ckpttools.cast import DTYPES, cast
from ckpttools.dtypes import BY_NAME
from ckpttools.gather import Gather
from ckpttools.model import Box, Extent, Piece, TensorEntry, TensorSpec
from ckpttools.names.moves import Made, Move, assemble
from ckpttools.storage.source import open_source

FLOAT32 = st.binary(min_size=4, max_size=4)


def mean(dtype: str, *copies: bytes) -> bytes:
    return bytes(Averager(BY_NAME[dtype]).mean([memoryview(c) for c in copies]))


def floats(data: bytes) -> list[float]:
    return [x for (x,) in struct.iter_unpack("<f", data)]


class TestMean:
    def test_it_is_halfway_between_two(self):
        assert struct.pack("<3f", 2.0, -1.5, 0.25) == mean(
            "float32", struct.pack("<3f", 1.0, -1.0, 0.0), struct.pack("<3f", 3.0, -2.0, 0.5)
        )

    @given(FLOAT32, FLOAT32)
    def test_of_two_float32_it_is_the_exact_mean_rounded_once_or_twice(self, a, b):
        (x,), (y,) = floats(a), floats(b)
        if not (math.isfinite(x) and math.isfinite(y)) or a == b:
            return
        exact = (Fraction(x) + Fraction(y)) / 2
        (found,) = floats(mean("float32", a, b))
        near = float(np.float32(float(exact)))
        assert math.isclose(near, found, rel_tol=2**-23, abs_tol=2**-149)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equal_bits_are_kept_whatever_they_mean(self, dtype):
        width = BY_NAME[dtype].item_bytes
        codes = np.arange(256, dtype="<u1").tobytes() * (width * 256 if width <= 2 else width)
        assert codes == mean(dtype, codes, codes, codes)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_order_of_two_copies_does_not_matter(self, dtype):
        rng = np.random.default_rng(7)
        a, b = (rng.bytes(8 * 512) for _ in range(2))
        assert same(dtype, mean(dtype, a, b), mean(dtype, b, a))

    def test_largest_doubles_do_not_overflow(self):
        top = struct.pack("<d", 1.7976931348623157e308)
        below = struct.pack("<d", 1.7976931348623155e308)
        (found,) = struct.unpack("<d", mean("float64", top, below))
        assert math.isfinite(found)
        assert found > 1.79e308

    def test_infinity_and_nan_stay_what_they_are(self):
        inf, one, nan = struct.pack("<f", math.inf), struct.pack("<f", 1.0), struct.pack("<f", math.nan)
        assert math.isinf(floats(mean("float32", inf, one))[0])
        assert math.isnan(floats(mean("float32", nan, one))[0])

    def test_bfloat16_is_rounded_to_nearest_even(self):
        below, above = struct.pack("<H", 0x3F80), struct.pack("<H", 0x3F81)
        assert struct.pack("<H", 0x3F80) == mean("bfloat16", below, above)

    def test_three_copies(self):
        assert struct.pack("<f", 2.0) == mean("float32", *(struct.pack("<f", x) for x in (1.0, 2.0, 3.0)))


def same(dtype: str, a: bytes, b: bytes) -> bool:
    """Equal bits, or NaN on both sides: which payload a sum of two NaNs has is the processor's."""
    wide = [np.frombuffer(cast(memoryview(x), BY_NAME[dtype], BY_NAME["float64"])[0].tobytes(), "<f8") for x in (a, b)]
    return bool(((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))).all())


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_what_is_no_number_has_no_mean(dtype):
    assert not has_mean(BY_NAME[dtype])


class TestGather:
    """A piece with `mean_with` streams like any other, whatever way its copies are stored."""

    def entry(self, root: Path, *, rows: int, columns: int) -> tuple[TensorEntry, np.ndarray]:
        """A tensor of two pieces: the first the mean of a row-major, a transposed and a big-endian copy, the second plain."""
        rng = np.random.default_rng(3)
        copies = [rng.standard_normal((rows, columns)).astype("<f4") for _ in range(3)]
        rest = rng.standard_normal((2, columns)).astype("<f4")
        stored = (copies[0].tobytes(), copies[1].T.tobytes(), copies[2].astype(">f4").tobytes(), rest.tobytes())
        for name, data in zip("abcr", stored, strict=True):
            (root / name).write_bytes(data)
        length = rows * columns * 4
        others = (Extent("b", 0, length, (1, rows)), Extent("c", 0, length, transforms=("byteswap",)))
        pieces = (
            Piece(Box((0, 0), (rows, columns)), Extent("a", 0, length), mean_with=others),
            Piece(Box((rows, 0), (2, columns)), Extent("r", 0, 8 * columns)),
        )
        wide = [c.astype("<f8") for c in copies]
        expected = np.concatenate([((wide[0] + wide[1] + wide[2]) / 3).astype("<f4"), rest])
        spec = TensorSpec("w", BY_NAME["float32"], (rows + 2, columns))
        return TensorEntry(spec, ("w",), pieces), expected

    @pytest.mark.parametrize(("rows", "columns"), [(3, 5), (300, 200), (2, 70_000)])
    def test_values_are_the_mean_tile_by_tile(self, rows, columns, tmp_path):
        entry, expected = self.entry(tmp_path, rows=rows, columns=columns)
        source, _ = open_source(str(tmp_path))
        tiles = [bytes(t) for t in Gather(source, memory_bytes=1 << 20).stream(entry)]
        assert expected.tobytes() == b"".join(tiles)
        assert max(map(len, tiles)) <= 64 << 10

    def test_a_box_of_it_is_the_mean_of_that_box(self, tmp_path):
        entry, expected = self.entry(tmp_path, rows=9, columns=8)
        source, _ = open_source(str(tmp_path))
        box = Box((7, 2), (3, 5))
        found = b"".join(bytes(t) for t in Gather(source, memory_bytes=1 << 20).stream(entry, box))
        assert expected[7:10, 2:7].tobytes() == found

    def test_parts_of_it_in_another_tensor_are_the_mean_too(self, tmp_path):
        entry, expected = self.entry(tmp_path, rows=6, columns=4)
        moved = Made("t", (3, 4), (Move("w", Box((1, 1), (4, 3)), (0, 0), (1, 0)),))
        source, _ = open_source(str(tmp_path))
        found = b"".join(bytes(t) for t in Gather(source, memory_bytes=1 << 20).stream(assemble(moved, {"w": entry})))
        assert expected[1:5, 1:4].T.tobytes() == found

    def test_a_small_tensor_in_one_piece_is_the_mean_too(self, tmp_path):
        for name, value in (("a", 1.0), ("b", 4.0)):
            (tmp_path / name).write_bytes(struct.pack("<f", value))
        spec = TensorSpec("w", BY_NAME["float32"], (1,))
        entry = TensorEntry(spec, ("w",), (Piece(spec.box, Extent("a", 0, 4), mean_with=(Extent("b", 0, 4),)),))
        source, _ = open_source(str(tmp_path))
        assert [struct.pack("<f", 2.5)] == [bytes(t) for t in Gather(source, memory_bytes=1 << 20).stream(entry)]
