"""Diff: what is said of every pair of tensors and objects, whatever the layouts, the cuts and the strides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import ConversionError, NotFoundError, UsageError
from ckpttools.operations.convert import consolidate
from ckpttools.operations.diff import Diff, diff
from ckpttools.operations.measure import Tolerance
from ckpttools.operations.sealing import seal
from ckpttools.operations.select import Choice, Renaming
from tests.fixture_cases import FIXTURES
from tests.safetensors_bytes import container
from tests.strategies import specs

torch = pytest.importorskip("torch", reason="needs torch, which writes the files that are compared")

DCP = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"
UNEVEN = FIXTURES / "torch" / "dcp_fsdp2_w4_uneven" / "ckpt"


def saved(path: Path, state: object) -> str:
    torch.save(state, path)
    return str(path)


def statuses(found: Diff) -> dict[str, str]:
    return {t.name: t.status for t in found.tensors} | {o.name: o.status for o in found.objects}


@pytest.fixture
def compared(tmp_path):
    """Saves two states and compares them."""

    def compare(a: object, b: object, **options: object) -> Diff:
        return diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b), **options)

    return compare


class TestTensors:
    def test_every_status(self, compared):
        ones = torch.ones(2, 3)
        a = {name: ones.clone() for name in ("same", "changed", "dtype", "shape", "mine")}
        b = {"same": ones, "changed": ones + 1, "dtype": ones.double(), "shape": ones.T.contiguous(), "yours": ones.clone()}
        found = compared(a, b)
        expected = {"mine": "only_in_a", "yours": "only_in_b"} | {n: n for n in ("same", "changed", "dtype", "shape")}
        assert expected == statuses(found)
        assert found.verdict == "different"

    def test_another_dtype_is_compared_by_value(self, compared):
        values = torch.tensor([1.0, 1.001])
        found = compared({"w": values.bfloat16()}, {"w": values}).tensors[0]
        assert (found.status, found.difference.values, found.difference.max_abs.index) == ("dtype", 1, (1,))

    def test_close_by_the_tolerance_is_well(self, compared):
        states = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.001])}
        found = compared(*states, tolerance=Tolerance(rtol=1e-2))
        assert ({"w": "close"}, "close") == (statuses(found), found.verdict)
        assert compared(*states, tolerance=Tolerance(rtol=1e-6)).verdict == "different"
        assert compared(*states).verdict == "different"

    def test_negative_zero_counts_unless_there_is_a_tolerance(self, compared):
        states = {"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}
        assert compared(*states).verdict == "different"
        assert compared(*states, tolerance=Tolerance()).verdict == "close"

    def test_strides_and_storages_do_not_matter(self, compared):
        values = torch.arange(600.0).reshape(20, 30)
        wide = torch.zeros(40, 60)
        wide[::2, ::2] = values
        assert compared({"w": values.T.contiguous().T}, {"w": wide[::2, ::2]}).verdict == "same"

    def test_a_transposed_tensor_larger_than_a_tile(self, compared):
        values = torch.arange(3_000_000.0).reshape(1500, 2000)
        other = values.clone()
        other[1499, 7] += 1
        found = compared({"w": values}, {"w": other.T.contiguous().T}, memory_bytes=8 << 20).tensors[0].difference
        assert (found.bits, found.first, found.max_abs.index) == (1, (1499, 7), (1499, 7))

    def test_rank_0_and_no_elements(self, compared):
        a = {"scalar": torch.tensor(1), "empty": torch.zeros(0, 3)}
        found = compared(a, {"scalar": torch.tensor(2), "empty": torch.zeros(0, 3)})
        assert {"scalar": "changed", "empty": "same"} == statuses(found)
        assert () == found.tensors[0].difference.first

    def test_tied_tensors_are_compared_under_each_name(self, compared):
        tied = torch.ones(3)
        assert {"embed": "same", "head": "same"} == statuses(compared({"embed": tied, "head": tied}, {"embed": tied}))
        found = compared({"embed": tied}, {"embed": tied, "head": tied})
        assert {"embed": "same", "head": "same"} == statuses(found)
        assert "embed" == found.tensors[1].a.name

    def test_an_equal_tensor_under_another_name_is_no_alias(self, compared):
        assert "only_in_b" == statuses(compared({"w": torch.ones(3)}, {"w": torch.ones(3), "v": torch.ones(3)}))["v"]


class TestChoice:
    STATES = ({"model.w": torch.ones(2), "model.b": torch.ones(1)}, {"w": torch.ones(2), "b": torch.zeros(1)})

    def test_names_of_a_are_changed(self, compared):
        renaming = Renaming.parse((), [r"^model\.="])
        found = compared(*self.STATES, choice=Choice(renaming=renaming))
        assert {"w": "same", "b": "changed"} == statuses(found)
        assert ("model.w", "w") == (found.tensors[0].a.name, found.tensors[0].b.name)

    def test_globs_match_names_as_they_are_compared(self, compared):
        renaming = Renaming(("model.",))
        assert {"w": "same"} == statuses(compared(*self.STATES, choice=Choice(include=("w",), renaming=renaming)))
        assert {"w": "same"} == statuses(compared(*self.STATES, choice=Choice(exclude=("b",), renaming=renaming)))

    def test_two_tensors_under_one_name_are_refused(self, compared):
        with pytest.raises(ConversionError, match="one name"):
            compared(*self.STATES, choice=Choice(renaming=Renaming.parse((), [".*=w"])))

    def test_nothing_chosen_is_refused(self, compared):
        with pytest.raises(ConversionError, match="nothing"):
            compared(*self.STATES, choice=Choice(include=("absent",)))

    def test_weights_only_leaves_other_families_and_objects(self, tmp_path):
        consolidate(str(DCP), str(tmp_path / "out"))
        assert diff(str(DCP), str(tmp_path / "out")).verdict == "different"
        found = diff(str(DCP), str(tmp_path / "out"), choice=Choice(is_weights_only=True))
        assert (found.verdict, len(found.tensors), found.objects) == ("same", 32, ())

    def test_what_one_side_lacks_can_be_allowed(self, compared):
        states = {"w": torch.ones(2), "v": torch.ones(2)}, {"w": torch.ones(2), "u": torch.ones(2)}
        assert compared(*states, allow_missing=True).verdict == "same"
        assert compared(*states).verdict == "different"

    def test_sides_without_a_common_name_are_different_all_the_same(self, compared):
        assert compared({"w": torch.ones(2)}, {"v": torch.ones(2)}, allow_missing=True).verdict == "different"


class TestObjects:
    def test_values_are_compared_and_the_place_is_told(self, compared):
        a = {"w": torch.ones(1), "args": {"lr": 0.1, "betas": [0.9, 0.99]}, "step": 3}
        b = {"w": torch.ones(1), "args": {"lr": 0.2, "betas": [0.9, 0.99]}, "epoch": 3}
        found = compared(a, b)
        assert {"w": "same", "args.lr": "changed", "args.betas": "same", "step": "only_in_a", "epoch": "only_in_b"} == statuses(
            found
        )
        assert [(0.1, 0.2)] == [(p.a, p.b) for o in found.objects for p in o.places]

    def test_a_change_of_objects_alone_is_a_difference(self, compared):
        assert compared({"w": torch.ones(1), "step": 1}, {"w": torch.ones(1), "step": 2}).verdict == "different"

    def test_none_is_a_value(self, compared):
        assert compared({"w": torch.ones(1), "x": None}, {"w": torch.ones(1), "x": None}).verdict == "same"
        assert compared({"w": torch.ones(1), "x": None}, {"w": torch.ones(1), "x": 0}).verdict == "different"

    def test_very_many_places_are_cut(self, compared):
        a, b = {"w": torch.ones(1), "x": list(range(500))}, {"w": torch.ones(1), "x": list(range(1, 501))}
        assert 20 == len(compared(a, b).objects[0].places)

    def test_objects_of_sharded_checkpoints_are_compared(self):
        found = diff(str(DCP), str(DCP))
        assert ({"same"}, 20) == ({o.status for o in found.objects}, len(found.objects))


class TestLayouts:
    def test_a_checkpoint_and_what_it_was_turned_into(self, tmp_path):
        consolidate(str(UNEVEN), str(tmp_path / "all.pt"))
        consolidate(str(UNEVEN), str(tmp_path / "all"), choice=Choice(include=("*",)), max_shard_bytes=50_000)
        for one, other in (("all.pt", "all"), (UNEVEN, "all.pt"), ("all", UNEVEN)):
            found = diff(str(tmp_path / one), str(tmp_path / other), allow_missing=True, jobs=2)
            assert (found.verdict, {t.status for t in found.tensors}) == ("same", {"same"})

    @pytest.mark.parametrize("jobs", [1, 2, 5])
    def test_jobs_change_nothing(self, jobs):
        run = FIXTURES / "torch" / "hf_trainer_run" / "ckpt"
        sides = str(run / "checkpoint-6"), str(run / "checkpoint-9")
        assert diff(*sides, jobs=jobs).tensors == diff(*sides).tensors

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(st.data(), specs(), st.integers(1, 3))
    def test_every_dtype_and_shape_of_a_container(self, tmp_path, data, spec, jobs):
        if not spec.dtype.safetensors or (spec.dtype.name == "float4_e2m1fn_x2" and not spec.shape):
            return
        values = data.draw(st.binary(min_size=spec.length_bytes, max_size=spec.length_bytes))
        other = bytearray(values)
        for at in data.draw(st.lists(st.integers(0, max(0, len(other) - 1)), max_size=3 if other else 0)):
            other[at] ^= data.draw(st.integers(1, 255))
        for name, content in (("a", values), ("b", bytes(other))):
            (tmp_path / f"{name}.safetensors").write_bytes(container({"w": (spec.dtype, spec.shape, content)}))
        found = diff(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), jobs=jobs, memory_bytes=1 << 20)
        assert ("same" if values == bytes(other) else "different") == found.verdict
        difference = found.tensors[0].difference
        assert difference.elements == spec.volume
        assert (difference.bits > 0) == (values != bytes(other))

    def test_elements_of_less_than_a_byte_over_several_tiles(self, tmp_path):
        dtype, count = BY_NAME["float6_e2m3fn"], 400_000
        values = np.random.default_rng(0).integers(0, 256, count * 6 // 8, dtype="u1").tobytes()
        other = bytearray(values)
        other[-1] ^= 0x80
        for name, content in (("a", values), ("b", bytes(other))):
            (tmp_path / f"{name}.safetensors").write_bytes(container({"w": (dtype, (count,), content)}))
        found = diff(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), memory_bytes=1 << 19).tensors[0].difference
        assert (found.elements, found.bits, found.first) == (count, 1, (count - 1,))


class TestDamage:
    def test_damage_is_told_as_damage(self):
        sound = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"
        damaged = FIXTURES / "torch" / "dmg_distcp_bitflip_tensor" / "ckpt"
        for sides in ((sound, damaged), (damaged, sound)):
            found = diff(*map(str, sides))
            assert "damaged" == found.verdict
            assert [str(damaged)] == [f.where.rpartition(" of ")[2] for f in found.findings if f.code == "checksum-mismatch"]

    def test_a_missing_piece_is_unread_and_not_a_difference(self, copy_of):
        whole = copy_of("torch/dcp_fsdp2_w2/ckpt")
        (whole / "__1_0.distcp").unlink()
        found = diff(str(DCP), str(whole))
        assert "incomplete" == found.verdict
        assert {"same", "unread"} == {e.status for e in (*found.tensors, *found.objects)}

    def test_replicas_that_differ_are_told(self, copy_of):
        checkpoint = copy_of("torch/perrank_dtensor_verl_layout_w2/ckpt")
        path = checkpoint / "model_world_size_2_rank_1.pt"
        state = torch.load(path, weights_only=False)
        state["freqs_cis"] = state["freqs_cis"] + 1
        torch.save(state, path)
        found = diff(str(checkpoint), str(checkpoint))
        assert "damaged" == found.verdict
        assert {"replica-mismatch"} == {f.code for f in found.findings if f.is_error}

    def test_a_seal_has_no_values(self, tmp_path):
        seal(str(DCP), output=str(tmp_path / "seal.json"))
        with pytest.raises(UsageError, match="no values"):
            diff(str(DCP), str(tmp_path / "seal.json"))

    def test_nothing_is_not_found(self, tmp_path):
        with pytest.raises(NotFoundError):
            diff(str(DCP), str(tmp_path / "absent"))


def test_each_byte_is_read_once_from_either_side():
    found = diff(str(UNEVEN), str(UNEVEN))
    assert found.bytes_read == sum(t.a.length_bytes + t.b.length_bytes for t in found.tensors)
