"""What DeepSpeed's engine resumes from, written for other ranks along every axis: the same tensors, and back again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpttools.errors import CkpttoolsError
from ckpttools.layouts import open_snapshot
from ckpttools.model import Mesh
from ckpttools.operations.place import Placing
from ckpttools.operations.reshard import reshard
from ckpttools.operations.select import Choice
from ckpttools.operations.targets import Details
from ckpttools.operations.validate import validate
from tests.fixture_cases import FIXTURES


def tag(name: str) -> Path:
    """The only tag of a case."""
    return next(p for p in sorted((FIXTURES / "deepspeed" / name / "ckpt").iterdir()) if p.is_dir())


def names(directory: Path) -> set[str]:
    return {t.name for t in open_snapshot(str(directory)).checkpoint}


def resharded(source: Path, out: Path, *, to: str = "deepspeed", mesh: str = "dp=3", stage: int | None = None, **options) -> Path:
    reshard(str(source), str(out), target=to, mesh=Mesh.parse(mesh), details=Details(zero=stage), **options)
    return out


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same tensor in two snapshots; ranks may have copies, and steps, under more names."""
    return [f"{f.code} {f.where}" for f in validate(str(one), against=str(other), allow_missing=True).findings if f.is_error]


class TestDataParallel:
    @pytest.mark.parametrize(
        ("name", "stage", "ranks"),
        [
            ("zero1_bf16_w2", 1, 3),
            ("zero1_bf16_w2", 2, 1),
            ("zero1_fp32_w2_uneven", 3, 5),
            ("zero1_bf16_w2_param_aligned", 1, 2),
            ("zero2_bf16_w2_elastic", 2, 4),
            ("zero2_bf16_w4_roundrobin", 2, 3),
            ("zero2_fp16_w2", 2, 64),
            ("zero3_bf16_w2", 3, 3),
            ("zero3_bf16_w2", 1, 2),
            ("zero3_fp32_w4_subgroups", 3, 2),
            ("zero3_fp32_w4_subgroups", 3, 7),
            ("universal_zero2_w2", 2, 3),
            ("universal_zero3_w2", 3, 3),
        ],
    )
    def test_other_ranks_and_stages_hold_the_same_tensors(self, tmp_path, name, stage, ranks):
        source = tag(name)
        out = resharded(source, tmp_path / "out", mesh=f"dp={ranks}", stage=stage)
        assert [] == differences(out, source)
        checkpoint = open_snapshot(str(out)).checkpoint
        assert ("deepspeed", f"dp={ranks}", []) == (checkpoint.layout, str(checkpoint.mesh), list(checkpoint.findings))

    def test_weights_are_left_out_of_zero_3_and_masters_are_not(self, tmp_path):
        source = tag("zero2_fp16_w2")
        tensors = open_snapshot(str(resharded(source, tmp_path / "out", stage=3))).checkpoint.by_name
        assert ("float32", "float16") == (tensors["embed.weight"].spec.dtype.name, tensors["pos"].spec.dtype.name)
        assert tensors["embed.weight"].pieces == tensors["optimizer.state.embed.weight.fp32"].pieces

    @pytest.mark.parametrize("name", ["zero2_bf16_w2_elastic", "zero3_fp32_w4_subgroups"])
    def test_back_to_the_first_number_of_ranks_gives_the_first_fingerprint(self, tmp_path, name):
        source = tag(name)
        stage, ranks = (3, 4) if name.startswith("zero3") else (2, 2)
        away = resharded(source, tmp_path / "away", stage=stage)
        back = resharded(away, tmp_path / "back", mesh=f"dp={ranks}", stage=stage)
        assert [] == differences(back, source)
        assert [] == differences(source, back)

    @pytest.mark.parametrize(("name", "stage"), [("zero1_bf16_w2", 1), ("zero3_bf16_w2", 3)])
    def test_universal_checkpoints_are_written_and_read(self, tmp_path, name, stage):
        source = tag(name)
        universal = resharded(source, tmp_path / "universal", to="deepspeed-universal", mesh="dp=1", stage=stage)
        assert (universal / "zero/embed.weight/exp_avg.pt").is_file()
        assert [] == differences(universal, source)
        assert [] == differences(resharded(universal, tmp_path / "out", stage=stage), source)

    @pytest.mark.parametrize("stage", [1, 3])
    def test_over_dcp_and_back(self, tmp_path, stage):
        source = tag("zero2_bf16_w2_3tags" if stage == 1 else "zero3_bf16_w2")
        dcp = resharded(source, tmp_path / "dcp", to="dcp", mesh="fsdp=2")
        assert [] == differences(dcp, source)
        assert [] == differences(resharded(dcp, tmp_path / "out", stage=stage), source)

    def test_client_state_goes_over(self, tmp_path):
        source = tag("zero2_bf16_w4_roundrobin")
        out = resharded(source, tmp_path / "out", stage=2)
        names = {o.name for o in open_snapshot(str(source)).checkpoint.objects}
        assert names == {o.name for o in open_snapshot(str(out)).checkpoint.objects}

    def test_random_state_of_ranks_that_are_gone_is_kept(self, tmp_path):
        source = tag("zero3_fp32_w4_subgroups")
        out = resharded(source, tmp_path / "out", mesh="dp=2", stage=3)
        gone = "extra_state.zero_pp_rank_3_mp_rank_00.torch_rng"
        assert gone in names(source)
        assert gone in names(out)

    def test_stage_must_be_named(self, ckpttools, tmp_path):
        answer = ckpttools("reshard", tag("zero1_bf16_w2"), tmp_path / "out", "--to", "deepspeed", "--mesh", "dp=2")
        assert (2, True) == (answer.exit_code, "--zero" in answer.stderr)

    def test_command_line_writes_it(self, ckpttools, tmp_path):
        source = tag("zero1_bf16_w2")
        line = ["reshard", source, tmp_path / "out", "--to", "deepspeed", "--mesh", "dp=8", "--zero", "3"]
        assert 0 == ckpttools(*line).exit_code
        assert 8 == len(list((tmp_path / "out").glob("bf16_zero_pp_rank_*_mp_rank_00_optim_states.pt")))


