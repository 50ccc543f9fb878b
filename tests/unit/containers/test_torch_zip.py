"""The zip archive of torch.save: every mutation by which readers are led to different bytes has its finding."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile

import pytest
import torch

from tests.unit.containers.torch_bytes import checked, codes, rezipped, saved, values

TENSORS = {"w": torch.arange(300.0), "v": torch.ones(200)}
PLAIN = saved(TENSORS)
END = PLAIN.rfind(b"PK\x05\x06")
END64 = PLAIN.rfind(b"PK\x06\x06")
LOCATOR = PLAIN.rfind(b"PK\x06\x07")
(DIRECTORY,) = struct.unpack_from("<Q", PLAIN, END64 + 48)


def payload(name: str) -> int:
    """First byte of a member's data."""
    with zipfile.ZipFile(io.BytesIO(PLAIN)) as archive:
        header = archive.getinfo(f"archive/{name}").header_offset
    names, extra = struct.unpack_from("<HH", PLAIN, header + 26)
    return header + 30 + names + extra


def header(name: str) -> int:
    with zipfile.ZipFile(io.BytesIO(PLAIN)) as archive:
        return archive.getinfo(f"archive/{name}").header_offset


def row(name: str) -> int:
    """The entry of a member in the central directory."""
    return PLAIN.index(b"archive/" + name.encode(), DIRECTORY) - 46


def put(offset: int, data: bytes) -> bytes:
    return PLAIN[:offset] + data + PLAIN[offset + len(data) :]


def flip(offset: int) -> bytes:
    return put(offset, bytes([PLAIN[offset] ^ 1]))


def without_checksums() -> bytes:
    data = bytearray(PLAIN)
    at = DIRECTORY
    while data[at : at + 4] == b"PK\x01\x02":
        data[at + 16 : at + 20] = bytes(4)
        names, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        at += 46 + names + extra + comment
    for found in [i for i in range(DIRECTORY) if data[i : i + 4] == b"PK\x07\x08"]:
        data[found + 4 : found + 8] = bytes(4)
    return bytes(data)


