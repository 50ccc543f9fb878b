"""Sharded `.bin` weights and their index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckpttools.operations.validate import validate
from tests.layouts.contract import LayoutContract, codes
from tests.unit.containers.torch_bytes import saved

ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


class TestContract(LayoutContract):
    layout = "hf_bin"
    cases = ("hf4_gpt2_bin_sharded", "accelerate_save_model_bin_sharded")
    harmed = ("hf4_gpt2_bin_sharded", "pytorch_model-00001-of-00004.bin")


def write(directory: Path, index: object) -> str:
    (directory / ONE).write_bytes(saved({"a": torch.ones(2)}))
    (directory / TWO).write_bytes(saved({"b": torch.ones(3)}))
    text = index if isinstance(index, str) else json.dumps(index)
    (directory / "pytorch_model.bin.index.json").write_text(text)
    return str(directory)


def index(**weight_map: str) -> dict[str, object]:
    return {"metadata": {"total_size": 20}, "weight_map": weight_map}


class TestIndex:
    def test_index_that_agrees_has_no_finding(self, tmp_path):
        assert set() == codes(validate(write(tmp_path, index(a=ONE, b=TWO))))

    def test_name_in_another_file_than_the_index_says_is_a_mismatch(self, tmp_path):
        assert "index-mismatch" in codes(validate(write(tmp_path, index(a=TWO, b=TWO))))

    def test_name_that_the_index_lacks_is_found(self, tmp_path):
        assert codes(validate(write(tmp_path, index(a=ONE)))) & {"not-in-index", "unreferenced-file"}

    def test_file_that_is_not_there_is_missing(self, tmp_path):
        found = codes(validate(write(tmp_path, index(a=ONE, b="pytorch_model-00003-of-00002.bin"))))
        assert found & {"missing-file", "index-mismatch"}

    @pytest.mark.parametrize("file", ["../x.bin", "/etc/passwd", "sub/../../x.bin"])
    def test_file_outside_is_never_read(self, tmp_path, file):
        assert "reference-outside" in codes(validate(write(tmp_path, index(a=ONE, b=file))))

    @pytest.mark.parametrize("text", ["", "[" * 100_000, "{}", "[]", "nonsense", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
    def test_index_that_does_not_read_is_bad_json(self, tmp_path, text):
        assert codes(validate(write(tmp_path, text))) & {"bad-json", "index-mismatch", "empty-file"}

    def test_number_of_five_thousand_digits_is_no_exception(self, tmp_path):
        text = '{"metadata": {"total_size": ' + "9" * 5000 + '}, "weight_map": {"a": "' + ONE + '", "b": "' + TWO + '"}}'
        assert codes(validate(write(tmp_path, text)))

    def test_directory_in_the_place_of_the_index_is_answered(self, tmp_path):
        write(tmp_path, {})
        (tmp_path / "pytorch_model.bin.index.json").unlink()
        (tmp_path / "pytorch_model.bin.index.json").mkdir()
        assert "ok" == validate(str(tmp_path)).verdict