def both_ways(one: Path, other: Path) -> list[str]:
    return differences(one, other) + differences(other, one)


WAYS = [
    # source, stage and mesh, stage and mesh of the source
    ("mp2_dp2_zero1_bf16", (1, "dp=3,tp=2"), (1, "dp=2,tp=2")),
    ("mp2_dp2_zero1_bf16", (1, "dp=2,tp=4"), (1, "dp=2,tp=2")),
    ("mp2_dp2_zero1_bf16", (1, "dp=3"), (1, "dp=2,tp=2")),
    ("mp2_dp2_zero1_bf16", (2, "dp=1,tp=2"), (1, "dp=2,tp=2")),
    ("mp2_dp2_zero1_bf16", (0, "dp=1,tp=4"), (1, "dp=2,tp=2")),
    ("pipe2_dp2_zero1_bf16", (1, "pp=2,dp=3"), (1, "pp=2,dp=2")),
    ("pipe2_dp2_zero1_bf16", (1, "pp=1,dp=3"), (1, "pp=2,dp=2", (3, 3))),
    ("pipe2_dp2_zero1_bf16", (0, "pp=2,dp=1"), (1, "pp=2,dp=2")),
    ("bloom_tp2_pp2", (1, "pp=2,dp=2,tp=2"), (1, "pp=2,dp=1,tp=2")),
    ("bloom_tp2_pp2", (1, "pp=2,dp=3,tp=1"), (1, "pp=2,dp=1,tp=2")),
    ("bloom_tp2_pp2", (1, "dp=2,tp=4"), (1, "pp=2,dp=1,tp=2", (3, 2))),
    ("zero0_bf16_w2", (1, "dp=3"), (0, "dp=2")),
    ("zero0_bf16_w2", (2, "dp=3"), (0, "dp=2")),
    ("zero0_fp32_w2", (1, "dp=3"), (0, "dp=2")),
    ("zero0_fp32_w2", (3, "dp=3"), (0, "dp=2")),
    ("pipe2_fp32_nozero", (1, "pp=2,dp=3"), (0, "pp=2,dp=1")),
    ("zero1_bf16_w2", (0, "dp=1"), (1, "dp=2")),
    ("zero2_fp16_w2", (0, "dp=1"), (2, "dp=2")),
    ("moe_ep2_zero2_bf16", (2, "dp=4,ep=2"), (2, "dp=2,ep=2")),
    ("moe_ep2_zero2_bf16", (2, "dp=4,ep=4"), (2, "dp=2,ep=2")),
    ("moe_ep2_zero2_bf16", (1, "dp=3"), (2, "dp=2,ep=2")),
    ("moe_ep2_zero2_bf16", (0, "dp=4,ep=4"), (2, "dp=2,ep=2")),
    ("moe_ep2_fp32_nozero", (0, "dp=1"), (0, "dp=2,ep=2")),
    ("moe_ep2_fp32_nozero", (1, "dp=4,ep=2"), (0, "dp=2,ep=2")),
]


