"""What the values of the model say of themselves."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import model
from ckpttools.dtypes import BY_NAME
from ckpttools.model import Box, Checkpoint, Mesh, TensorEntry, TensorSpec, render_path
from tests.strategies import boxes_in, meshes, paths, shapes, specs


@st.composite
def boxes(draw):
    return draw(boxes_in(draw(shapes())))


class TestBox:
    @given(boxes())
    def test_volume_is_the_number_of_its_indices(self, box):
        assert box.volume == prod(stop - offset for offset, stop in zip(box.offsets, box.stops, strict=True))

    def test_of_rank_0_has_one_element(self):
        assert (1, ()) == (Box((), ()).volume, Box((), ()).stops)

    def test_with_a_side_of_0_has_none(self):
        assert Box((2, 0), (3, 0)).volume == 0

    def test_equal_boxes_are_one_key(self):
        assert len({Box((0,), (2,)), Box((0,), (2,)), Box((1,), (2,))}) == 2


class TestTensorSpec:
    @given(specs())
    def test_its_box_is_the_whole_tensor(self, spec):
        assert (spec.shape, spec.volume) == (spec.box.stops, spec.box.volume)

    @given(specs())
    def test_its_length_holds_every_bit(self, spec):
        assert spec.length_bytes * 8 == spec.volume * spec.dtype.bits

    def test_scalar_has_the_length_of_one_element(self):
        assert TensorSpec("step", BY_NAME["int64"], ()).length_bytes == 8


class TestMesh:
    @given(meshes())
    def test_reads_what_it_prints(self, mesh):
        assert mesh == Mesh.parse(str(mesh))

    @given(meshes())
    def test_has_as_many_ranks_as_the_product_of_its_axes(self, mesh):
        assert mesh.ranks == prod(count for _, count in mesh.axes)

    def test_prints_its_axes_in_order(self):
        assert str(Mesh((("tp", 2), ("pp", 4), ("fsdp", 16)))) == "tp=2,pp=4,fsdp=16"

    def test_without_axes_is_one_rank(self):
        assert (Mesh(), 1) == (Mesh.parse(""), Mesh().ranks)

    @pytest.mark.parametrize(
        "text", ["tp", "tp=", "=2", "tp=0", "tp=-1", "tp=2.5", "tp=two", "t p=2", "tp=2;pp=4", "2=tp", "tp=٣", "tp=2 pp=4"]
    )
    def test_what_is_no_axis_is_refused(self, text):
        with pytest.raises(ValueError, match="not a mesh axis"):
            Mesh.parse(text)

    def test_axis_named_twice_is_refused(self):
        with pytest.raises(ValueError, match="named twice"):
            Mesh.parse("tp=2,tp=4")


class TestRenderPath:
    @given(paths())
    def test_joins_the_keys_with_dots_and_escapes_nothing(self, path):
        assert ".".join(str(key) for key in path) == render_path(path)

    def test_number_and_its_text_print_alike(self):
        assert render_path(("state", 0, "step")) == render_path(("state", "0", "step")) == "state.0.step"

    def test_bytes_of_an_old_python_print_as_text(self):
        assert render_path((b"weight", None)) == "weight.None"


def entry(name, shape=(2, 3), dtype="float32"):
    return TensorEntry(TensorSpec(name, BY_NAME[dtype], shape), (name,), ())


class TestCheckpoint:
    def test_finds_a_tensor_by_its_dotted_name(self):
        checkpoint = Checkpoint("/a", "dcp", (entry("a.b"), entry("c")))
        assert checkpoint.by_name["c"] is checkpoint.tensors[1]

    def test_iterates_over_its_tensors_in_order(self):
        checkpoint = Checkpoint("/a", "dcp", (entry("z"), entry("a")))
        assert [t.name for t in checkpoint] == ["z", "a"]

    def test_counts_the_bytes_of_logical_values(self):
        assert Checkpoint("/a", "dcp", (entry("a"), entry("b", (), "int64"), entry("c", (0, 9)))).tensor_bytes == 32

    def test_is_committed_unless_its_layout_says_otherwise(self):
        assert Checkpoint("/a", "safetensors", ()).commit.is_committed


CLASSES = [c for c in vars(model).values() if dataclasses.is_dataclass(c) and c.__module__ == model.__name__]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_value_of_the_model_is_frozen(cls):
    assert cls.__dataclass_params__.frozen
