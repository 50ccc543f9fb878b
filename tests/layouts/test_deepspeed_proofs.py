"""What a conversion of a DeepSpeed source holds true on the way: weights are rounded masters, and ties stay ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttools.errors import ConversionError, FindingsError
from ckpttools.layouts import open_snapshot
from ckpttools.model import Mesh
from ckpttools.operations.conversion import Manner
from ckpttools.operations.convert import consolidate
from ckpttools.operations.reshard import reshard
from ckpttools.operations.select import Choice
from ckpttools.operations.targets import Details
from tests.fixture_cases import Case

MODEL_FILE = "mp_rank_00_model_states.pt"
Tag = Callable[[str], Path]


@pytest.fixture
def tag(copy_of) -> Tag:
    """A copy of the only tag of a case."""
    return lambda name: next(p for p in copy_of(Case("deepspeed", name).checkpoint).iterdir() if p.is_dir())


@pytest.fixture
def changed(tag) -> Callable[..., Path]:
    """A tag whose weights were changed alone, and saved by torch with the right checksums."""
    pytest.importorskip("deepspeed")

    def change(name: str, weight: str = "norm.weight") -> Path:
        directory = tag(name)
        value = torch.load(directory / MODEL_FILE, weights_only=False)
        value["module"][weight].add_(1)
        torch.save(value, directory / MODEL_FILE)
        return directory

    return change


def to(source: Path, out: Path, target: str, zero: int | None = None, **options) -> Path:
    mesh = Mesh.parse("dp=1" if target == "deepspeed-universal" else "dp=3")
    reshard(str(source), str(out), target=target, mesh=mesh, details=Details(zero=zero), **options)
    return out


def codes(raised: pytest.ExceptionInfo[FindingsError]) -> set[str]:
    return {f.code for f in raised.value.findings}


class TestRounding:
    @pytest.mark.parametrize("case", ["zero1_bf16_w2", "zero2_fp16_w2", "zero2_fp32_w4"])
    @pytest.mark.parametrize(
        ("target", "zero"),
        [("dcp", None), ("deepspeed", 1), ("deepspeed", 3), ("deepspeed-universal", 2), ("deepspeed-universal", 3)],
    )
    def test_reshard_refuses_weights_that_are_not_the_rounding_of_their_masters(self, changed, tmp_path, case, target, zero):
        source = changed(case)
        with pytest.raises(FindingsError) as raised:
            to(source, tmp_path / "out", target, zero)
        assert {"rounding-mismatch"} == codes(raised)
        assert [f.where.partition(" in ")[0] for f in raised.value.findings] == ["norm.weight"]
        assert not (tmp_path / "out").exists()

    def test_it_goes_on_where_the_finding_is_allowed(self, changed, tmp_path):
        manner = Manner(allowed_findings=["rounding-mismatch"])
        assert to(changed("zero1_bf16_w2"), tmp_path / "out", "deepspeed", 2, manner=manner).exists()

    def test_an_url_is_not_written_to_either(self, changed):
        fsspec = pytest.importorskip("fsspec")
        with pytest.raises(FindingsError) as raised:
            to(changed("zero1_bf16_w2"), "memory://out", "deepspeed", 3)
        assert {"rounding-mismatch"} == codes(raised)
        assert fsspec.filesystem("memory").find("/out") == []

    def test_a_layout_that_states_no_masters_is_held_against_them_when_an_engine_shall_resume(self, changed, tmp_path):
        allowed = Manner(allowed_findings=["rounding-mismatch"])
        between = to(changed("zero1_bf16_w2"), tmp_path / "dcp", "dcp", manner=allowed)
        for zero in (2, 3):
            with pytest.raises(FindingsError) as raised:
                to(between, tmp_path / "out", "deepspeed", zero)
            assert {"rounding-mismatch"} == codes(raised)

    def test_an_interrupted_run_knows_when_it_goes_on(self, changed, tmp_path):
        source = changed("zero1_bf16_w2")
        for _ in range(2):  # the second finds all of it written
            with pytest.raises(FindingsError) as raised:
                to(source, tmp_path / "out", "deepspeed", 2)
            assert {"rounding-mismatch"} == codes(raised)

    def test_nan_may_have_another_payload(self, tag, tmp_path):
        pytest.importorskip("deepspeed")
        directory = tag("zero1_bf16_w2")
        for path in (MODEL_FILE, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            value = torch.load(directory / path, weights_only=False)
            if path == MODEL_FILE:
                name = next(iter(value["param_shapes"][0]))
                value["module"][name].view(-1)[0] = torch.tensor(0x7FC1, dtype=torch.int16).view(torch.bfloat16)
            else:
                flat = value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
                flat.data[0] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)
            torch.save(value, directory / path)
        assert to(directory, tmp_path / "out", "deepspeed", 2).exists()

    def test_weights_alone_are_not_held_against_masters_that_are_not_read(self, changed, tmp_path):
        consolidate(str(changed("zero1_bf16_w2")), str(tmp_path / "out"))
        assert (tmp_path / "out").exists()


class TestTies:
    @pytest.mark.parametrize("case", ["zero1_bf16_w2", "zero2_fp16_w2", "zero3_bf16_w2", "universal_zero2_w2"])
    @pytest.mark.parametrize("zero", [1, 2, 3])
    def test_tied_weight_comes_back_tied_from_a_layout_without_ties(self, tag, tmp_path, case, zero):
        source = tag(case)
        back = to(to(source, tmp_path / "dcp", "dcp"), tmp_path / "back", "deepspeed", zero)
        path = next(p for p in sorted(back.glob("*model_states.pt")))
        pytest.importorskip("deepspeed")
        stored = torch.load(path, weights_only=False)
        assert {"lm_head.weight": "embed.weight"} == stored["shared_params"]
        assert "lm_head.weight" not in (stored["frozen_param_shapes"] or {})
        after = open_snapshot(str(back)).checkpoint
        assert ("embed.weight", "lm_head.weight") in {
            tuple(n for n in g if not n.startswith("optimizer.")) for g in after.aliases
        }

    def test_ties_are_stated_by_an_object(self, tag):
        found = {o.name: o.record for o in open_snapshot(str(tag("zero3_bf16_w2"))).checkpoint.objects}
        assert {"lm_head.weight": "embed.weight"} == found["extra_state.shared_params"]

    def test_weight_that_is_no_longer_the_one_it_was_tied_to_is_refused(self, tag, tmp_path):
        between = to(tag("zero2_fp16_w2"), tmp_path / "dcp", "dcp")
        flip(between, "lm_head.weight")
        with pytest.raises(ConversionError, match="one weight under two names"):
            to(between, tmp_path / "back", "deepspeed", 2)

    def test_it_is_tied_again_where_it_is_left_out(self, tag, tmp_path):
        between = to(tag("zero2_fp16_w2"), tmp_path / "dcp", "dcp")
        flip(between, "lm_head.weight")
        out = to(between, tmp_path / "back", "deepspeed", 2, choice=Choice(exclude=("lm_head.weight",)))
        assert ("embed.weight", "lm_head.weight") in open_snapshot(str(out)).checkpoint.aliases


def flip(directory: Path, name: str) -> None:
    """Change the first byte of a tensor where it lies."""
    piece = open_snapshot(str(directory), is_located=True).checkpoint.by_name[name].pieces[0]
    with open(directory / piece.extent.file, "r+b") as file:
        file.seek(piece.extent.offset)
        byte = file.read(1)[0]
        file.seek(piece.extent.offset)
        file.write(bytes([byte ^ 1]))
