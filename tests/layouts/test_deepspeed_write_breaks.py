"""What random conversions to DeepSpeed and back have found: nothing is lost without a word; what cannot be is refused first."""

from __future__ import annotations

import json

import pytest
import torch

from ckpttools.cli.render import fingerprint_line
from ckpttools.digest import TensorDigest
from ckpttools.errors import ConversionError, UsageError
from ckpttools.gather import Gather
from ckpttools.layouts import open_snapshot
from ckpttools.model import Box, Mesh
from ckpttools.operations.reshard import reshard
from ckpttools.operations.select import Choice
from ckpttools.operations.targets import Details
from ckpttools.operations.validate import validate
from ckpttools.seals import Seal
from tests.layouts.test_deepspeed_write import both_ways, differences, names, resharded, tag


def rows_of(place, name: str) -> bytes:
    """The bytes of a tensor, row after row."""
    snapshot = open_snapshot(str(place), is_located=True)
    return b"".join(map(bytes, Gather(snapshot.source, memory_bytes=1 << 20).stream(snapshot.checkpoint.by_name[name])))


class TestVocabularies:
    @pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=2", "tp=4"])
    def test_universal_checkpoint_is_written_without_the_rows_that_pad_it(self, tmp_path, mesh):
        source = tag("mp2_dp2_zero1_bf16")
        out = resharded(source, tmp_path / "out", to="deepspeed-universal", mesh=mesh, stage=1)
        cut = differences(out, source)
        assert {"shape-mismatch"} == {d.split()[0] for d in cut}
        assert all(d.split()[1].startswith("optimizer.state.embedding.word_embeddings.weight.") for d in cut)

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_padding_rows_without_masters_are_zeros_as_when_deepspeed_loads_them(self, tmp_path, stage):
        out = resharded(tag("universal_tp2_dp2_zero1"), tmp_path / "out", mesh="dp=2,tp=2", stage=stage)
        snapshot = open_snapshot(str(out), is_located=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            entry = snapshot.checkpoint.by_name[f"optimizer.state.embedding.word_embeddings.weight.{key}"]
            assert (64, 32) == entry.spec.shape
            box = Box((59, 0), (5, 32))
            views = Gather(snapshot.source, memory_bytes=1 << 20).stream(entry, box)
            assert bytes(5 * 32 * 4) == b"".join(map(bytes, views))

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_padding_rows_of_the_weight_are_zeros_too_since_the_engine_rounds_it_from_its_master(self, tmp_path, stage):
        out = resharded(tag("universal_tp2_dp2_zero1"), tmp_path / "out", mesh="dp=1", stage=stage)
        assert ("ok", []) == ((found := validate(str(out))).verdict, [f for f in found.findings if f.is_error])
        name = "embedding.word_embeddings.weight"
        rows = [rows_of(place, name) for place in (tag("universal_tp2_dp2_zero1"), out)]
        assert rows[0][: 59 * 64] == rows[1][: 59 * 64]
        assert (bytes(5 * 64), True) == (rows[1][59 * 64 :], any(rows[0][59 * 64 :]))

    def test_padding_rows_of_what_is_not_stated_to_be_a_vocabulary_are_refused(self, tmp_path):
        choice = Choice(exclude=("extra_state.universal_checkpoint_info",))
        with pytest.raises(ConversionError, match="pad a vocabulary") as refused:
            resharded(tag("universal_tp2_dp2_zero1"), tmp_path / "out", mesh="dp=2", stage=1, choice=choice)
        assert "59 rows" in refused.value.found
        assert [] == list(tmp_path.iterdir())

    def test_universal_checkpoint_of_a_padded_vocabulary_goes_to_other_ranks(self, tmp_path):
        source = tag("universal_tp2_dp2_zero1")
        away = resharded(source, tmp_path / "away", to="deepspeed-universal", mesh="tp=4", stage=1)
        assert [] == both_ways(away, source)


class TestWhatIsNotWritten:
    def asked(self, ckpttools, source, out, stage, *options):
        line = ["reshard", source, out, "--to", "deepspeed", "--mesh", "dp=2", "--zero", stage, *options]
        answer = ckpttools(*map(str, line))
        assert 0 == answer.exit_code
        return answer.stdout

    @pytest.mark.parametrize("stage", [0, 3])
    def test_settings_and_weights_that_an_engine_makes_again_are_named(self, ckpttools, tmp_path, stage):
        source = tag("zero2_bf16_w2_3tags")
        told = set(json.loads(self.asked(ckpttools, source, tmp_path / "out", stage, "--json"))["made_again"])
        assert "optimizer.clip_grad" in told
        assert (stage == 3) == ("embed.weight" in told)
        lost = names(source) - names(tmp_path / "out")
        assert lost <= told

    def test_text_says_it_too(self, ckpttools, tmp_path):
        text = self.asked(ckpttools, tag("zero2_bf16_w2_3tags"), tmp_path / "out", 0)
        assert "the engine makes them again: " in text
        assert "optimizer.clip_grad" in text

    def test_nothing_is_said_where_all_is_written(self, ckpttools, tmp_path):
        source = tag("zero2_bf16_w2_3tags")
        assert "again" not in self.asked(ckpttools, source, tmp_path / "out", 2)

    def test_weights_that_are_their_own_masters_are_not_said_to_be_left_out(self, ckpttools, tmp_path):
        assert "again" not in self.asked(ckpttools, tag("zero3_bf16_w2"), tmp_path / "out", 3)


class TestStatesOfSomeParameters:
    @pytest.mark.parametrize(
        ("target", "stage", "key"),
        [
            ("deepspeed", 0, "step"),
            ("deepspeed", 2, "step"),
            ("deepspeed", 3, "step"),
            ("deepspeed", 2, "exp_avg"),
            ("deepspeed-universal", 1, "exp_avg"),
            ("deepspeed-universal", 2, "step"),
        ],
    )
    def test_state_that_some_of_a_group_have_is_refused_before_anything_is_written(self, tmp_path, target, stage, key):
        choice = Choice(exclude=(f"optimizer.state.layers.1.norm1.bias.{key}",))
        with pytest.raises(ConversionError, match="group"):
            resharded(tag("zero1_bf16_w2"), tmp_path / "out", to=target, stage=stage, choice=choice)
        assert [] == list(tmp_path.iterdir())

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("key", ["step", "exp_avg"])
    def test_state_can_be_left_out_of_all(self, tmp_path, stage, key):
        source = tag("zero3_bf16_w2")
        choice = Choice(exclude=(f"optimizer.state.*.{key}",))
        out = resharded(source, tmp_path / "out", stage=stage, choice=choice)
        assert [] == differences(out, source)
        assert not any(n.endswith(f".{key}") for n in names(out))


def test_tied_module_on_one_stage_is_refused_without_zero(tmp_path):
    with pytest.raises(ConversionError, match="is tied"):
        resharded(tag("pipe2_dp2_zero1_bf16"), tmp_path / "out", mesh="dp=4", stage=0)
    assert [] == list(tmp_path.iterdir())


def test_mesh_of_too_many_ranks_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="too many ranks"):
        resharded(tag("zero3_bf16_w2"), tmp_path / "out", mesh="tp=2,dp=100000000", stage=3)