def appended(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO(PLAIN)
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(name, content)
    return buffer.getvalue()


def changed(name: str, content: bytes) -> bytes:
    return rezipped(PLAIN, lambda members: members.__setitem__(f"archive/{name}", content))


def renamed(old: str, new: str) -> bytes:
    def change(members: dict[str, bytes]) -> None:
        members[new] = members.pop(f"archive/{old}")

    return rezipped(PLAIN, change)


VALUES = {"w": 4 * 300, "v": 4 * 200}
MUTATIONS = {
    "payload byte flipped": (flip(payload("data/0") + 5), "checksum-mismatch"),
    "pickle byte flipped": (flip(payload("data.pkl") + 1), "checksum-mismatch"),
    "CRC in the directory altered": (flip(row("data/0") + 16), "checksum-mismatch"),
    "name in the local header altered": (put(header("data/0") + 30, b"archive/data/9"), "bad-container"),
    "the same record appended with other bytes": (appended("archive/data/0", bytes(1200)), "duplicate-name"),
    "a record that differs in case alone": (appended("archive/DATA/0", bytes(1200)), "duplicate-name"),
    "record shorter than the pickle says": (changed("data/0", bytes(1196)), "storage-mismatch"),
    "record longer than the pickle says": (changed("data/0", bytes(1204)), "storage-mismatch"),
    "record of the tensor absent": (renamed("data/0", "archive/data/7"), "bad-container"),
    "DATA/0 instead of data/0": (renamed("data/0", "archive/DATA/0"), "bad-container"),
    "record outside of the top folder": (renamed("data/0", "elsewhere/data/0"), "bad-container"),
    "data.pkl absent": (renamed("data.pkl", "archive/data.txt"), "bad-container"),
    "version absent": (renamed("version", "archive/revision"), "bad-container"),
    "junk in front": (b"junk" + PLAIN, "bad-pickle"),
    "junk appended": (PLAIN + bytes(40), "trailing-bytes"),
    "a whole archive appended": (PLAIN + PLAIN, "bad-container"),
    "cut by 10 bytes": (PLAIN[:-10], "file-too-short"),
    "cut in half": (PLAIN[: len(PLAIN) // 2], "file-too-short"),
    "only the magic left": (PLAIN[:4], "file-too-short"),
    "empty": (b"", "empty-file"),
    "byteorder that is neither": (changed("byteorder", b"middle"), "bad-container"),
    "encryption bit set": (put(row("data/0") + 8, b"\x09\x08"), "bad-container"),
    "unknown method": (put(row("data/0") + 10, b"\x63\0"), "bad-container"),
    "stored with two lengths": (put(row("data/0") + 24, struct.pack("<I", 9999)), "bad-container"),
    "header behind the directory": (put(row("data/0") + 42, struct.pack("<I", len(PLAIN) - 5)), "bad-container"),
    "two members at one place": (put(row("data/1") + 42, struct.pack("<I", header("data/0"))), "bad-container"),
    "directory row without its magic": (put(row("data/0"), b"XX"), "bad-container"),
    "end records that disagree about the directory": (put(END + 16, struct.pack("<I", 64)), "bad-container"),
    "locator that points nowhere": (put(LOCATOR + 8, struct.pack("<Q", 2**64 - 1)), "bad-container"),
    "locator that points to something else": (put(LOCATOR + 8, bytes(8)), "bad-container"),
    "more members than there can be": (put(END64 + 24, struct.pack("<QQ", 2**63, 2**63)), "bad-container"),
    "directory longer than the file": (put(END64 + 40, struct.pack("<Q", 2**62)), "bad-container"),
    "archive over several disks": (put(END + 4, b"\1\0"), "bad-container"),
    "length in the data descriptor altered": (flip(payload("data/0") + 1200 + 8), "bad-container"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_has_its_finding(name, tmp_path):
    data, code = MUTATIONS[name]
    result = checked(tmp_path, data)
    assert code in codes(result)
    assert "damaged" == result.verdict


class TestSound:
    def test_file_as_torch_wrote_it_has_no_finding(self, tmp_path):
        assert set() == codes(checked(tmp_path, PLAIN))

    def test_file_written_again_by_python_has_no_finding(self, tmp_path):
        assert set() == codes(checked(tmp_path, rezipped(PLAIN)))

    def test_record_that_nothing_refers_to_is_no_error(self, tmp_path):
        assert "ok" == checked(tmp_path, appended("archive/data/99", b"more")).verdict

    def test_comment_at_the_end_of_the_archive_is_no_error(self, tmp_path):
        assert "ok" == checked(tmp_path, PLAIN[:-2] + struct.pack("<H", 5) + b"hello").verdict

    def test_checksum_of_a_descriptor_alone_is_a_warning(self, tmp_path):
        result = checked(tmp_path, flip(payload("data/0") + 1200 + 4))
        assert ({"container-inconsistent"}, "ok") == (codes(result), result.verdict)

    @pytest.mark.parametrize("alignment", [1, 64, 4096])
    def test_any_storage_alignment_is_read(self, alignment, tmp_path):
        from torch.utils.serialization import config

        before = config.save.storage_alignment
        config.save.storage_alignment = alignment
        try:
            data = saved(TENSORS)
        finally:
            config.save.storage_alignment = before
        assert VALUES == {name: len(found[2]) for name, found in values(tmp_path, data).items()}


class TestChecksumsOff:
    def test_all_zero_checksums_are_a_note_and_not_damage(self, tmp_path):
        result = checked(tmp_path, without_checksums())
        assert ({"checksums-off"}, "ok") == (codes(result), result.verdict)

    def test_files_of_torch_with_checksums_switched_off_are_sound(self, tmp_path):
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            data = saved(TENSORS)
        finally:
            torch.serialization.set_crc32_options(before)
        result = checked(tmp_path, data)
        assert ({"checksums-off"}, "ok") == (codes(result), result.verdict)

    def test_flipped_bit_cannot_be_seen_then_and_the_note_says_so(self, tmp_path):
        data = bytearray(without_checksums())
        data[payload("data/0")] ^= 1
        assert {"checksums-off"} == codes(checked(tmp_path, bytes(data)))


class TestDeflated:
    def test_values_are_those_of_the_stored_file(self, tmp_path):
        assert values(tmp_path, PLAIN) == values(tmp_path, rezipped(PLAIN, method=zipfile.ZIP_DEFLATED))

    def test_it_has_no_finding(self, tmp_path):
        assert "ok" == checked(tmp_path, rezipped(PLAIN, method=zipfile.ZIP_DEFLATED)).verdict

    def test_flipped_bit_in_the_compressed_bytes_is_found(self, tmp_path):
        data = bytearray(rezipped(PLAIN, method=zipfile.ZIP_DEFLATED))
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = archive.getinfo("archive/data/0")
        data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 16
        assert "damaged" == checked(tmp_path, bytes(data)).verdict

    def test_pickle_that_grows_a_thousandfold_is_refused(self, tmp_path):
        bomb = b"\x80\x02" + b"]" * (1 << 25) + b"."
        data = rezipped(PLAIN, lambda m: m.__setitem__("archive/data.pkl", bomb), method=zipfile.ZIP_DEFLATED)
        assert {"pickle-limit"} == codes(checked(tmp_path, data))
