"""A rank's tensor in a file: slots that are one stretch each, and fill it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from ckpttools.dtypes import parse_dtype
from ckpttools.errors import ConversionError
from ckpttools.model import Mesh, TensorSpec
from ckpttools.placement.held import held_by, require_none, uncuttable
from ckpttools.placement.local import Cut, PlacedTensor, Placement
from tests.unit.placement.test_local import placed


@given(placed())
def test_the_slots_of_a_rank_are_its_tensor_byte_after_byte(case: tuple[tuple[int, ...], Placement, Mesh]) -> None:
    shape, placement, mesh = case
    tensor = PlacedTensor(TensorSpec("w", parse_dtype("int32"), shape), ("w",), placement=placement)
    whole = np.arange(np.prod(shape, dtype=int), dtype="<i4").reshape(shape)
    for rank in range(mesh.ranks):
        (held,) = held_by([tensor], mesh, rank)
        own = np.zeros(held.local.shape, "<i4")
        for part in held.local.parts:
            window, place = (tuple(slice(o, s) for o, s in zip(b.offsets, b.stops, strict=True)) for b in (part.box, part.local))
            own[place] = whole[window]
        content = bytearray(100 + held.spec.length_bytes)
        for slot in held.slots(100):
            window = tuple(slice(o, s) for o, s in zip(slot.box.offsets, slot.box.stops, strict=True))
            assert slot.length == 4 * slot.box.volume
            content[slot.offset : slot.offset + slot.length] = whole[window].tobytes()
        assert bytes(content[100:]) == own.tobytes()


def test_a_tensor_of_another_stage_is_not_there() -> None:
    tensor = PlacedTensor(TensorSpec("w", parse_dtype("int8"), (4,)), ("w",), placement=Placement((), (("pp", (1,)),)))
    assert [0, 1] == [len(held_by([tensor], Mesh((("pp", 2),)), rank)) for rank in range(2)]


def test_elements_of_half_a_byte_are_not_cut() -> None:
    tensors = [
        PlacedTensor(TensorSpec(name, parse_dtype("float4_e2m1fn"), (4, 2)), (name,), placement=Placement(cuts))
        for name, cuts in (("cut", (Cut("tp", 0),)), ("whole", ()), ("cut by none", (Cut("ep", 0),)))
    ]
    assert ["cut"] == list(uncuttable(tensors, Mesh((("tp", 2),))))


def test_all_that_is_refused_is_named_up_to_a_limit() -> None:
    require_none({}, "nothing")
    with pytest.raises(ConversionError, match="shards cannot hold 10 of the entries") as caught:
        require_none({f"t{i}": "too odd" for i in range(10)}, "shards")
    assert "`t7` (too odd) and 2 more" in str(caught.value.found)