def test_tied_module_without_its_layer_is_refused_and_not_a_traceback(tmp_path):
    source = tag("bloom_tp2_pp2")
    away = resharded(source, tmp_path / "away", to="dtensor", mesh="dp=1")
    universal = resharded(away, tmp_path / "universal", to="deepspeed-universal", mesh="dp=2", stage=1)
    try:
        resharded(universal, tmp_path / "out", mesh="pp=2,dp=1,tp=2", stage=1)
    except ConversionError:
        assert not (tmp_path / "out").exists()


class TestMeshesInMessages:
    """Experts are shared by data-parallel ranks: what is said has the axes that the user gave."""

    MOE = "moe_ep2_zero2_bf16"

    def asked(self, ckpttools, out, mesh, *options):
        line = ["reshard", tag(self.MOE), out, "--to", "deepspeed", "--mesh", mesh, "--zero", 2, *options]
        return ckpttools(*map(str, line))

    @pytest.mark.parametrize(
        ("mesh", "shown", "last"),
        [
            ("dp=4,ep=2", {"dp": 4, "ep": 2}, "dp=3,ep=1"),
            ("ep=2,fsdp=4", {"fsdp": 4, "ep": 2}, "fsdp=3,ep=1"),
            ("dp=2,fsdp=2,ep=2", {"dp": 2, "fsdp": 2, "ep": 2}, "dp=1,fsdp=1,ep=1"),
            ("dp=4", {"dp": 4}, "dp=3"),
        ],
    )
    def test_document_has_the_mesh_as_given_and_one_entry_per_rank(self, ckpttools, tmp_path, mesh, shown, last):
        told = json.loads(self.asked(ckpttools, tmp_path / "out", mesh, "--dry-run", "--json").stdout)
        assert shown == told["mesh"]
        assert list(shown) == list(told["mesh"])
        assert [0, 1, 2, 3] == [rank["rank"] for rank in told["ranks"]]
        assert last == told["ranks"][-1]["at"]

    def test_a_rank_is_told_with_the_experts_that_it_has(self, ckpttools, tmp_path):
        told = json.loads(self.asked(ckpttools, tmp_path / "out", "dp=4,ep=2", "--dry-run", "--json").stdout)
        assert ["dp=0,ep=0", "dp=1,ep=1", "dp=2,ep=0", "dp=3,ep=1"] == [rank["at"] for rank in told["ranks"]]
        for rank in told["ranks"]:
            others = {"0": "expert_2", "1": "expert_0"}[rank["at"][-1]]
            assert not [s["file"] for s in rank["sources"] if f"_{others}_" in s["file"]]

    def test_summary(self, ckpttools, tmp_path):
        assert "for 4 ranks (dp=4,ep=2)" in self.asked(ckpttools, tmp_path / "out", "dp=4,ep=2").stdout

    @pytest.mark.parametrize(
        ("mesh", "nearest"), [("dp=4,ep=2,tp=2", "dp=8,ep=2"), ("fsdp=4,ep=2,tp=2", "fsdp=8,ep=2"), ("tp=2", "dp=1")]
    )
    def test_nearest_mesh(self, ckpttools, tmp_path, mesh, nearest):
        answer = self.asked(ckpttools, tmp_path / "out", mesh)
        assert 2 == answer.exit_code
        assert f"the mesh {mesh} does not fit" in answer.stderr
        assert nearest in answer.stderr


