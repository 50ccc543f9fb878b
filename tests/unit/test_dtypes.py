"""THE table of dtypes agrees with itself, with torch where it is installed, and with safetensors' own parser."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import dtypes
from ckpttools.dtypes import BY_NAME, BY_SAFETENSORS, BY_STORAGE_CLASS, TABLE, parse_dtype

KINDS = {"float", "complex", "int", "uint", "bool", "quantized"}
NOT_IN_TORCH = {"float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"}


def repeated(values):
    return [value for value, count in Counter(values).items() if count > 1]


class TestTable:
    @pytest.mark.parametrize("column", ["name", "safetensors", "storage_class"])
    def test_no_two_rows_share_a_name_or_a_code(self, column):
        assert [] == repeated(filter(None, (getattr(row, column) for row in TABLE)))

    @pytest.mark.parametrize("row", TABLE, ids=str)
    def test_row_is_found_by_each_of_its_names(self, row):
        assert row is BY_NAME[row.name]
        assert not row.safetensors or row is BY_SAFETENSORS[row.safetensors]
        assert not row.storage_class or row is BY_STORAGE_CLASS[row.storage_class]

    @pytest.mark.parametrize("row", TABLE, ids=str)
    def test_kind_is_one_of_those_documented(self, row):
        assert row.kind in KINDS

    @pytest.mark.parametrize("row", TABLE, ids=str)
    def test_what_is_called_floating_is_of_kind_float(self, row):
        assert row.is_floating == (row.kind == "float")

    @pytest.mark.parametrize("row", [r for r in TABLE if not r.is_sub_byte], ids=str)
    def test_what_a_big_endian_file_swaps_divides_the_element(self, row):
        parts = 2 if row.kind == "complex" else 1
        assert row.item_bytes == parts * row.component_bytes

    @pytest.mark.parametrize("row", [r for r in TABLE if r.is_sub_byte], ids=str)
    def test_sub_byte_row_has_no_width_in_bytes(self, row):
        with pytest.raises(ValueError, match=f"{row.bits} bits wide"):
            _ = row.item_bytes

    @given(st.sampled_from(TABLE), st.integers(0, 10**15))
    def test_length_is_the_bits_in_whole_bytes(self, row, volume):
        assert 0 <= row.length_bytes(volume) * 8 - volume * row.bits < 8


class TestParse:
    @pytest.mark.parametrize("row", TABLE, ids=str)
    def test_row_is_read_from_what_it_prints(self, row):
        assert row is parse_dtype(str(row))

    @pytest.mark.parametrize("row", TABLE, ids=str)
    def test_prefix_of_torch_changes_nothing(self, row):
        assert row is parse_dtype(f"torch.{row}")

    @pytest.mark.parametrize("text", ["", "float33", "torch.", "Float32", "torch.torch.float32", "F32", "fp8", "float32 "])
    def test_what_the_table_does_not_have_is_refused(self, text):
        with pytest.raises(ValueError, match="unknown dtype") as refusal:
            parse_dtype(text)
        assert f"`{text}`" in str(refusal.value)

    def test_no_alias_hides_a_row(self):
        assert set() == set(dtypes._ALIASES) & set(BY_NAME)


class TestAgainstTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    def test_every_dtype_of_torch_is_in_the_table(self, torch):
        assert set() == {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)} - set(BY_NAME)

    def test_every_row_but_the_sub_byte_ones_is_a_dtype_of_torch(self, torch):
        assert NOT_IN_TORCH == {row.name for row in TABLE if not isinstance(getattr(torch, row.name, None), torch.dtype)}

    @pytest.mark.parametrize("name", sorted(set(BY_NAME) - NOT_IN_TORCH))
    def test_width_and_kind_are_torchs(self, torch, name):
        theirs, ours = getattr(torch, name), BY_NAME[name]
        assert (theirs.itemsize, theirs.is_floating_point, theirs.is_complex) == (
            ours.item_bytes,
            ours.kind == "float",
            ours.kind == "complex",
        )

    @pytest.mark.parametrize("alias", sorted(set(dtypes._ALIASES) - {"fp32", "fp16", "bf16"}))
    def test_alias_means_what_it_means_in_torch(self, torch, alias):
        assert str(getattr(torch, alias)) == f"torch.{parse_dtype(alias)}"

    @pytest.mark.parametrize("storage_class", sorted(BY_STORAGE_CLASS))
    def test_storage_class_holds_the_dtype_of_its_row(self, torch, storage_class):
        theirs = getattr(torch, storage_class)
        assert str(theirs._dtype if hasattr(theirs, "_dtype") else theirs().dtype) == f"torch.{BY_STORAGE_CLASS[storage_class]}"

    def test_every_storage_class_of_torch_is_in_the_table(self, torch):
        legacy = {n for n, v in vars(torch).items() if isinstance(v, type) and issubclass(v, torch.storage._LegacyStorage)}
        assert legacy - {"Storage"} == set(BY_STORAGE_CLASS)


def header_of(data: bytes) -> dict:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


class TestAgainstSafetensors:
    @pytest.mark.parametrize("code", sorted(BY_SAFETENSORS))
    def test_code_is_one_that_the_format_has(self, code):
        import safetensors

        bits = 4 if code == "F4" else BY_SAFETENSORS[code].bits  # F4 counts elements, torch's dtype counts pairs
        header = json.dumps({"x": {"dtype": code, "shape": [8], "data_offsets": [0, bits]}}).encode()
        ((_, entry),) = safetensors.deserialize(len(header).to_bytes(8, "little") + header + bytes(bits))
        assert (code, [8]) == (entry["dtype"], entry["shape"])

    def test_every_code_that_its_parser_names_is_in_the_table(self):
        import safetensors

        header = json.dumps({"x": {"dtype": "NONE", "shape": [], "data_offsets": [0, 0]}}).encode()
        with pytest.raises(safetensors.SafetensorError) as refusal:
            safetensors.deserialize(len(header).to_bytes(8, "little") + header)
        named = str(refusal.value).partition("expected one of ")[2].partition(" at line")[0]
        assert set(BY_SAFETENSORS) == {code.strip("` ") for code in named.split(",")}

    @pytest.mark.parametrize("name", [row.name for row in TABLE if row.safetensors and row.name not in NOT_IN_TORCH])
    def test_its_torch_writer_uses_the_code_of_the_row(self, name):
        torch = pytest.importorskip("torch")
        from safetensors.torch import save

        tensor = torch.zeros(16, dtype=torch.uint8).view(getattr(torch, name))
        assert BY_NAME[name].safetensors == header_of(save({"x": tensor}))["x"]["dtype"]