class TestEveryAxis:
    @pytest.mark.parametrize(("name", "there", "home"), WAYS, ids=lambda w: str(w).replace(" ", ""))
    def test_there_and_back_gives_the_same_tensors(self, tmp_path, name, there, home):
        source = tag(name)
        away = resharded(source, tmp_path / "away", stage=there[0], mesh=there[1])
        assert [] == differences(away, source)
        checkpoint = open_snapshot(str(away)).checkpoint
        assert [] == list(checkpoint.findings)
        placing = Placing(stage_layers=home[2] if len(home) > 2 else ())
        back = resharded(away, tmp_path / "back", stage=home[0], mesh=home[1], placing=placing)
        assert [] == both_ways(back, source)
        assert {p.name for p in source.iterdir()} == {p.name for p in back.iterdir() if p.name != "ckpttools-seal.json"}

    @pytest.mark.parametrize(
        ("name", "mesh", "stage"),
        [
            ("bloom_tp2_pp2", "pp=2,dp=1,tp=2", 1),
            ("moe_ep2_zero2_bf16", "dp=2,ep=2", 2),
            ("zero0_fp32_w2", "dp=2", 0),
        ],
    )
    def test_over_dcp_and_back(self, tmp_path, name, mesh, stage):
        source = tag(name)
        dcp = resharded(source, tmp_path / "dcp", to="dcp", mesh="fsdp=2")
        assert [] == both_ways(resharded(dcp, tmp_path / "back", mesh=mesh, stage=stage), source)

    @pytest.mark.parametrize(
        ("name", "mesh"), [("mp2_dp2_zero1_bf16", "tp=2"), ("bloom_tp2_pp2", "pp=2,tp=2"), ("pipe2_dp2_zero1_bf16", "pp=2")]
    )
    def test_universal_checkpoints_hold_all_but_the_rows_that_pad_a_vocabulary(self, tmp_path, name, mesh):
        source = tag(name)
        universal = resharded(source, tmp_path / "universal", to="deepspeed-universal", mesh=mesh, stage=1)
        assert {"shape-mismatch"} >= {line.split()[0] for line in differences(universal, source)}
        assert all("word_embeddings.weight" in line for line in differences(universal, source))
        again = resharded(universal, tmp_path / "again", mesh=mesh, stage=1)
        found = open_snapshot(str(again)).checkpoint
        words = next(t for t in found if t.name.endswith("word_embeddings.weight.fp32"))
        weight = next(t for t in found if t.name.endswith("word_embeddings.weight") and t.family == "model")
        assert words.spec.shape == weight.spec.shape  # with zeros in the place of what was left out
        assert all("word_embeddings.weight" in line for line in both_ways(again, source))

    def test_cuts_that_a_user_names_are_stated_in_what_is_written(self, tmp_path):
        rules = tmp_path / "rules.toml"
        rules.write_text(
            '[[rules]]\ntensors = ["up.weight", "up.bias"]\naxis = "tp"\ndim = 0\n'
            '[[rules]]\ntensors = ["down.weight"]\naxis = "tp"\ndim = 1\n'
            '[[rules]]\ntensors = ["qkv.weight", "qkv.bias"]\naxis = "tp"\ndim = 0\nsections = [1, 1, 1]\n'
        )
        source = tag("zero2_bf16_w2_nofrozen")
        out = resharded(source, tmp_path / "out", mesh="dp=2,tp=2", stage=2, placing=Placing(rules=str(rules)))
        assert [] == differences(out, source)
        stored = torch.load(out / "mp_rank_01_model_states.pt", weights_only=False)
        info = stored["universal_checkpoint_info"]
        assert [r"^layers\.\d+\.down\.weight$"] == info["parameter_with_row_parallelism_patterns"]
        assert (96, 32) != torch.load(out / "mp_rank_01_model_states.pt", weights_only=False)["module"][
            "layers.0.qkv.weight"
        ].shape


