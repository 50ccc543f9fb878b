"""Legacy Megatron files from any mesh to any other: each rank's file is what a rank of that mesh would have saved itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpttools.errors import ConversionError, UsageError
from ckpttools.model import Mesh
from ckpttools.operations.place import Placing
from ckpttools.operations.reshard import reshard
from ckpttools.operations.select import Choice
from ckpttools.operations.targets import Details
from ckpttools.operations.validate import validate
from tests.fixture_cases import FIXTURES
from tests.layouts.megatron_ranks import Model, Ranks
from tests.layouts.test_megatron_legacy import stacked, values


def lay_out(source: Path, destination: Path, mesh: str, *, virtual_stages: int = 1, layers: tuple[int, ...] = ()) -> Path:
    reshard(
        str(source),
        str(destination),
        target="megatron-legacy",
        mesh=Mesh.parse(mesh),
        placing=Placing(stage_layers=layers),
        details=Details(virtual_stages=virtual_stages),
        is_dropping=True,
    )
    return destination


def loaded(path: Path) -> dict[str, object]:
    return {p.relative_to(path).as_posix(): torch.load(p, weights_only=False) for p in sorted(path.rglob("*.pt"))}


def same(one: object, other: object) -> bool:
    """Whether two values are equal, tensors by their bytes; NaN in a gap stands for anything."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and bool(((one == other) | one.isnan() | other.isnan()).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return list(map(str, one)) == list(map(str, other)) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


MOVES = [
    pytest.param(Model(), Ranks(tp=2, pp=2), Ranks(), id="to one rank"),
    pytest.param(Model(), Ranks(), Ranks(tp=2, pp=2), id="from one rank"),
    pytest.param(Model(), Ranks(tp=2, pp=2), Ranks(tp=4), id="to more ranks than query groups"),
    pytest.param(Model(layers=8), Ranks(tp=2, pp=2), Ranks(pp=2, vpp=2), id="to virtual stages"),
    pytest.param(Model(layers=8), Ranks(pp=2, vpp=4), Ranks(tp=2, pp=4), id="from virtual stages"),
    pytest.param(Model(is_tied=True, has_bias=True, is_gated=False), Ranks(tp=2), Ranks(pp=4), id="tied to stages"),
    pytest.param(Model(is_tied=True, has_bias=True), Ranks(pp=4), Ranks(tp=2), id="tied from stages"),
    pytest.param(Model(is_tied=True, layers=8), Ranks(pp=2), Ranks(pp=2, vpp=2), id="tied to virtual stages"),
    pytest.param(Model(has_bias=True), Ranks(tp=2, is_local=True), Ranks(pp=2, is_local=True), id="norms of their own"),
    pytest.param(Model(experts=4), Ranks(ep=2), Ranks(tp=2, ep=4), id="experts"),
    pytest.param(Model(experts=4), Ranks(ep=4), Ranks(tp=2, pp=2), id="experts to one rank"),
    pytest.param(
        Model(experts=4), Ranks(tp=2, experts="numbered"), Ranks(ep=2, pp=2, experts="numbered"), id="experts numbered at the end"
    ),
]


IN_ONE_MATRIX = [
    pytest.param(
        Model(experts=4), Ranks(tp=2, experts="grouped"), Ranks(ep=2, pp=2, experts="grouped"), id="experts in one matrix"
    ),
    pytest.param(
        Model(experts=4, is_gated=False),
        Ranks(ep=4, experts="grouped"),
        Ranks(tp=4, experts="grouped"),
        id="ungated",
    ),
]
"""Experts whose optimizer cannot have a count for each."""
EVERY = [
    pytest.param(*move.values, optimizer, id=f"{move.id}-{optimizer}")
    for move in MOVES
    for optimizer in ("", "positions", "buffers")
]
EVERY += [
    pytest.param(*move.values, optimizer, id=f"{move.id}-{optimizer}") for move in IN_ONE_MATRIX for optimizer in ("", "buffers")
]


