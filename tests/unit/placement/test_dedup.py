"""Which rank writes what: against torch's own planner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.geometry import cover
from ckpttools.model import Box, Mesh, TensorSpec
from ckpttools.placement.dedup import assign, owners
from ckpttools.placement.local import Cut, PlacedTensor, Placement

FP32 = parse_dtype("float32")


def placed(name: str, shape: tuple[int, ...], *cuts: Cut) -> PlacedTensor:
    return PlacedTensor(TensorSpec(name, FP32, shape), (name,), placement=Placement(cuts))


@st.composite
def plans(draw: st.DrawFn) -> list[list[tuple[str, int]]]:
    """What up to six ranks hold of twelve items, each of the same bytes wherever it is."""
    bytes_of = {f"t{i}": draw(st.sampled_from([0, 1, 4, 4, 8, 100])) for i in range(12)}
    ranks = draw(st.integers(1, 6))
    return [[(name, n) for name, n in bytes_of.items() if draw(st.booleans())] for _ in range(ranks)]


@settings(deadline=None)
@given(plans())
def test_the_owners_are_those_that_torch_chooses(held: list[list[tuple[str, int]]]) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def item(name: str, count: int) -> WriteItem:
        size = torch.Size([count])
        data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(torch.uint8), size)
        return WriteItem(MetadataIndex(name, torch.Size([0])), WriteItemType.SHARD, tensor_data=data)

    chosen = dedup_save_plans([SavePlan([item(*i) for i in plan]) for plan in held])
    assert {i.index.fqn: rank for rank, plan in enumerate(chosen) for i in plan.items} == assign(held)


def test_replicated_tensors_go_to_the_ranks_that_have_least() -> None:
    mesh = Mesh((("fsdp", 3),))
    found = owners([placed("norm", (4,)), placed("w", (9, 2), Cut("fsdp", 0)), placed("bias", (4,)), placed("b", (4,))], mesh)
    assert {name: list(boxes.values()) for name, boxes in found.items()} == {"norm": [0], "w": [0, 1, 2], "bias": [1], "b": [2]}


def test_boxes_of_a_replicating_axis_are_shared_out() -> None:
    mesh = Mesh((("dp", 2), ("fsdp", 2)))
    found = owners([placed(name, (4, 2), Cut("fsdp", 0)) for name in "ab"], mesh)
    assert [found[n][Box((row, 0), (2, 2))] for n in "ab" for row in (0, 2)] == [0, 1, 2, 3]


def test_an_empty_box_is_there_once_and_never_in_the_place_of_a_full_one() -> None:
    assert owners([placed("w", (1,), Cut("fsdp", 0))], Mesh((("fsdp", 4),)))["w"] == {Box((0,), (1,)): 0, Box((1,), (0,)): 1}
    strided = placed("w", (5,), Cut("tp", 0), Cut("fsdp", 0))
    boxes = list(owners([strided], Mesh((("fsdp", 4), ("tp", 2))))["w"])
    assert len({box.offsets for box in boxes}) == len(boxes)
    assert cover((5,), [box for box in boxes if box.volume]).is_exact
