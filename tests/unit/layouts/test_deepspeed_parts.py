"""The arithmetic of DeepSpeed's layouts against torch's own: shards, sub-parameters, flat ranges, positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.experts import expert_counts, global_names
from ckpttools.layouts.deepspeed.names import parse_names
from ckpttools.layouts.deepspeed.parts import flat_pieces, place, whole_piece
from ckpttools.layouts.deepspeed.positions import split_layers
from ckpttools.layouts.deepspeed.tensor_parallel import Placement, Rules, find_placement, read_rules
from ckpttools.layouts.deepspeed.unflattened import Unflattened, name_positions
from ckpttools.model import Extent

FLOAT = parse_dtype("float32")


def assembled(placement: Placement, shards: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor, its boxes filled as the placement says from the shards' storage."""
    whole = torch.full(placement.shape, -1.0)
    for rank, shard in enumerate(shards):
        piece = whole_piece(tuple(shard.shape), Extent(str(rank), 0, shard.numel() * 4), rank)
        for part in place(piece, placement.dim, placement.cuts[rank], FLOAT):
            sizes = part.box.sizes
            strides = part.extent.strides or torch.empty(sizes).stride()
            values = shard.contiguous().view(-1).as_strided(sizes, strides, part.extent.offset // 4)
            whole[tuple(slice(o, o + n) for o, n in zip(part.box.offsets, sizes, strict=True))] = values
    return whole


def shards_of(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    start, found = 0, []
    for size in sizes:
        numel = torch.Size(size).numel()
        found.append(torch.arange(start, start + numel, dtype=torch.float32).view(size))
        start += numel
    return found


def rules(**patterns: list[str]) -> Rules:
    findings: list[Finding] = []
    found = read_rules({"universal_checkpoint_version": 0.2, **patterns}, "file", findings)
    assert findings == []
    return found


class TestTensorParallel:
    def test_shards_stand_side_by_side_along_dimension_0(self):
        shards = shards_of((2, 3), (4, 3), (1, 3))
        placement = find_placement("w", [tuple(s.shape) for s in shards], rules())
        assert torch.equal(torch.cat(shards), assembled(placement, shards))

    def test_row_parallel_shards_stand_side_by_side_along_dimension_1(self):
        shards = shards_of((3, 2), (3, 4))
        placement = find_placement(
            "a.dense.weight", [(3, 2), (3, 4)], rules(parameter_with_row_parallelism_patterns=[r".*dense\.w"])
        )
        assert torch.equal(torch.cat(shards, 1), assembled(placement, shards))

    def test_two_halves_are_put_together_half_by_half(self):
        shards = shards_of((4, 3), (4, 3))
        placement = find_placement("glu", [(4, 3), (4, 3)], rules(parameter_with_2_sub_params_cat_dim_0=["glu"]))
        halves = [torch.chunk(s, 2) for s in shards]
        assert torch.equal(torch.cat([h[0] for h in halves] + [h[1] for h in halves]), assembled(placement, shards))

    def test_sub_parameters_of_other_sizes_are_put_together_one_by_one(self):
        entry = {"patterns": ["qkv"], "shape": ((4, 2, 2), 5), "partition_dim": 0}
        shards = shards_of((4, 5), (4, 5))
        placement = find_placement("qkv", [(4, 5), (4, 5)], rules(parameter_with_sub_params=[entry]))
        parts = [torch.split(s, (2, 1, 1)) for s in shards]
        assert torch.equal(torch.cat([p[i] for i in range(3) for p in parts]), assembled(placement, shards))

    def test_sub_parameters_with_stated_widths_need_not_be_even(self):
        entry = {"patterns": ["qkv"], "shape": ((5, 3), 2), "partition_dim": 0}
        told = {"parameter_with_sub_params": [entry], "sub_param_shard_widths": {"qkv": [[3, 2], [1, 2]]}}
        shards = shards_of((4, 2), (4, 2))
        placement = find_placement("qkv", [(4, 2), (4, 2)], rules(**told))
        parts = [torch.split(shards[0], (3, 1)), torch.split(shards[1], (2, 2))]
        assert torch.equal(torch.cat([parts[0][0], parts[1][0], parts[0][1], parts[1][1]]), assembled(placement, shards))

    @pytest.mark.parametrize(
        ("name", "dim"),
        [
            ("3.self_attention.dense.weight", 1),
            ("3.mlp.dense_4h_to_h.weight", 1),
            ("3.self_attention.dense.bias", None),
            ("3.mlp.dense_4h_to_h.bias", None),
            ("3.input_layernorm.weight", None),
            ("tied_modules.embed.word_embeddings.norm.bias", None),
            ("7.weight", None),
            ("tied_modules.embed.word_embeddings.weight", 0),
            ("3.self_attention.query_key_value.bias", 0),
        ],
    )
    def test_names_of_bloom_are_known_without_rules(self, name, dim):
        placement = find_placement(name, [(4, 4), (4, 4)], Rules())
        assert (dim, False) == (placement.dim if placement.cuts else None, placement.is_guessed)

    def test_unknown_name_is_a_guess(self):
        assert find_placement("something.else", [(4, 4), (4, 4)], Rules()).is_guessed

    def test_shards_that_do_not_go_together_are_no_placement(self):
        assert isinstance(find_placement("w", [(2, 3), (2, 4)], rules()), str)

    @pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*x", "(" * 400, ".*.*.*.*.*.*.*.*x", "a" * 1000])
    def test_pattern_that_could_take_for_ever_is_refused(self, pattern):
        findings: list[Finding] = []
        read_rules({"tp_replicated_parameter_patterns": [pattern]}, "file", findings)
        assert len(findings) == 1


class TestFlatPieces:
    @given(st.lists(st.integers(1, 4), min_size=0, max_size=3), st.data())
    def test_they_hold_the_elements_of_the_range_in_order(self, shape, data):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        start = data.draw(st.integers(0, whole.numel()))
        stop = data.draw(st.integers(start, whole.numel()))
        pieces = flat_pieces(shape, start, stop, Extent("f", 100, 0), FLOAT, 0)
        values = [
            int(v)
            for p in pieces
            for v in whole[tuple(slice(o, o + n) for o, n in zip(p.box.offsets, p.box.sizes, strict=True))].reshape(-1)
        ]
        assert values == list(range(start, stop))
        assert [p.extent.offset for p in pieces] == [100 + 4 * sum(q.box.volume for q in pieces[:i]) for i in range(len(pieces))]


def unflattened(*groups: list[int]) -> Unflattened:
    return Unflattened("file", None, groups=list(groups), stated_names=[[] for _ in groups])


class TestPositions:
    MODEL = (("a", (2, 2)), ("b", (2,)), ("c", (3, 2)), ("d", (2,)))

    def test_groups_by_dimension_are_told_by_shapes(self):
        shapes = {0: [(2, 2)], 1: [(3, 2)], 2: [(2,)], 3: [(2,)]}
        assert name_positions(unflattened([0, 1], [2, 3]), shapes, self.MODEL) == {0: "a", 1: "c", 2: "b", 3: "d"}

    def test_frozen_parameter_is_in_no_group(self):
        assert name_positions(unflattened([0, 1]), {0: [(2, 2)], 1: [(3, 2)]}, self.MODEL) == {0: "a", 1: "c"}

    def test_position_that_fits_two_names_has_none(self):
        assert name_positions(unflattened([0, 1]), {0: [(2, 2)], 1: [(2,)]}, self.MODEL) == {0: "a"}

    def test_shapes_that_fit_no_order_name_nothing(self):
        assert name_positions(unflattened([0, 1]), {0: [(3, 2)], 1: [(2, 2)]}, self.MODEL) == {}

    def test_names_that_the_optimizer_states_are_taken(self):
        optimizer = unflattened([0, 1])
        optimizer.stated_names = [["d", "a"]]
        assert name_positions(optimizer, {}, self.MODEL) == {0: "d", 1: "a"}

    @given(st.lists(st.tuples(st.sampled_from([(1,), (2,), (3,)]), st.integers(-1, 2)), max_size=8))
    def test_what_is_named_is_never_wrong(self, params):
        model = [(f"p{i}", shape) for i, (shape, _) in enumerate(params)]
        groups: list[list[int]] = [[], [], []]
        shapes, truth, position = {}, {}, 0
        for g in range(3):
            for i, (shape, group) in enumerate(params):
                if group == g:
                    groups[g].append(position)
                    shapes[position], truth[position] = [shape], f"p{i}"
                    position += 1
        named = name_positions(unflattened(*groups), shapes, model)
        assert named.items() <= truth.items()


class TestLayers:
    def test_layers_are_split_by_the_parameters_of_each_stage(self):
        assert split_layers([1, 12, 12, 2], [13, 14]) == [(0, 2, False), (2, 4, False)]

    def test_stage_with_parameters_of_no_layer_has_the_tied_module(self):
        assert split_layers([1, 12, 12, 2], [13, 15]) == [(0, 2, True), (2, 4, True)]

    def test_numbers_that_fit_nothing_are_no_split(self):
        assert split_layers([1, 12, 12, 2], [5, 15]) is None


class TestNames:
    def test_ranks_are_numbers(self):
        found = parse_names(["t/zero_pp_rank_10_mp_rank_00_optim_states.pt", "t/zero_pp_rank_9_mp_rank_00_optim_states.pt"], "t")
        assert [9, 10] == sorted(dp for dp, _ in found.optimizer)

    def test_files_of_the_other_prefix_are_left_over(self):
        paths = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
        assert [paths[::-1]] == [list(pair) for pair in parse_names(paths, is_bf16=False).doubled]
        assert [paths] == [list(pair) for pair in parse_names(paths, is_bf16=True).doubled]

    def test_expert_numbers_are_made_global(self):
        names = [f"x.deepspeed_experts.{n}.w" for n in range(2)]
        found = global_names(names, 2, expert_counts(names))
        assert "x.deepspeed_experts.5.w" == found["x.deepspeed_experts.1.w"]

    def test_experts_of_a_layer_that_is_spread_over_groups_are_numbered_by_all_of_them(self):
        names = [f"x.deepspeed_experts.{n}.w" for n in range(3)]
        assert global_names(names[:1], 1, expert_counts(names)) == {names[0]: "x.deepspeed_experts.3.w"}
