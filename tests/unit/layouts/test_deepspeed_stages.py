"""How a pipeline's layers are divided: by what the source tells, and by DeepSpeed's own methods."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.write.grid import Grid, world_mesh
from ckpttools.layouts.deepspeed.write.stages import balanced_bounds, held_at, uniform_bounds
from ckpttools.model import Mesh

SIZES = {"tied_modules.embed.w": 12, **{f"{n}.block.w": 30 for n in (1, 2, 3, 4)}, "5.norm.w": 4}
LAYERS = {0: "tied_modules.embed.", 1: "1.", 2: "2.", 3: "3.", 4: "4.", 5: "5."}
STAGES = [["tied_modules.embed.w", "1.block.w", "2.block.w"], ["tied_modules.embed.w", "3.block.w", "4.block.w", "5.norm.w"]]


def stages(pp: int, *, source: list[list[str]] = STAGES, layers: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    pipeline = {"layers": LAYERS, "stages": source}
    held = held_at(SIZES, pipeline, list(SIZES), Grid(pp=pp), layers)
    return {name: dict(places)["pp"] for name, places in held.items()}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_balanced_stages_follow_one_another_and_hold_every_layer(weights, number):
    bounds = balanced_bounds(weights, number)
    assert (0, len(weights), number + 1, sorted(bounds)) == (bounds[0], bounds[-1], len(bounds), bounds)


def test_balanced_stages_weigh_alike():
    assert [0, 1, 3, 4] == balanced_bounds([10, 5, 5, 10], 3)


def test_uniform_stages_have_one_layer_more_in_front():
    assert [0, 3, 5, 7] == uniform_bounds(7, 3)


def test_same_number_of_stages_is_divided_as_the_source_is():
    found = stages(2)
    assert ((0, 1), (0,), (1,)) == (found["tied_modules.embed.w"], found["2.block.w"], found["3.block.w"])


def test_other_number_of_stages_is_told_where_the_methods_that_fit_agree():
    found = stages(4)
    assert [(0, 3), (0,), (1,), (2,), (3,), (3,)] == [found[n] for n in SIZES]


def test_division_by_none_of_the_methods_tells_nothing_of_another():
    odd = [["tied_modules.embed.w", "1.block.w"], ["tied_modules.embed.w", *list(SIZES)[2:]]]
    with pytest.raises(ConversionError, match="none of DeepSpeed's methods"):
        stages(3, source=odd)


def test_layers_that_a_user_gives_count_before_all():
    found = stages(2, layers=(2, 4))
    assert ((0,), (1,), (0, 1)) == (found["1.block.w"], found["2.block.w"], found["tied_modules.embed.w"])


@pytest.mark.parametrize(
    ("given_", "world"), [("dp=4,ep=2", "dp=2,ep=2"), ("fsdp=3", "dp=3"), ("tp=2", "tp=2"), ("pp=2,dp=2,fsdp=2", "dp=4,pp=2")]
)
def test_sizes_of_the_world_multiply_to_its_ranks(given_, world):
    assert dict(Mesh.parse(world).axes) == dict(world_mesh(Mesh.parse(given_)).axes)
