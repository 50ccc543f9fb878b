"""Single torch files, alone or beside each other."""

from __future__ import annotations

import pytest
import torch

from ckpttools.errors import NotRecognisedError
from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate
from tests.layouts.contract import codes, targets
from tests.unit.containers.torch_bytes import saved

CASES = ("save_zip_many_tensors", "save_zip_shared_views", "save_legacy", "save_odd_keys", "save_whole_module", "lightning_ckpt")


class TestFixtures:
    def test_they_are_recognised_as_this_layout(self):
        assert {"torch"} == {open_snapshot(str(t.path)).checkpoint.layout for _, t in targets(*CASES)}

    def test_they_are_ok(self):
        assert {"ok"} == {validate(str(t.path)).verdict for _, t in targets(*CASES)}

    def test_extents_lie_inside_their_files(self):
        for _, target in targets(*CASES):
            snapshot = open_snapshot(str(target.path))
            for piece in [p for t in snapshot.checkpoint.tensors for p in t.pieces]:
                assert piece.extent.offset + piece.extent.length <= snapshot.listing.length_bytes(piece.extent.file)


class TestFamilies:
    def test_optimizer_beside_a_model_is_named_below_its_family(self, tmp_path):
        (tmp_path / "model.pt").write_bytes(saved({"w": torch.ones(1)}))
        (tmp_path / "optimizer.pt").write_bytes(saved({"state": {0: {"exp_avg": torch.ones(1)}}}))
        names = {(t.name, t.family) for t in open_snapshot(str(tmp_path)).checkpoint}
        assert {("w", "model"), ("optimizer.state.0.exp_avg", "optimizer")} == names

    def test_several_files_of_unknown_names_are_not_guessed_at(self, tmp_path):
        for name in ("a.pt", "b.pt"):
            (tmp_path / name).write_bytes(saved({"w": torch.ones(1)}))
        with pytest.raises(NotRecognisedError):
            open_snapshot(str(tmp_path))

    def test_training_checkpoint_has_model_and_optimizer_apart(self, tmp_path):
        value = {"model": {"w": torch.ones(1)}, "optimizer": {"state": {0: {"m": torch.ones(1)}}}, "step": 7}
        (tmp_path / "c.pt").write_bytes(saved(value))
        checkpoint = open_snapshot(str(tmp_path / "c.pt")).checkpoint
        assert ({"model.w": "model", "optimizer.state.0.m": "optimizer"}, 7) == (
            {t.name: t.family for t in checkpoint},
            checkpoint.step,
        )

    def test_tied_tensors_are_aliases(self, tmp_path):
        w = torch.ones(3)
        (tmp_path / "c.pt").write_bytes(saved({"a": w, "b": w, "c": torch.ones(3)}))
        assert (("a", "b"),) == open_snapshot(str(tmp_path / "c.pt")).checkpoint.aliases


class TestNames:
    @pytest.mark.parametrize("name", ["a\nb.pt", "a\\b.pt", "\udce9.pt", " .pt", "-x.pt", "ключ.pt"], ids=ascii)
    def test_file_with_an_odd_name_is_read(self, tmp_path, name):
        (tmp_path / name).write_bytes(saved({"w": torch.ones(1)}))
        assert "ok" == validate(str(tmp_path / name)).verdict

    @pytest.mark.parametrize("key", ["a\nb", "a\0b", "\x1b[31m", "", ".", "a.b", "é" * 1000], ids=ascii)
    def test_key_with_odd_characters_is_its_name(self, tmp_path, key):
        (tmp_path / "c.pt").write_bytes(saved({key: torch.ones(1)}))
        assert [key] == [t.name for t in open_snapshot(str(tmp_path / "c.pt")).checkpoint]


class TestDepth:
    @pytest.mark.parametrize("levels", [100, 10_000])
    def test_deep_nesting_is_read_or_refused_and_never_an_exception(self, tmp_path, levels):
        from tests.unit.containers.torch_bytes import by_hand

        pickled = b"\x80\x02" + b"}X\x01\0\0\0a" * levels + b"}" + b"s" * levels + b"."
        (tmp_path / "c.pt").write_bytes(by_hand(pickled, {}))
        assert codes(validate(str(tmp_path / "c.pt"))) <= {"pickle-limit"}

    def test_values_shared_exponentially_are_refused(self, tmp_path):
        value: object = torch.ones(1)
        for _ in range(60):
            value = [value, value]
        (tmp_path / "c.pt").write_bytes(saved(value))
        assert {"pickle-limit"} == codes(validate(str(tmp_path / "c.pt")))

    def test_value_that_contains_itself_is_refused(self, tmp_path):
        value: dict[str, object] = {"w": torch.ones(1)}
        value["self"] = value
        (tmp_path / "c.pt").write_bytes(saved(value))
        assert {"pickle-limit"} == codes(validate(str(tmp_path / "c.pt")))