class TestNamesOfPositions:
    """Without ZeRO the optimizer has positions: names that weights in their order do not tell are written beside them."""

    def without_zero(self, source, tmp_path, stage=3):
        away = resharded(source, tmp_path / "away", to="deepspeed-universal", mesh="dp=2", stage=stage)
        again = resharded(away, tmp_path / "again", to="deepspeed-universal", mesh="dp=2", stage=2)
        return resharded(again, tmp_path / "out", mesh="dp=2", stage=0)

    @pytest.mark.parametrize("stage", [1, 3])
    @pytest.mark.parametrize("name", ["zero0_fp32_w2", "zero0_bf16_w2", "zero2_fp32_w4", "zero3_bf16_w2", "universal_zero3_w2"])
    def test_by_way_of_universal_checkpoints_which_have_another_order(self, tmp_path, name, stage):
        out = self.without_zero(tag(name), tmp_path, stage)
        found = both_ways(out, tag(name))
        if (name, stage) == ("zero0_bf16_w2", 3):  # its universal checkpoint has masters alone
            found = [d for d in found if d.split()[1].startswith("optimizer.")]
        assert [] == found
        assert [] == [f.code for f in open_snapshot(str(out)).checkpoint.findings if f.code == "names-unstated"]

    def test_torch_takes_them(self, tmp_path):
        source, out = tag("zero0_fp32_w2"), self.without_zero(tag("zero0_fp32_w2"), tmp_path)
        saved, first = (torch.load(d / "mp_rank_00_model_states.pt", weights_only=False)["optimizer"] for d in (out, source))
        vectors = first["state"]
        groups = [
            [torch.nn.Parameter(torch.zeros_like(vectors[p]["exp_avg"])) for p in g["params"]] for g in first["param_groups"]
        ]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        optimizer.load_state_dict(saved)
        for group, stated in zip(groups, first["param_groups"], strict=True):
            for parameter, position in zip(group, stated["params"], strict=True):
                assert torch.equal(optimizer.state[parameter]["exp_avg"], vectors[position]["exp_avg"])
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def test_nothing_is_written_where_the_order_tells(self, tmp_path):
        out = resharded(tag("zero0_fp32_w2"), tmp_path / "out", mesh="dp=3", stage=0)
        optimizer = torch.load(out / "mp_rank_00_model_states.pt", weights_only=False)["optimizer"]
        assert not [g for g in optimizer["param_groups"] if "param_names" in g]