@pytest.mark.parametrize(("model", "source", "target", "optimizer"), EVERY)
class TestMoves:
    def test_each_file_is_what_the_rank_would_have_saved(self, model, source, target, optimizer, tmp_path):
        source, target = (Ranks(**(vars(r) | {"optimizer": optimizer})) for r in (source, target))
        source.write(model, tmp_path / "from")
        wanted = loaded(target.write(model, tmp_path / "wanted"))
        found = loaded(lay_out(tmp_path / "from", tmp_path / "to", _mesh(target), virtual_stages=target.vpp))
        assert list(wanted) == list(found)
        for path, expected in wanted.items():
            if path.endswith("model_optim_rng.pt"):
                args = vars(expected["args"])
                changed = {k: v for k, v in vars(found[path]["args"]).items() if args.get(k, v) != v}
                assert set(changed) <= {"data_parallel_size"}
                del expected["rng_state"], expected["args"], found[path]["args"]
                expected, found[path] = dict(sorted(expected.items())), dict(sorted(found[path].items()))
            assert same(expected, found[path]), path

    def test_it_comes_back(self, model, source, target, optimizer, tmp_path):
        source, target = (Ranks(**(vars(r) | {"optimizer": optimizer})) for r in (source, target))
        whole = values(source.write(model, tmp_path / "from"))
        lay_out(tmp_path / "from", tmp_path / "to", _mesh(target), virtual_stages=target.vpp)
        lay_out(tmp_path / "to", tmp_path / "back", _mesh(source), virtual_stages=source.vpp)
        assert whole == values(tmp_path / "to") == values(tmp_path / "back")
        assert "ok" == validate(str(tmp_path / "back")).verdict


def _mesh(ranks: Ranks) -> str:
    axes = (("pp", ranks.pp), ("ep", ranks.ep), ("tp", ranks.tp))
    return ",".join(f"{axis}={size}" for axis, size in axes if size > 1 or axis == "tp")


@pytest.mark.parametrize("mesh", ["tp=1", "tp=4", "pp=4", "tp=2,pp=2"])
@pytest.mark.parametrize("name", ["legacy_tp2_pp2_mcore", "legacy_tp2_distopt", "legacy_lm_tp2", "legacy_lm_tp2_pp2_gqa"])
def test_fixtures_go_to_other_meshes(name, mesh, tmp_path):
    source = FIXTURES / "megatron" / name / "ckpt/iter_0000100"
    if (name == "legacy_lm_tp2_pp2_gqa" and mesh == "tp=4") or (
        mesh == "pp=4" and name in ("legacy_lm_tp2", "legacy_tp2_distopt")
    ):
        with pytest.raises(UsageError, match="does not fit"):
            lay_out(source, tmp_path / "to", mesh)
        return
    assert values(source) == values(lay_out(source, tmp_path / "to", mesh))


