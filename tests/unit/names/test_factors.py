"""Rows in another order as one box: the values are those that numpy has, whatever is cut where."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import BY_NAME
from ckpttools.gather import Gather
from ckpttools.geometry import factored, indices
from ckpttools.model import Box, Extent, Piece, TensorEntry, TensorSpec
from ckpttools.names.convert import convert
from ckpttools.names.factors import refactored
from ckpttools.names.maps import parse_map


class Memory:
    """A source of one file in memory."""

    location = "memory"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, file: str, offset: int, view: memoryview) -> None:
        view.cast("B")[:] = self.data[offset : offset + view.nbytes]


def values_of(source: Memory, entry: TensorEntry, box: Box | None = None, *, tile_bytes: int | None = None) -> np.ndarray:
    tiles = [bytes(t) for t in Gather(source, memory_bytes=1 << 20).stream(entry, box, tile_bytes=tile_bytes)]
    return np.frombuffer(b"".join(tiles), "i2").reshape((box or entry.spec.box).sizes)


@st.composite
def cut_tensors(draw, rows: int, columns: int) -> tuple[np.ndarray, Memory, TensorEntry]:
    """A matrix in pieces cut anywhere, one after the other in a file."""
    whole = np.arange(rows * columns, dtype="i2").reshape(rows, columns)
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in (rows, columns)]
    data, pieces = b"", []
    for top, bottom in pairwise(edges[0]):
        for left, right in pairwise(edges[1]):
            part = whole[top:bottom, left:right].tobytes()
            box = Box((top, left), (bottom - top, right - left))
            pieces.append(Piece(box, Extent("f", len(data), len(part))))
            data += part
    spec = TensorSpec("w", BY_NAME["int16"], (rows, columns))
    return whole, Memory(data), TensorEntry(spec, ("w",), tuple(pieces))


@st.composite
def boxes_in(draw, shape: tuple[int, ...]) -> Box:
    low = [draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(low), tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)))


def rows_map(order: tuple[int, ...], *, transpose: bool) -> str:
    rule = f'a = "w"\nb = "v"\nrows = [2, 3, 0]\norder = {list(order)}\ntranspose = {str(transpose).lower()}\n'
    return f'sides = ["a", "b"]\n[[rules]]\n{rule}'


class TestRowsInAnotherOrder:
    @given(st.data())
    def test_any_box_has_the_values_that_numpy_has_and_a_cut_of_the_source_makes_few_pieces(self, data):
        order, transpose = tuple(data.draw(st.permutations(range(3)))), data.draw(st.booleans())
        last, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        rows = 6 * last
        whole, source, entry = data.draw(cut_tensors(rows, columns))
        (made,) = convert(parse_map(rows_map(order, transpose=transpose), "m"), "a", [entry], {}).tensors
        wanted = whole.reshape(2, 3, last, columns).transpose(*order, 3).reshape(rows, columns)
        wanted = wanted.T if transpose else wanted
        assert len(made.pieces) <= 5 * len(entry.pieces)
        tile_bytes = data.draw(st.sampled_from([2, 6, 16, 1 << 20]))
        assert np.array_equal(wanted, values_of(source, made, tile_bytes=tile_bytes))
        box = data.draw(boxes_in(made.spec.shape))
        window = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert np.array_equal(wanted[window], values_of(source, made, box, tile_bytes=tile_bytes))
        assert np.array_equal(wanted, values_of(source, refactored(made, ())))
        (back,) = convert(parse_map(rows_map(order, transpose=transpose), "m"), "b", [made], {}).tensors
        assert np.array_equal(whole, values_of(source, back))

    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize("side", ["a", "b"])
    def test_a_tensor_in_one_piece_stays_in_one(self, side, transpose):
        spec = TensorSpec("w" if side == "a" else "v", BY_NAME["int16"], (600, 600))
        entry = TensorEntry(spec, (spec.name,), (Piece(spec.box, Extent("f", 0, spec.length_bytes)),))
        (made,) = convert(parse_map(rows_map((0, 2, 1), transpose=transpose), "m"), side, [entry], {}).tensors
        assert 1 == len(made.pieces)


class TestFactored:
    @given(st.data())
    def test_the_parts_hold_each_element_once_in_either_counting(self, data):
        factors = tuple(tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))) for _ in range(2))
        shape = tuple(prod(own) for own in factors)
        box = data.draw(boxes_in(shape))
        parts = list(factored(box, factors))
        assert len(parts) <= prod(2 * len(own) - 1 for own in factors)
        seen = []
        counted_shape = tuple(n for own in factors for n in own)
        for part, counted in parts:
            flat = [np.ravel_multi_index(i, shape) for i in indices(part)]
            assert flat == [np.ravel_multi_index(i, counted_shape) for i in indices(counted)] or part.sizes[1] < shape[1]
            assert sorted(flat) == sorted(np.ravel_multi_index(i, counted_shape) for i in indices(counted))
            seen += flat
        assert sorted(np.ravel_multi_index(i, shape) for i in indices(box)) == sorted(seen)

    def test_without_factors_a_box_is_its_own_part(self):
        box = Box((1,), (2,))
        assert [(box, box)] == list(factored(box, ()))
