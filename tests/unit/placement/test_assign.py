"""Where tensors go: the cuts of each axis, what follows what, what is refused, and that ranks tile each tensor."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.errors import UsageError
from ckpttools.geometry import cover
from ckpttools.layouts import open_snapshot
from ckpttools.model import Box, Mesh, Path, TensorSpec
from ckpttools.placement.assign import Assignment, TensorPlace, place, require_fit
from ckpttools.placement.counts import Counts
from ckpttools.placement.local import Cut, Placement, held_boxes
from ckpttools.placement.rule_files import built_in, choose, parse_rules
from tests.fixture_cases import FIXTURES


def tensor(name: str, *shape: int, dtype: str = "float32", family: str = "model", path: Path = ()) -> TensorPlace:
    return TensorSpec(name, parse_dtype(dtype), shape), path or tuple(name.split(".")), family


def llama(layers: int = 2, hidden: int = 32, kv: int = 16, ffn: int = 64, vocab: int = 96) -> list[TensorPlace]:
    found = [tensor("model.embed_tokens.weight", vocab, hidden)]
    for i in range(layers):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,),
        }.items():  # fmt: skip
            found.append(tensor(f"model.layers.{i}.{name}.weight", *shape))
    return [*found, tensor("model.norm.weight", hidden), tensor("lm_head.weight", vocab, hidden)]


def placed(assignment: Assignment, name: str) -> Placement:
    return next(t.placement for t in assignment.tensors if t.spec.name == name)


def reason(assignment: Assignment, name: str) -> str:
    return next(a.reason for a in assignment.assigned if a.tensor.spec.name == name)


def on(mesh: str, tensors: list[TensorPlace], rules: str | None = "llama", **options: object) -> Assignment:
    return place(tensors, Mesh.parse(mesh), built_in(rules) if rules else None, **options)  # type: ignore[arg-type]  # tests


TP, ROWS = Cut("tp", 0), Cut("fsdp", 0)


class TestAxes:
    def test_fsdp_cuts_rows_of_what_has_any(self) -> None:
        found = on("fsdp=4", [tensor("w", 3, 5), tensor("b", 7), tensor("scale")], None)
        assert found.problems == ()
        assert [t.placement.cuts for t in found.tensors] == [(ROWS,), (ROWS,), ()]

    def test_dp_replicates(self) -> None:
        found = on("dp=2,fsdp=2", [tensor("w", 4)], None)
        assert held_boxes(found.tensors, found.mesh)["w"] == {Box((0,), (2,)): [0, 2], Box((2,), (2,)): [1, 3]}

    def test_tensor_parallel_cuts_before_fsdp_does(self) -> None:
        found = on("tp=2,fsdp=2", llama())
        assert found.problems == ()
        assert str(found.mesh) == "fsdp=2,tp=2"
        assert placed(found, "model.layers.1.self_attn.q_proj.weight").cuts == (TP, ROWS)
        assert placed(found, "model.layers.1.self_attn.o_proj.weight").cuts == (Cut("tp", 1), ROWS)
        assert placed(found, "model.norm.weight").cuts == (ROWS,)

    def test_reasons_name_the_rule_or_say_that_there_is_none(self) -> None:
        found = on("tp=2,fsdp=2", llama())
        assert reason(found, "model.layers.1.self_attn.q_proj.weight") == "tp dim 0 by rule 1 of llama; fsdp dim 0"
        assert reason(found, "model.norm.weight") == "no rule: replicated on tp; fsdp dim 0"

    @pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "bn.running_mean", "freqs_cis", "bn.num_batches_tracked"])
    def test_buffers_are_whole_on_every_rank(self, name: str) -> None:
        found = on("fsdp=2", [tensor(f"model.{name}", 8)], None)
        assert placed(found, f"model.{name}") == Placement()
        assert reason(found, f"model.{name}") == "`replicate` of buffers: replicated"

    @pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float4_e2m1fn"])
    def test_what_is_no_parameter_is_whole_on_every_rank(self, dtype: str) -> None:
        found = on("fsdp=2", [tensor("ids", 8, dtype=dtype)], None)
        assert placed(found, "ids") == Placement()

    def test_stacked_experts_are_cut_by_expert_and_inside(self) -> None:
        experts = [tensor("model.layers.0.mlp.experts.gate_up_proj", 4, 12, 8), tensor("model.layers.0.mlp.gate.weight", 4, 8)]
        found = on("ep=2,tp=2", experts, "mixtral")
        assert found.problems == ()
        assert found.tensors[0].placement.cuts == (Cut("ep", 0), Cut("tp", 1, (6, 6)))
        assert found.tensors[1].placement.cuts == ()

    def test_experts_with_names_of_their_own_are_held_by_one_rank(self) -> None:
        experts = [tensor(f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight", 8, 8) for e in range(4)]
        found = on("ep=2,fsdp=2", experts, "mixtral")
        assert found.problems == ()
        assert [t.placement.held_at for t in found.tensors] == [(("ep", (e // 2,)),) for e in range(4)]

    def test_layers_go_to_stages_the_first_of_which_have_one_more(self) -> None:
        found = on("pp=3", llama(layers=7))
        stages = [placed(found, f"model.layers.{i}.mlp.up_proj.weight").held_at[0][1][0] for i in range(7)]
        assert stages == [0, 0, 0, 1, 1, 2, 2]
        assert placed(found, "model.embed_tokens.weight").held_at == (("pp", (0,)),)
        assert placed(found, "lm_head.weight").held_at == placed(found, "model.norm.weight").held_at == (("pp", (2,)),)

    def test_layers_go_to_stages_as_a_list_says(self) -> None:
        found = on("pp=3", llama(layers=4), layers_per_stage=(1, 1, 2))
        assert found.problems == ()
        assert [placed(found, f"model.layers.{i}.mlp.up_proj.weight").held_at[0][1][0] for i in range(4)] == [0, 1, 2, 2]

    def test_layers_stacked_in_one_tensor_are_cut_for_stages(self) -> None:
        stacked = [
            tensor("embedding.word_embeddings.weight", 8, 4),
            tensor("decoder.layers.self_attention.linear_qkv.weight", 6, 8, 4),
            tensor("decoder.final_layernorm.weight", 4),
        ]
        found = on("pp=2,tp=2", stacked, "megatron")
        assert found.problems == ()
        assert placed(found, "decoder.layers.self_attention.linear_qkv.weight") == Placement((Cut("pp", 0), Cut("tp", 1)))
        assert placed(found, "decoder.final_layernorm.weight").held_at == (("pp", (1,)),)
        (problem,) = on("pp=4,tp=2", stacked, "megatron").problems
        assert problem.message == "6 layers, which are stacked in one tensor, cannot be divided evenly among pp=4"

    def test_an_embedding_that_is_the_head_too_is_at_both_ends(self) -> None:
        found = on("pp=2", [t for t in llama() if t[0].name != "lm_head.weight"])
        assert placed(found, "model.embed_tokens.weight").held_at == (("pp", (0, 1)),)


class TestState:
    def test_state_of_a_parameter_goes_with_it(self) -> None:
        state = tensor("optimizer.state.layers.0.mlp.down_proj.weight.exp_avg", 32, 64, family="optimizer")
        found = on("tp=2,fsdp=2", [*llama(), state])
        assert placed(found, state[0].name) == placed(found, "model.layers.0.mlp.down_proj.weight")
        assert reason(found, state[0].name).startswith("as `model.layers.0.mlp.down_proj.weight`: tp dim 1")

    def test_state_of_another_shape_is_cut_by_fsdp_alone(self) -> None:
        state = tensor("optimizer.state.model.layers.0.mlp.down_proj.weight.exp_avg_sq_row", 32, family="optimizer")
        step = tensor("optimizer.state.model.layers.0.mlp.down_proj.weight.step", 1, family="optimizer")
        found = on("pp=2,tp=2,fsdp=2", [*llama(), state, step])
        assert placed(found, state[0].name) == Placement((ROWS,), (("pp", (0,)),))
        assert placed(found, step[0].name).cuts == ()

    def test_numbered_state_goes_with_the_parameter_of_that_number(self) -> None:
        model = llama()
        state = [
            tensor(f"optimizer.state.{i}.exp_avg", *spec.shape, family="optimizer", path=("optimizer", "state", i, "exp_avg"))
            for i, (spec, _, _) in enumerate(model)
        ]
        found = on("tp=2,fsdp=2", [*model, *state])
        half = len(model)
        assert [t.placement for t in found.tensors[:half]] == [t.placement for t in found.tensors[half:]]

    def test_numbered_state_of_two_groups_has_the_matrices_first(self) -> None:
        model = llama()
        order = sorted(model, key=lambda t: len(t[0].shape) < 2)
        state = [
            tensor(f"optimizer.state.{i}.exp_avg", *spec.shape, family="optimizer", path=("optimizer", "state", i, "exp_avg"))
            for i, (spec, _, _) in enumerate(order)
        ]
        found = on("tp=2,fsdp=2", [*model, *state])
        for (spec, _, _), (moment, _, _) in zip(order, state, strict=True):
            assert placed(found, moment.name) == placed(found, spec.name)

    def test_numbered_state_beside_sorted_names_is_in_the_order_of_the_rules(self) -> None:
        model = llama(kv=8, ffn=48)
        state = [
            tensor(f"optimizer.state.{i}.exp_avg", *spec.shape, family="optimizer", path=("optimizer", "state", i, "exp_avg"))
            for i, (spec, _, _) in enumerate(model)
        ]
        found = on("tp=2,fsdp=2", [*sorted(model, key=lambda t: t[0].name), *state])
        for (spec, _, _), (moment, _, _) in zip(model, state, strict=True):
            assert placed(found, moment.name) == placed(found, spec.name)

    def test_numbered_state_whose_shapes_disagree_is_cut_by_fsdp_alone(self) -> None:
        state = tensor("optimizer.state.1.exp_avg", 5, 5, family="optimizer", path=("optimizer", "state", 1, "exp_avg"))
        found = on("tp=2,fsdp=2", [*llama(), state])
        assert placed(found, state[0].name).cuts == (ROWS,)

    def test_numbered_factors_of_a_moment_agree_with_their_parameter(self) -> None:
        model = llama()
        state = []
        for i, (spec, _, _) in enumerate(model):
            shapes = {"row": spec.shape[:-1], "col": (1, *spec.shape[1:]), "step": ()}
            state += [
                tensor(f"optimizer.state.{i}.{k}", *v, family="optimizer", path=("optimizer", "state", i, k))
                for k, v in shapes.items()
            ]
        found = on("tp=2,pp=2", [*model, *state])
        assert reason(found, "optimizer.state.1.row").startswith("of `model.layers.0.self_attn.q_proj.weight`, in another shape")

    def test_state_without_a_model_is_placed_by_the_name_in_it(self) -> None:
        state = tensor("optimizer.state.layers.0.mlp.down_proj.weight.exp_avg", 32, 64, family="optimizer")
        assert placed(on("tp=2,fsdp=2", [state]), state[0].name).cuts == (Cut("tp", 1), ROWS)

    def test_state_without_a_model_that_has_the_word_in_front_is_placed_by_the_rest(self) -> None:
        state = tensor("optimizer.state.exp_avg.layers.0.mlp.down_proj.weight", 32, 64, family="optimizer")
        assert placed(on("tp=2,fsdp=2", [state]), state[0].name).cuts == (Cut("tp", 1), ROWS)

    def test_factors_without_a_model_are_cut_by_fsdp_alone(self) -> None:
        state = tensor("optimizer.state.layers.0.mlp.down_proj.weight.exp_avg_sq_row", 32, family="optimizer")
        other = tensor("optimizer.state.layers.0.mlp.down_proj.weight.exp_avg", 32, 64, family="optimizer")
        found = on("tp=2,fsdp=2", [state, other])
        assert found.problems == ()
        assert placed(found, state[0].name).cuts == (ROWS,)

    def test_state_of_others_is_whole_on_every_rank(self) -> None:
        found = on("fsdp=2", [tensor("extra_state.losses", 8, family="extra_state")], None)
        assert found.tensors[0].placement == Placement()


def test_names_beyond_reason_take_no_time_beyond_it() -> None:
    long = "layers.1." * 30_000
    names = [long + "self_attn.q_proj.weight", "_orig_mod." * 30_000 + "w", "a" * 300_000, "." * 300_000]
    tensors = [tensor(name, 4, 4) for name in names]
    tensors += [tensor(f"optimizer.state.{name}.exp_avg", 4, 4, family="optimizer") for name in names]
    found = on("tp=2,fsdp=2", tensors)
    assert found.problems == ()
    assert found.tensors[0].placement.cuts == found.tensors[4].placement.cuts == (TP, ROWS)


class TestRefusals:
    def test_heads_that_cannot_be_divided_are_refused_with_the_nearest_mesh(self) -> None:
        found = on("tp=4,fsdp=2", llama(), counts=Counts(heads=4, kv_heads=2))
        assert [p.message for p in found.problems] == [
            "2 key/value heads cannot be divided evenly among tp=4, and each rank must have whole key/value heads of its own: "
            "copies of a head are not written"
        ]
        assert "model.layers.0.self_attn.k_proj.weight" in found.problems[0].tensors
        assert str(found.nearest) == "fsdp=4,tp=2"
        with pytest.raises(UsageError, match="2 key/value heads") as told:
            require_fit(found)
        assert told.value.hints == ("the nearest mesh that fits: --mesh fsdp=4,tp=2",)

    def test_all_that_does_not_fit_is_told_at_once(self) -> None:
        found = on("pp=5,tp=3", llama(), is_even=True)
        assert len(found.problems) > 3
        assert any("pp=5 is more than there are layers" in p.message for p in found.problems)

    def test_without_counts_rows_of_heads_must_be_even(self) -> None:
        assert any("32 elements of dimension 0" in p.message for p in on("tp=3", llama()).problems)

    def test_uneven_shares_are_for_targets_that_can_hold_them(self) -> None:
        tensors = llama(ffn=66)
        assert on("tp=4", tensors).problems == ()
        assert [p.message for p in on("tp=4", tensors, is_even=True).problems] == [
            "66 elements of dimension 0 cannot be divided evenly among tp=4",
            "66 elements of dimension 1 cannot be divided evenly among tp=4",
        ]

    def test_fused_rows_need_counts(self) -> None:
        tensors = [tensor("model.layers.0.self_attn.qkv_proj.weight", 128, 64)]
        found = on("tp=2", tensors)
        assert found.problems[0].message == (
            "rule 3 of llama needs the number of attention heads and key/value heads to cut fused rows"
        )
        with pytest.raises(UsageError) as told:
            require_fit(found)
        assert told.value.hints == ("give the model's config: --model-config FILE",)
        assert on("tp=1,fsdp=2", tensors).problems == ()
        found = on("tp=2", tensors, counts=Counts(heads=4, kv_heads=2))
        assert found.tensors[0].placement.cuts == (Cut("tp", 0, (64, 32, 32)),)

    def test_a_config_of_another_model_is_told(self) -> None:
        found = on("tp=2", llama(), counts=Counts(heads=5, kv_heads=5))
        assert any("no multiple of the model config's attention heads" in p.message for p in found.problems)

    @pytest.mark.parametrize(
        ("mesh", "said"),
        [
            ("cp=2", "unknown mesh axis `cp`; the axes are pp, dp, fsdp, ep, tp; perhaps you mean --mesh dp=2"),
            ("model=2,dp_shard=4", "unknown mesh axis `model`, `dp_shard`; .*; perhaps you mean --mesh fsdp=4,tp=2"),
            ("depth=2", "unknown mesh axis `depth`; the axes are pp, dp, fsdp, ep, tp$"),
        ],
    )
    def test_unknown_axes_are_refused_with_what_is_likely_meant(self, mesh: str, said: str) -> None:
        (problem,) = on(mesh, llama()).problems
        assert re.match(said, problem.message)

    def test_layers_and_experts_of_an_unknown_model_are_divided_all_the_same(self) -> None:
        tensors = [tensor(f"blocks.{i}.moe.experts.deepspeed_experts.{e}.0.weight", 4, 4) for i in (2, 3) for e in range(2)]
        found = on("pp=2,ep=2", [*tensors, tensor("head.weight", 4, 4)], None)
        assert found.problems == ()
        assert [dict(t.placement.held_at) for t in found.tensors] == [
            *({"pp": (stage,), "ep": (e,)} for stage in (0, 1) for e in (0, 1)),
            {},
        ]

    @pytest.mark.parametrize("mesh", ["tp=2", "ep=2", "pp=2"])
    def test_an_axis_that_divides_nothing_is_refused(self, mesh: str) -> None:
        (problem,) = on(mesh, [tensor("w", 4, 4)], None).problems
        assert "no rule" in problem.message
        with pytest.raises(UsageError) as told:
            require_fit(on(mesh, [tensor("w", 4, 4)], None))
        assert any("--placements FILE" in hint for hint in told.value.hints)

    def test_a_dimension_that_is_not_there_is_refused(self) -> None:
        rules = parse_rules('[[rules]]\ntensors = ["w"]\naxis = "tp"\ndim = 2\n', "mine.toml")
        (problem, *_) = place([tensor("w", 4, 4)], Mesh.parse("tp=2"), rules).problems
        assert str(problem) == "rule 1 of mine.toml cuts dimension 2, which is not there (found 2 dimensions): `w`"

    def test_an_axis_of_one_rank_is_refused_nothing(self) -> None:
        rules = parse_rules('[[rules]]\ntensors = ["w"]\naxis = "tp"\ndim = 2\n', "mine.toml")
        found = place([tensor("w", 4, 4)], Mesh.parse("tp=1,fsdp=2"), rules)
        assert (found.problems, found.tensors[0].placement.cuts) == ((), (ROWS,))

    def test_what_shares_bytes_is_cut_by_no_rule(self) -> None:
        rules = parse_rules('[[rules]]\ntensors = ["*"]\naxis = "tp"\ndim = 0\n', "mine.toml")
        tensors = [tensor("a", 4, 4), tensor("b", 4, 4, dtype="float4_e2m1fn")]
        assert [t.placement.cuts for t in place(tensors, Mesh.parse("tp=2"), rules).tensors] == [(TP,), ()]

    def test_layers_per_stage_must_make_the_layers(self) -> None:
        (problem,) = on("pp=2", llama(), layers_per_stage=(1, 2)).problems
        assert str(problem) == "the layers per stage do not fit (expected 2 numbers that make 2 layers; found 2 that make 3)"

    def test_a_mesh_beyond_reason_is_refused_at_once(self) -> None:
        assert "too many ranks" in on(f"fsdp={10**30}", [tensor("w", 4)], None).problems[0].message


@pytest.mark.parametrize(
    ("case", "mesh"),
    [("dcp_tp2", "tp=2"), ("dcp_fsdp2_tp_2x2", "fsdp=2,tp=2"), ("dcp_fsdp2_w4_uneven", "fsdp=4"), ("dcp_ep2", "ep=2")],
)
def test_boxes_are_those_of_torch_for_the_same_mesh(case: str, mesh: str) -> None:
    checkpoint = open_snapshot(str(FIXTURES / "torch" / case / "ckpt")).checkpoint
    tensors = [(t.spec, t.path, t.family) for t in checkpoint.tensors]
    found = place(tensors, Mesh.parse(mesh), choose({t.name: t.spec.shape for t in checkpoint.tensors if t.family == "model"}))
    assert found.problems == ()
    boxes = held_boxes(found.tensors, found.mesh)
    for t in checkpoint.tensors:
        assert {box for box in boxes[t.name] if box.volume} == {piece.box for piece in t.pieces if piece.box.volume}, t.name


AXES = st.tuples(st.sampled_from(["tp", "fsdp", "dp", "pp"]), st.integers(1, 3))


@given(
    st.lists(AXES, max_size=4, unique_by=lambda axis: axis[0]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
)
def test_ranks_tile_every_tensor_of_a_mesh_that_is_let_pass(
    axes: list[tuple[str, int]], layers: int, width: int, ffn: int, is_even: bool
) -> None:
    def on_mesh(mesh: Mesh) -> Assignment:
        counts = Counts(heads=width, kv_heads=width)
        return place(llama(layers, width, width, ffn, 11), mesh, built_in("llama"), counts, is_even=is_even)

    found = on_mesh(Mesh(tuple(axes)))
    if found.problems:
        assert found.nearest is None or on_mesh(found.nearest).problems == ()
        return
    boxes = held_boxes(found.tensors, found.mesh)
    for t in found.tensors:
        assert cover(t.spec.shape, list(boxes[t.spec.name])).is_exact
        if is_even:
            shapes = {local.shape for rank in range(found.mesh.ranks) if (local := t.local(found.mesh, rank))}
            assert len(shapes) == 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_each_rank_has_the_rows_of_its_own_heads(ranks: int, groups: int, shared: int, head_dim: int, layers: int) -> None:
    kv_heads = ranks * groups
    heads = kv_heads * shared
    rows = (heads + 2 * kv_heads) * head_dim
    names = [f"model.layers.{i}.self_attn.qkv_proj.weight" for i in range(layers)]
    found = on(f"tp={ranks}", [tensor(name, rows, 3) for name in names], counts=Counts(heads, kv_heads), is_even=True)
    assert found.problems == ()
    for t in found.tensors:
        for rank in range(ranks):
            local = t.local(found.mesh, rank)
            assert local is not None
            held = [row for part in local.parts for row in range(part.box.offsets[0], part.box.stops[0])]
            expected, start = [], 0
            for count in (heads, kv_heads, kv_heads):
                share = count // ranks * head_dim
                expected += range(start + rank * share, start + (rank + 1) * share)
                start += count * head_dim
            assert held == expected


@given(
    groups=st.sampled_from([1, 2, 3]),
    shared=st.integers(1, 4),
    copies=st.integers(1, 4),
    fsdp=st.sampled_from([1, 2]),
    is_fused=st.booleans(),
)
def test_ranks_that_share_a_head_hold_equal_boxes_of_it_that_cover_it(
    groups: int, shared: int, copies: int, fsdp: int, is_fused: bool
) -> None:
    ranks, head = groups * copies, 4
    heads = ranks * shared
    counts = Counts(heads, groups)
    rows = {"q": heads * head, "k": groups * head, "v": groups * head}
    names = {f"model.layers.0.self_attn.{n}_proj.weight": count for n, count in rows.items()}
    names = {"model.layers.0.self_attn.qkv_proj.weight": sum(rows.values())} if is_fused else names
    tensors = [tensor(name, count, 3) for name, count in names.items()]
    found = on(f"tp={ranks},fsdp={fsdp}", tensors, counts=counts, is_even=True, copies_heads=True)
    assert found.problems == ()
    for placed_tensor in found.tensors:
        shapes = set()
        held: dict[Box, list[int]] = {}
        for rank in range(found.mesh.ranks):
            local = placed_tensor.local(found.mesh, rank)
            assert local is not None
            shapes.add(local.shape)
            for part in local.parts:
                held.setdefault(part.box, []).append(rank)
        assert len(shapes) == 1
        assert cover(placed_tensor.spec.shape, list(held)).is_exact


class TestGroups:
    """Rows of query, key and value that are grouped per key/value head."""

    NAME = "transformer.h.0.self_attention.query_key_value.weight"

    def rows(self, heads: int, groups: int, mesh: str, **options: object) -> list[list[int]] | str:
        """The rows of each rank, one row per head."""
        found = on(mesh, [tensor(self.NAME, heads + 2 * groups, 1)], "falcon", counts=Counts(heads, groups), **options)
        if found.problems:
            return str(found.problems[0])
        ranks = [found.tensors[0].local(found.mesh, rank) for rank in range(found.mesh.ranks)]
        return [
            [row for part in local.parts for row in range(part.box.offsets[0], part.box.stops[0])] for local in ranks if local
        ]

    def test_ranks_have_whole_groups(self) -> None:
        assert [[0, 1, 2, 3], [4, 5, 6, 7]] == self.rows(4, 2, "tp=2")

    def test_a_single_group_is_cut_by_its_sections(self) -> None:
        assert [[0, 1, 4, 5], [2, 3, 4, 5]] == self.rows(4, 1, "tp=2", copies_heads=True)

    def test_more_ranks_than_groups_are_refused(self) -> None:
        assert "2 key/value heads cannot be divided evenly among tp=4" in self.rows(8, 2, "tp=4", copies_heads=True)
        assert "1 key/value heads cannot be divided evenly among tp=2" in self.rows(4, 1, "tp=2")

    def test_a_count_that_is_not_known_is_asked_for(self) -> None:
        found = on("tp=2", [tensor(self.NAME, 8, 4)], "falcon")
        assert "rule 1 of falcon needs the number of key/value heads to cut rows that are grouped" in str(found.problems[0])

    def test_groups_without_sections_are_no_rule(self) -> None:
        text = '[[rules]]\ntensors = ["a"]\naxis = "tp"\ndim = 0\ngroups = "kv_heads"\n'
        with pytest.raises(UsageError, match="unknown `groups`"):
            parse_rules(text, "mine.toml")
