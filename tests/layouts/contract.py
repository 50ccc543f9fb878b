"""What holds of every layout, whatever its files look like; each layout's tests inherit it and name their fixtures.

A subclass says which cases are its own, and which of their files may be harmed: a data file, so that each kind of damage
is tried where the layout would meet it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttools.findings import CODES
from ckpttools.geometry import cover
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.model import Piece
from ckpttools.operations.sealing import hash_tensors
from ckpttools.operations.validate import Validation, validate
from tests.fixture_cases import Case, Target

READ_ONLY_DEPTHS = ("commit", "structure", "full")


def targets(*names: str, family: str = "torch") -> list[tuple[Case, Target]]:
    """Every path of some cases that holds tensors."""
    return [(case, target) for name in names for case in [Case(family, name)] for target in case.targets()]


def pieces(snapshot: Snapshot) -> Iterator[Piece]:
    for entry in snapshot.checkpoint.tensors:
        yield from (*entry.pieces, *entry.replicas)


def codes(result: Validation) -> set[str]:
    return {f.code for f in result.findings}


class LayoutContract:
    """Inherit, and set these."""

    layout: str
    family = "torch"
    """Folder of the fixtures."""
    cases: tuple[str, ...]
    """Sound fixtures."""
    harmed: tuple[str, str]
    """(case, data file relative to the snapshot) that damage is tried on."""

    @pytest.fixture
    def copied(self, copy_of) -> Path:
        """A copy of the snapshot that may be harmed."""
        (_, target), *_ = self.targets(self.harmed[0])
        return copy_of(target.path)

    @pytest.fixture
    def data_file(self, copied: Path) -> Path:
        return copied / self.harmed[1]

    def targets(self, *names: str) -> list[tuple[Case, Target]]:
        return targets(*names or self.cases, family=self.family)

    def opened(self) -> Iterator[tuple[Target, Snapshot]]:
        for _, target in self.targets():
            yield target, open_snapshot(str(target.path), is_located=True)

    def test_fixtures_are_recognised_as_this_layout(self):
        assert {self.layout} == {s.checkpoint.layout for _, s in self.opened()}

    def test_fixtures_have_no_error(self):
        assert [] == [f for _, s in self.opened() for f in s.checkpoint.findings if f.is_error]

    def test_fixtures_are_committed(self):
        assert all(s.checkpoint.commit.is_committed for _, s in self.opened())

    def test_tensors_of_the_truth_are_there_with_their_digests(self):
        for case, target in self.targets():
            listed = hash_tensors(str(target.path), algorithm="sha256").tensors
            lines = [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "digest": t.digest} for t in listed]
            assert [] == case.missing(target.tensors, lines)

    def test_digests_are_those_of_sha256_over_the_bytes_alone(self):
        _, target = self.targets()[0]
        listed = hash_tensors(str(target.path), algorithm="sha256")
        wanted = {digest for expected in target.tensors.values() for digest in expected.digests}
        assert wanted & {t.digest for t in listed.tensors} - {hashlib.sha256(b"").hexdigest()}

    def test_pieces_tile_their_tensors(self):
        for _, snapshot in self.opened():
            assert all(cover(t.spec.shape, [p.box for p in t.pieces]).is_exact for t in snapshot.checkpoint.tensors)

    def test_extents_lie_inside_their_files(self):
        for _, snapshot in self.opened():
            outside = [
                p
                for p in pieces(snapshot)
                if p.extent.encoding is None and p.extent.offset + p.extent.length > snapshot.listing.length_bytes(p.extent.file)
            ]
            assert [] == outside

    def test_dense_extents_are_as_long_as_their_boxes(self):
        for _, snapshot in self.opened():
            for entry in snapshot.checkpoint.tensors:
                for piece in entry.pieces:
                    if piece.extent.strides is None:
                        assert entry.spec.dtype.length_bytes(piece.box.volume) == piece.extent.length

    def test_every_file_is_listed_once_with_its_length(self):
        for _, snapshot in self.opened():
            listed = {f.path: f.length_bytes for f in snapshot.checkpoint.files}
            assert {f.path: f.length_bytes for f in snapshot.listing} == listed
            assert len(listed) == len(snapshot.checkpoint.files)

    def test_opening_twice_gives_the_same(self):
        _, target = self.targets()[0]
        one, other = (open_snapshot(str(target.path), is_located=True).checkpoint for _ in range(2))
        assert (one.tensors, one.files, one.findings) == (other.tensors, other.files, other.findings)

    def test_reading_writes_nothing(self, copied):
        before = {p: p.stat().st_mtime_ns for p in copied.rglob("*")}
        validate(str(copied))
        assert before == {p: p.stat().st_mtime_ns for p in copied.rglob("*")}

    @pytest.mark.parametrize("depth", READ_ONLY_DEPTHS)
    def test_sound_copy_is_ok_at_every_depth(self, copied, depth):
        assert "ok" == validate(str(copied), depth=depth).verdict

    def test_missing_data_file_makes_it_incomplete(self, data_file, copied):
        data_file.unlink()
        assert "incomplete" == validate(str(copied)).verdict

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
    def test_truncated_data_file_is_found(self, data_file, copied, share):
        data_file.write_bytes(data_file.read_bytes()[: int(data_file.stat().st_size * share)])
        result = validate(str(copied))
        assert ("damaged", True) == (result.verdict, bool(codes(result) & {"file-too-short", "bad-pickle", "bad-container"}))

    def test_empty_data_file_is_found(self, data_file, copied):
        data_file.write_bytes(b"")
        assert "empty-file" in codes(validate(str(copied)))

    def test_zeroed_data_file_is_found(self, data_file, copied):
        data_file.write_bytes(bytes(data_file.stat().st_size))
        assert "damaged" == validate(str(copied)).verdict

    def test_flipped_bit_in_the_middle_is_found(self, data_file, copied):
        data = bytearray(data_file.read_bytes())
        data[len(data) // 2] ^= 4
        data_file.write_bytes(data)
        assert validate(str(copied)).verdict in ("damaged", "ok")  # padding may be hit; nothing else is ever raised

    def test_pipe_in_the_place_of_a_data_file_is_never_opened(self, data_file, copied):
        import os

        data_file.unlink()
        os.mkfifo(data_file)
        assert validate(str(copied)).verdict in ("incomplete", "damaged")

    def test_directory_in_the_place_of_a_data_file_is_found(self, data_file, copied):
        data_file.unlink()
        data_file.mkdir()
        assert validate(str(copied)).verdict in ("incomplete", "damaged")

    def test_link_to_a_data_file_elsewhere_is_followed(self, data_file, copied, tmp_path):
        elsewhere = data_file.rename(tmp_path / "elsewhere")
        data_file.symlink_to(elsewhere)
        assert "ok" == validate(str(copied)).verdict

    def test_link_that_leads_nowhere_is_found(self, data_file, copied):
        data_file.unlink()
        data_file.symlink_to("nowhere")
        assert validate(str(copied)).verdict in ("incomplete", "damaged")

    def test_codes_of_what_is_found_are_in_the_table(self, data_file, copied):
        data_file.write_bytes(b"x")
        assert codes(validate(str(copied))) <= set(CODES)