class TestFingerprints:
    """What is printed is what `hash` prints of the output: names for the same bytes count."""

    @pytest.mark.parametrize(
        ("name", "target", "stage"),
        [
            ("zero0_fp32_w2", "deepspeed", 0),
            ("zero0_fp32_w2", "deepspeed", 2),
            ("zero0_fp32_w2", "deepspeed", 3),
            ("zero0_fp32_w2", "torch", None),
            ("zero2_bf16_w2_3tags", "deepspeed", 0),
            ("zero2_bf16_w2_3tags", "deepspeed", 3),
            ("zero2_bf16_w2_3tags", "deepspeed-universal", 2),
            ("zero2_bf16_w2_3tags", "deepspeed-universal", 3),
            ("zero3_bf16_w2", "deepspeed", 1),
            ("zero3_bf16_w2", "dtensor", None),
            ("universal_tp2_dp2_zero1", "deepspeed", 1),
            ("moe_ep2_zero2_bf16", "deepspeed", 1),
            ("moe_ep2_fp32_nozero", "deepspeed", 0),
            ("pipe2_dp2_zero1_bf16", "deepspeed", 1),
        ],
    )
    def test_of_reshard(self, ckpttools, tmp_path, name, target, stage):
        zero = ("--zero", str(stage)) if stage is not None else ()
        line = ["reshard", tag(name), tmp_path / "out", "--to", target, "--mesh", "dp=2", *zero, "--drop"]
        answer = ckpttools(*map(str, line))
        assert 0 == answer.exit_code
        listed = ckpttools("hash", str(tmp_path / "out")).stdout
        assert listed.splitlines()[-1] == answer.stdout.splitlines()[-1]
        told = json.loads(ckpttools(*map(str, line), "--json").stdout)  # already done
        assert f"{told['fingerprint']}  fingerprint" == listed.splitlines()[-1]

    @pytest.mark.parametrize("options", [(), ("--format", "torch"), ("--weights-only",)])
    def test_of_consolidate(self, ckpttools, tmp_path, options):
        out = tmp_path / "out"
        answer = ckpttools("consolidate", str(tag("zero0_fp32_w2")), str(out), *options)
        assert 0 == answer.exit_code
        assert ckpttools("hash", str(out)).stdout.splitlines()[-1] == answer.stdout.splitlines()[-1]

    def test_a_line_says_what_it_is_of_where_the_whole_is_not_known(self):
        seal = Seal("blake3", (TensorDigest("w", "float32", (1,), "0" * 64),), {}, (), "dcp")
        assert f"{seal.fingerprint}  fingerprint of 1 tensor written" == fingerprint_line("", seal)


class TestManyRanks:
    @pytest.mark.parametrize("target", ["deepspeed", "deepspeed-universal"])
    @pytest.mark.parametrize("mesh", ["dp=1000000", "dp=65537", "dp=8192,fsdp=2,tp=2,pp=4", f"dp={10**30}"])
    def test_are_refused_before_the_source_is_read(self, tmp_path, target, mesh):
        with pytest.raises(UsageError, match="too many ranks") as refused:
            resharded(tmp_path / "none", tmp_path / "out", to=target, mesh=mesh, stage=1)
        assert refused.value.expected == "at most 65536"
        assert [] == list(tmp_path.iterdir())

    def test_expert_parallel_ranks_are_not_counted_twice(self, tmp_path):
        source = tag("moe_ep2_zero2_bf16")
        asked = {"target": "deepspeed", "details": Details(zero=0), "is_dry_run": True}
        found = reshard(str(source), str(tmp_path / "out"), mesh=Mesh.parse("dp=65536,ep=4"), **asked)
        assert 65536 == found.assignment.mesh.ranks

    @pytest.mark.parametrize("stage", [1, 3])
    def test_universal_checkpoint_is_the_same_for_any_number_of_data_parallel_ranks(self, tmp_path, stage):
        meshes, to = ("dp=1", "dp=5"), "deepspeed-universal"
        one, many = (resharded(tag("zero2_bf16_w2_3tags"), tmp_path / m, to=to, mesh=m, stage=stage) for m in meshes)
        files = [sorted(p.relative_to(d) for p in d.rglob("*") if p.is_file()) for d in (one, many)]
        assert files[0] == files[1]
        assert [] == [f for f in files[0] if (one / f).read_bytes() != (many / f).read_bytes()]
