"""The note of ours in a rank's file: as it was written, or refused with a reason."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.containers.local_boxes import LocalBox, parse_local_boxes, pieces_of, render_local_boxes
from ckpttools.dtypes import parse_dtype
from ckpttools.model import Mesh, TensorSpec
from ckpttools.placement.held import held_by
from ckpttools.placement.local import Cut, PlacedTensor, Placement
from tests.unit.placement.test_local import placed

GOOD = {"rank": 1, "mesh": [["tp", 2]], "tensors": {"w": {"shape": [4, 2], "parts": [[[2, 0], [2, 2], [0, 0]]]}}}


@given(placed())
def test_what_is_written_is_what_is_read(case: tuple[tuple[int, ...], Placement, Mesh]) -> None:
    shape, placement, mesh = case
    tensor = PlacedTensor(TensorSpec("ключ.w", parse_dtype("int32"), shape), ("w",), placement=placement)
    for rank in range(mesh.ranks):
        (held,) = held_by([tensor], mesh, rank)
        note = parse_local_boxes(render_local_boxes([("n", held)], mesh, rank))
        assert (rank, mesh, {"n": LocalBox(shape, held.local)}) == (note.rank, note.mesh, dict(note.tensors))


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"rank": True},
        {"mesh": [["tp"]]},
        {"mesh": [["tp", 0]]},
        {"mesh": [["tp", 1 << 30]]},
        {"tensors": []},
        {"tensors": {"w": {"shape": [4, 2]}}},
        {"tensors": {"w": {"shape": [4, 2], "parts": []}}},
        {"tensors": {"w": {"shape": [4, -2], "parts": [[[2, 0], [2, 2], [0, 0]]]}}},
        {"tensors": {"w": {"shape": [4, 2], "parts": [[[3, 0], [2, 2], [0, 0]]]}}},
        {"tensors": {"w": {"shape": [4, 2], "parts": [[[2, 0], [2, 2], [1, 0]]]}}},
        {"tensors": {"w": {"shape": [4, 2], "parts": [[[2], [2], [0]]]}}},
        {"tensors": {"w": {"shape": [4, 2], "parts": [[[0, 0], [1, 2], [0, 0]], [[1, 0], [1, 2], [0, 0]]]}}},
    ],
)
def test_a_note_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    parse_local_boxes(json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match=r"."):
        parse_local_boxes(json.dumps(GOOD | change).encode())


@settings(max_examples=300)
@given(st.data())
def test_bytes_of_all_kinds_are_a_note_or_a_value_error(data: st.DataObject) -> None:
    text = bytearray(json.dumps(GOOD).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'0[]{}",9-xn'))
    with contextlib.suppress(ValueError):
        parse_local_boxes(bytes(text))


def test_parts_that_are_columns_of_a_rank_s_tensor_are_strided_pieces() -> None:
    tensor = PlacedTensor(TensorSpec("w", parse_dtype("int32"), (3, 8)), ("w",), placement=Placement((Cut("tp", 1, (4, 4)),)))
    (held,) = held_by([tensor], Mesh((("tp", 2),)), 1)
    pieces = pieces_of(held.local, tensor.spec, "f", 64, 1)
    assert [((0, 2), 64, (4, 1)), ((0, 6), 72, (4, 1))] == [(p.box.offsets, p.extent.offset, p.extent.strides) for p in pieces]