class TestRefusals:
    """Before anything is written, and by name."""

    @pytest.mark.parametrize(
        ("name", "mesh", "stage", "message"),
        [
            ("zero1_bf16_w2", "tp=2", 1, "no rule cuts"),
            ("zero1_bf16_w2", "dp=2,pp=2", 1, "no layers of a pipeline"),
            ("zero1_bf16_w2", "dp=2,ep=2", 1, "no rule says which tensors are experts"),
            ("mp2_dp2_zero1_bf16", "dp=1,tp=3", 1, "does not fit"),
            ("pipe2_dp2_zero1_bf16", "pp=2,dp=1", 2, "pipeline cannot be trained with ZeRO 2"),
            ("moe_ep2_zero2_bf16", "dp=2,ep=2", 3, "experts cannot be trained with ZeRO 3"),
            ("moe_ep2_zero2_bf16", "dp=3,ep=3", 1, "cannot be divided by 3"),
            ("moe_ep2_zero2_bf16", "dp=3,ep=2", 1, "data-parallel"),
        ],
    )
    def test_mesh_or_stage_that_cannot_be(self, tmp_path, name, mesh, stage, message):
        with pytest.raises(CkpttoolsError, match=message):
            resharded(tag(name), tmp_path / "out", mesh=mesh, stage=stage)
        assert not (tmp_path / "out").exists()

    def test_other_number_of_stages_is_divided_as_the_source_is(self, tmp_path):
        source = tag("pipe2_dp2_zero1_bf16")
        three = resharded(source, tmp_path / "three", mesh="pp=3,dp=1", stage=1, placing=Placing(stage_layers=(2, 2, 2)))
        assert [] == differences(three, source)
        assert 3 == len(list(three.glob("mp_rank_*")))

    def test_division_of_layers_that_nothing_tells(self, tmp_path):
        one = resharded(tag("pipe2_dp2_zero1_bf16"), tmp_path / "one", mesh="pp=1,dp=2", stage=1)
        with pytest.raises(CkpttoolsError, match="how 2 stages divide the layers is not told"):
            resharded(one, tmp_path / "out", mesh="pp=2,dp=1", stage=1)
        with pytest.raises(CkpttoolsError, match="layers per stage do not fit"):
            resharded(one, tmp_path / "out", mesh="pp=2,dp=1", stage=1, placing=Placing(stage_layers=(2, 2)))
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(("name", "stage"), [("moe_ep2_zero2_bf16", 2), ("zero0_bf16_w2", 0)])
    def test_universal_checkpoints_that_no_engine_reads(self, tmp_path, name, stage):
        with pytest.raises(CkpttoolsError, match="universal checkpoint"):
            resharded(tag(name), tmp_path / "out", to="deepspeed-universal", mesh="dp=1", stage=stage)
        assert not (tmp_path / "out").exists()

    def test_optimizer_without_names_of_its_parameters(self, tmp_path):
        choice = Choice(exclude=("optimizer.param_names",))
        with pytest.raises(CkpttoolsError, match="parameter groups"):
            resharded(tag("zero1_bf16_w2"), tmp_path / "out", stage=1, choice=choice)
        assert not (tmp_path / "out").exists()
