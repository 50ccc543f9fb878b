"""Every dialect that torch.save and torch.jit.save write: each tensor has the bytes that it had in memory."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile

import pytest
import torch

from ckpttools.containers.torch_entries import open_rank_file
from ckpttools.containers.torch_file import KnownPickles
from ckpttools.storage.source import open_source
from tests.unit.containers.torch_bytes import as_torch, by_hand, checked, codes, rezipped, saved, tensor_pickle, values

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.complex32, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip
LEGACY = [d for d in DTYPES if d not in (torch.uint64, torch.uint32, torch.uint16, torch.complex32) and "float8" not in str(d)]


def bits(dtype: torch.dtype, count: int = 24) -> torch.Tensor:
    """A tensor of any dtype with all kinds of bit patterns, NaN among them."""
    if dtype == torch.bool:
        return torch.arange(count) % 3 == 0
    return (torch.arange(count * dtype.itemsize, dtype=torch.int32) * 37 % 256).to(torch.uint8).view(dtype)


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).reshape(3, 4, 5)
    return {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "slice": base[1:, ::2, 1:4],
        "scalar": base[2, 3, 4],
        "empty": base[3:],
        "expanded": base[0, 0, :1].expand(7, 3, 1),
        "channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }


def expected(tensors: dict[str, torch.Tensor]):
    return {name: as_torch(t) for name, t in tensors.items()}


class TestZip:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tensor_of_each_dtype_has_its_bytes(self, dtype, tmp_path):
        tensors = {"w": bits(dtype).reshape(2, 3, 4), "scalar": bits(dtype)[5], "empty": bits(dtype)[:0]}
        assert expected(tensors) == values(tmp_path, saved(tensors))

    def test_views_have_the_bytes_of_what_they_show(self, tmp_path):
        assert expected(views()) == values(tmp_path, saved(views()))

    def test_conjugate_and_negative_bits_are_applied(self, tmp_path):
        z = torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3)
        tensors = {"conj": z.conj(), "both": torch._neg_view(z.conj()), "t": z.conj().t()}
        assert expected(tensors) == values(tmp_path, saved(tensors))

    def test_imaginary_part_of_a_conjugate_is_negated(self, tmp_path):
        tensors = {"imag": torch.complex(torch.zeros(4), torch.arange(4.0)).conj().imag}
        assert expected(tensors) == values(tmp_path, saved(tensors))

    def test_negative_bit_of_integers_is_applied(self, tmp_path):
        tensors = {"w": torch._neg_view(torch.tensor([1, -2, 0, -(2**31)], dtype=torch.int32))}
        assert expected(tensors) == values(tmp_path, saved(tensors))

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_any_pickle_protocol_is_read(self, protocol, tmp_path):
        assert expected(views()) == values(tmp_path, saved(views(), pickle_protocol=protocol))

    def test_whole_module_has_the_names_of_its_state_dict(self, tmp_path):
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        assert expected(module.state_dict()) == values(tmp_path, saved(module))

    def test_parameters_are_the_tensors_in_them(self, tmp_path):
        parameter = torch.nn.Parameter(torch.arange(4.0))
        assert expected({"p": parameter}) == values(tmp_path, saved({"p": parameter}))

    def test_bare_tensor_is_one_entry(self, tmp_path):
        assert [as_torch(torch.arange(3))] == list(values(tmp_path, saved(torch.arange(3))).values())

    def test_int_keys_and_lists_are_part_of_the_name(self, tmp_path):
        value = {"state": {0: {"m": torch.ones(2)}}, "groups": [{"lr": 0.1}, torch.zeros(1)]}
        assert {"state.0.m", "groups.1"} == set(values(tmp_path, saved(value)))

    def test_keys_with_the_same_dotted_name_are_a_collision(self, tmp_path):
        result = checked(tmp_path, saved({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}))
        assert "name-collision" in codes(result)


class TestBigEndian:
    @pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
    def test_values_are_swapped_by_component(self, dtype, tmp_path):
        tensor = bits(dtype)
        width = dtype.itemsize // (2 if dtype.is_complex else 1)

        def swap(members: dict[str, bytes]) -> None:
            data = members["archive/data/0"]
            members["archive/data/0"] = b"".join(data[i : i + width][::-1] for i in range(0, len(data), width))
            members["archive/byteorder"] = b"big"

        assert expected({"w": tensor}) == values(tmp_path, rezipped(saved({"w": tensor}), swap))


class TestLegacyStream:
    @pytest.mark.parametrize("dtype", LEGACY, ids=str)
    def test_tensor_of_each_dtype_has_its_bytes(self, dtype, tmp_path):
        tensors = {"w": bits(dtype).reshape(2, 3, 4), "empty": bits(dtype)[:0]}
        assert expected(tensors) == values(tmp_path, saved(tensors, _use_new_zipfile_serialization=False))

    def test_views_have_the_bytes_of_what_they_show(self, tmp_path):
        assert expected(views()) == values(tmp_path, saved(views(), _use_new_zipfile_serialization=False))

    @pytest.mark.parametrize("cut", [1, 50, 300])
    def test_file_cut_in_its_storages_is_too_short(self, cut, tmp_path):
        data = saved({"w": torch.ones(100)}, _use_new_zipfile_serialization=False)
        assert "file-too-short" in codes(checked(tmp_path, data[:-cut]))

    def test_bytes_after_the_last_storage_are_a_finding(self, tmp_path):
        data = saved({"w": torch.ones(100)}, _use_new_zipfile_serialization=False)
        assert {"trailing-bytes"} == codes(checked(tmp_path, data + b"x"))

    @pytest.mark.parametrize("cut", [5, 20, 60, 200])
    def test_file_cut_in_its_pickles_is_a_bad_pickle(self, cut, tmp_path):
        data = saved({"w": torch.ones(100)}, _use_new_zipfile_serialization=False)
        assert {"bad-pickle"} == codes(checked(tmp_path, data[:cut]))

    def test_pickle_larger_than_the_first_read_is_read(self, tmp_path):
        value = {"w": torch.ones(2), "text": "x" * (3 << 20)}
        assert {"w"} == set(values(tmp_path, saved(value, _use_new_zipfile_serialization=False)))


class TestTorchScript:
    @pytest.fixture(scope="class")
    def module(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    def test_it_has_the_names_and_values_of_the_state_dict(self, module, tmp_path):
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.trace(module.eval(), torch.ones(2, 3)), buffer)
        found = values(tmp_path, buffer.getvalue())
        assert expected(module.state_dict()).items() <= found.items()


class TestRefused:
    def test_tar_of_the_first_releases_is_refused_by_name(self, tmp_path):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name in ("storages", "tensors", "pickle"):
                archive.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
        (finding,) = checked(tmp_path, buffer.getvalue()).findings
        assert ("unsupported-container", True) == (finding.code, "tar archive" in finding.found)

    def test_preview_format_is_refused_by_name(self, tmp_path):
        (finding,) = checked(tmp_path, b"PYTORCH1" + bytes(100)).findings
        assert ("unsupported-container", True) == (finding.code, "PYTORCH1" in finding.found)

    @pytest.mark.parametrize("data", [bytes(5000), b"\xff" * 5000, b"hello, world", b"PK\x05\x06" + bytes(18), b"\x80"])
    def test_what_is_no_torch_file_is_a_bad_pickle(self, data, tmp_path):
        assert {"bad-pickle"} == codes(checked(tmp_path, data))

    def test_plain_pickle_is_a_value_without_tensors(self, tmp_path):
        result = checked(tmp_path, pickle.dumps({"lr": 0.1}))
        assert ("ok", ["lr"]) == (result.verdict, [o.name for o in result.checkpoint.objects])


SIX = struct.pack("<6f", *range(6))
HOSTILE = {
    "numel that no file has": ({"numel": 2**62}, "storage-mismatch"),
    "numel below 0": ({"numel": -1}, "bad-pickle"),
    "numel beyond 64 bits": ({"numel": 2**200}, "bad-pickle"),
    "offset below 0": ({"offset": -1}, "bad-pickle"),
    "offset behind the storage": ({"offset": 6}, "storage-mismatch"),
    "offset beyond 64 bits": ({"offset": 2**64}, "bad-pickle"),
    "stride below 0": ({"offset": 5, "stride": (-1,)}, "bad-pickle"),
    "stride that leaves the storage": ({"stride": (2,)}, "storage-mismatch"),
    "stride that overflows": ({"size": (3, 3), "stride": (2**62, 2**62)}, "storage-mismatch"),
    "size below 0": ({"size": (-6,)}, "bad-pickle"),
    "sizes whose product overflows": ({"size": (2**32, 2**32, 2**32), "stride": (0, 0, 0)}, "amplification"),
    "a terabyte from four bytes": ({"size": (2**38,), "stride": (0,)}, "amplification"),
    "more sizes than strides": ({"size": (2, 3)}, "bad-pickle"),
    "rank beyond all reason": ({"size": (1,) * 100, "stride": (1,) * 100}, "bad-pickle"),
    "storage class that torch has not": ({"storage": "SecretStorage"}, "bad-pickle"),
    "untyped storage without a dtype": ({"storage": "UntypedStorage", "numel": 24}, "bad-pickle"),
    "key that is not in the file": ({"key": "1"}, "bad-container"),
    "key that leaves the archive": ({"key": "../../etc/passwd"}, "bad-container"),
}


class TestHostileNumbers:
    def test_the_file_that_they_vary_is_sound(self, tmp_path):
        assert set() == codes(checked(tmp_path, by_hand(tensor_pickle(), {"0": SIX})))

    @pytest.mark.parametrize("name", HOSTILE)
    def test_number_has_its_finding_and_no_bytes_are_made_up(self, name, tmp_path):
        numbers, code = HOSTILE[name]
        result = checked(tmp_path, by_hand(tensor_pickle(**numbers), {"0": SIX}))
        assert ({code}, 0) == (codes(result), len(result.checkpoint.tensors))

    @pytest.mark.parametrize("size", [(0,), (0, 2**63 - 1), (2**63 - 1, 0, 2**63 - 1)])
    def test_huge_shape_without_elements_is_read(self, size, tmp_path):
        data = by_hand(tensor_pickle(size=size, stride=(1,) * len(size), offset=2**40), {"0": SIX})
        assert {"w": ("float32", size, b"")} == values(tmp_path, data)

    def test_many_views_that_are_each_small_enough_are_not_together(self, tmp_path):
        from ckpttools.containers.torch_extents import Expansion

        expansion = Expansion(100)
        assert (None, "amplification") == (expansion.spend(60, "a"), expansion.spend(60, "b").code)


class TestComposites:
    def test_parts_of_a_sparse_tensor_are_tensors_under_its_name(self, tmp_path):
        sparse = torch.eye(3).to_sparse()
        wanted = {"s::indices": sparse.indices(), "s::values": sparse.values()}
        assert expected(wanted) == values(tmp_path, saved({"s": sparse}))

    @pytest.mark.filterwarnings("ignore:Sparse CSR")
    def test_parts_of_a_compressed_sparse_tensor_are_tensors_under_its_name(self, tmp_path):
        sparse = torch.eye(3).to_sparse_csr()
        wanted = {"s::crow_indices": sparse.crow_indices(), "s::col_indices": sparse.col_indices(), "s::values": sparse.values()}
        assert expected(wanted) == values(tmp_path, saved({"s": sparse}))

    def test_integers_of_a_quantized_tensor_are_a_tensor_under_its_name(self, tmp_path):
        quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8)
        assert expected({"q::int_repr": quantized.int_repr()}) == values(tmp_path, saved({"q": quantized}))

    def test_composite_is_listed_as_an_object_with_its_kind(self, tmp_path):
        result = checked(tmp_path, saved({"s": torch.eye(3).to_sparse()}))
        assert ["sparse_coo float32 [3, 3]"] == [o.kind for o in result.checkpoint.objects]

    def test_tensor_without_data_is_a_warning_and_no_tensor(self, tmp_path):
        result = checked(tmp_path, saved({"m": torch.empty(3, device="meta")}))
        assert ({"no-data"}, ()) == (codes(result), result.checkpoint.tensors)

    def test_part_that_does_not_read_is_a_finding_and_the_others_are_read(self, tmp_path):
        def change(members: dict[str, bytes]) -> None:
            members["archive/data.pkl"] = members["archive/data.pkl"].replace(b"LongStorage", b"LxngStorage")

        result = checked(tmp_path, rezipped(saved({"s": torch.eye(3).to_sparse()}), change))
        assert ({"bad-pickle"}, ["s::values"]) == (codes(result), [t.name for t in result.checkpoint])


class TestManyRanks:
    def test_files_with_the_same_pickle_have_one_value(self, tmp_path):
        source, known = open_source(str(tmp_path))[0], KnownPickles()
        for rank in range(3):
            torch.save({"w": torch.full((4,), float(rank)), "n": 1 if rank < 2 else 2}, tmp_path / f"{rank}.pt")
        files = [open_rank_file(source, f"{r}.pt", (tmp_path / f"{r}.pt").stat().st_size, r, known) for r in range(3)]
        one, same, other = (f.torch.value for f in files)
        assert (True, False) == (one is same, one is other)
        assert files[0].torch.checksums != files[1].torch.checksums

    def test_nothing_that_was_read_of_a_file_stays_in_memory(self, tmp_path):
        torch.save({"w": torch.ones(9)}, tmp_path / "f.pt")
        file = open_rank_file(open_source(str(tmp_path))[0], "f.pt", (tmp_path / "f.pt").stat().st_size)
        assert [] == file.region._cached
        assert b"PK" == file.region.read(0, 2)