class TestRefusals:
    def test_random_states_are_not_given_to_other_ranks_in_silence(self, tmp_path):
        Ranks(tp=2).write(Model(), tmp_path / "from")
        with pytest.raises(ConversionError) as refused:
            reshard(str(tmp_path / "from"), str(tmp_path / "to"), target="megatron-legacy", mesh=Mesh.parse("tp=1"))
        assert "rng_state.mp_rank_00" in str(refused.value.found)
        assert not (tmp_path / "to").exists()

    @pytest.mark.parametrize(
        ("model", "mesh", "said"),
        [
            (Model(), "tp=8", "4 attention heads"),
            (Model(vocab=50), "tp=4", "50 "),
            (Model(layers=2), "pp=3", "at most 2"),
            (Model(experts=4), "ep=3", "4 experts"),
        ],
    )
    def test_what_does_not_fit_is_told_with_its_numbers(self, tmp_path, model, mesh, said):
        Ranks().write(model, tmp_path / "from")
        with pytest.raises((UsageError, ConversionError), match=said):
            lay_out(tmp_path / "from", tmp_path / "to", mesh)

    def test_stages_of_lengths_that_no_argument_describes(self, tmp_path):
        Ranks().write(Model(layers=6), tmp_path / "from")
        with pytest.raises(ConversionError, match="6 layers cannot be divided evenly among 4 stages"):
            lay_out(tmp_path / "from", tmp_path / "to", "pp=4", layers=(1, 1, 3, 1))

    def test_a_longer_first_stage_is_in_the_arguments(self, tmp_path):
        Ranks().write(Model(layers=5), tmp_path / "from")
        lay_out(tmp_path / "from", tmp_path / "to", "pp=3", layers=(3, 1, 1))
        args = loaded(tmp_path / "to")["mp_rank_00_001/model_optim_rng.pt"]["args"]
        assert (3, 1) == (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
        assert "ok" == validate(str(tmp_path / "to")).verdict

    def test_virtual_stages_that_the_layers_do_not_fill(self, tmp_path):
        Ranks().write(Model(layers=6), tmp_path / "from")
        with pytest.raises(ConversionError, match="6 layers cannot be divided evenly among 2 stages of 2 chunks"):
            lay_out(tmp_path / "from", tmp_path / "to", "pp=2", virtual_stages=2)

    def test_experts_in_one_matrix_have_no_place_for_a_number_each(self, tmp_path):
        Ranks(experts="grouped", optimizer="positions").write(Model(experts=4), tmp_path / "from")
        with pytest.raises(ConversionError, match=r"one number in the place of 2: optimizer.state.*.step"):
            lay_out(tmp_path / "from", tmp_path / "to", "ep=2")

    def test_experts_in_one_matrix_have_no_place_for_a_bias(self, tmp_path):
        ranks = Ranks(overrides={"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True})
        model = Model(experts=2)
        model.tensors["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.bias"] = torch.ones(16)
        ranks.write(model, tmp_path / "from")
        with pytest.raises(ConversionError, match=r"no place for .*\.local_experts\.0\.linear_fc2\.bias"):
            lay_out(tmp_path / "from", tmp_path / "to", "tp=2")

    def test_experts_in_one_matrix_are_turned_up_to_a_limit(self, tmp_path, monkeypatch):
        source = Ranks(experts="grouped", optimizer="buffers").write(Model(experts=2), tmp_path / "from")
        monkeypatch.setattr("ckpttools.layouts.megatron_legacy.experts.MAX_COLUMNS", 1000)
        with pytest.raises(ConversionError, match="more than 1000 columns") as refused:
            lay_out(source, tmp_path / "to", "tp=2")
        assert "megatron-dist" in refused.value.hints[0]
        assert not (tmp_path / "to").exists()

    def test_rows_of_everything_have_no_place(self, tmp_path):
        Ranks().write(Model(), tmp_path / "from")
        with pytest.raises(ConversionError, match="no axis fsdp"):
            lay_out(tmp_path / "from", tmp_path / "to", "fsdp=2")

    def test_names_of_other_models(self, tmp_path):
        torch.save({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, tmp_path / "model.pt")
        with pytest.raises(ConversionError, match="no tensor has a Megatron name"):
            lay_out(tmp_path / "model.pt", tmp_path / "to", "tp=1")

    def test_virtual_stages_of_another_target(self, tmp_path):
        Ranks().write(Model(), tmp_path / "from")
        with pytest.raises(UsageError, match="no virtual stages"):
            reshard(
                str(tmp_path / "from"),
                str(tmp_path / "to"),
                target="dcp",
                mesh=Mesh.parse("pp=2"),
                details=Details(virtual_stages=2),
            )


SHARDED = ("tdist_tp2_model_only", "tdist_tp2_pp2_two_iters", "tdist_pp2_tied_gelu_bias", "tdist_ep2_moe")


class TestFromSharded:
    @pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "pp=2"])
    @pytest.mark.parametrize("name", SHARDED)
    def test_stacked_layers_and_experts_are_taken_apart(self, name, mesh, tmp_path):
        source = FIXTURES / "megatron" / name / "ckpt/iter_0000010"
        whole = {n: v for n, v in values(source).items() if n.startswith(("decoder.", "embedding.", "output_layer."))}
        found = values(lay_out(source, tmp_path / "to", mesh))
        assert whole == {n: found.get(n) or stacked(n, found) for n in whole}
        assert "ok" == validate(str(tmp_path / "to")).verdict

    def test_experts_go_to_their_ranks(self, tmp_path):
        source = FIXTURES / "megatron/tdist_ep2_moe/ckpt/iter_0000010"
        name = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
        assert values(source)[name] == stacked(name, values(lay_out(source, tmp_path / "to", "tp=2,ep=4")))

    def test_arguments_say_the_new_format(self, tmp_path):
        source = FIXTURES / "megatron/tdist_tp2_model_only/ckpt/iter_0000010"
        args = loaded(lay_out(source, tmp_path / "to", "tp=1"))["mp_rank_00/model_optim_rng.pt"]["args"]
        assert (1, "torch") == (args.tensor_model_parallel_size, args.ckpt_format)


def test_experts_from_modules_of_their_own_go_into_one_matrix_where_the_arguments_say_so(tmp_path):
    model = Model(experts=4)
    plain = Ranks(tp=2, overrides={"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True})
    source = plain.write(model, tmp_path / "from")
    found = loaded(lay_out(source, tmp_path / "to", "ep=2,tp=2"))
    wanted = loaded(Ranks(tp=2, ep=2, experts="grouped").write(model, tmp_path / "wanted"))
    assert all(same(wanted[path]["model"], found[path]["model"]) for path in wanted)
    assert values(source) == values(tmp_path / "to")


class TestTiedEmbeddingsWithTheWeightsAlone:
    """The last stage holds a copy of the embedding under the head's name; the arguments say which of the two it is."""

    def lay_out(self, source: Path, destination: Path, mesh: str, exclude: tuple[str, ...] = ()) -> dict[str, object]:
        choice = Choice(is_weights_only=True, exclude=exclude)
        reshard(str(source), str(destination), target="megatron-legacy", mesh=Mesh.parse(mesh), choice=choice)
        return loaded(destination)

    @pytest.mark.parametrize("optimizer", ["", "positions", "buffers"])
    def test_the_arguments_go_along(self, optimizer, tmp_path):
        source = Ranks(pp=2, optimizer=optimizer).write(Model(is_tied=True), tmp_path / "from")
        files = self.lay_out(source, tmp_path / "to", "tp=2,pp=4")
        assert {"args", "checkpoint_version", "model"} == set(files["mp_rank_01_003/model_optim_rng.pt"])
        args = files["mp_rank_01_003/model_optim_rng.pt"]["args"]
        assert (4, 16, False, 2, 4) == (
            args.num_layers,
            args.hidden_size,
            args.untie_embeddings_and_output_weights,
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
        )
        copy = files["mp_rank_01_003/model_optim_rng.pt"]["model"]["output_layer.weight"]
        assert torch.equal(copy, files["mp_rank_01_000/model_optim_rng.pt"]["model"]["embedding.word_embeddings.weight"])
        assert "ok" == validate(str(tmp_path / "to")).verdict

    def test_without_arguments_the_new_ones_say_that_it_is_tied(self, tmp_path):
        source = Ranks(tp=2).write(Model(is_tied=True), tmp_path / "from")
        files = self.lay_out(source, tmp_path / "to", "pp=2", exclude=("args",))
        assert files["mp_rank_00_001/model_optim_rng.pt"]["args"].untie_embeddings_and_output_weights is False
        assert "ok" == validate(str(tmp_path / "to")).verdict

    def test_a_body_without_a_head_that_is_not_tied_gets_none(self, tmp_path):
        source = Ranks(tp=2).write(Model(), tmp_path / "from")
        files = self.lay_out(source, tmp_path / "to", "pp=2", exclude=("output_layer.weight",))
        last = files["mp_rank_00_001/model_optim_rng.pt"]
        assert last["args"].untie_embeddings_and_output_weights is True
        assert "output_layer.weight" not in last["model"]
        assert "ok" == validate(str(tmp_path / "to")).verdict
