"""Scan: one pass gives every digest and every verdict on a checksum or a replica, and reads each byte once."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import StorageError
from ckpttools.layouts import open_snapshot
from ckpttools.model import Box, Checkpoint, Encoding, Extent, Piece, StoredChecksum, TensorEntry, TensorSpec
from ckpttools.operations.scan import Scan, scan
from tests.fixture_cases import FIXTURES


class CountingSource:
    """Files in memory, and how often each byte was read."""

    location = "memory"

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.counts: Counter[tuple[str, int]] = Counter()

    def listing(self):
        raise NotImplementedError

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        data = self.files[file][offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise StorageError("a file became shorter while it was read", where=file, expected="more", found="less")
        buffer[:] = data
        self.counts.update((file, at) for at in range(offset, offset + len(buffer)))

    @property
    def times_read(self) -> set[int]:
        return set(self.counts.values())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensor(name: str, file: str, offset: int, length: int, *more: tuple[str, int, int], replicas: tuple[Piece, ...] = ()):
    """A uint8 vector whose pieces lie at (file, offset, length), one after the other."""
    pieces, start = [], 0
    for rank, (where, at, count) in enumerate([(file, offset, length), *more]):
        pieces.append(Piece(Box((start,), (count,)), Extent(where, at, count), rank))
        start += count
    return TensorEntry(TensorSpec(name, BY_NAME["uint8"], (start,)), (name,), tuple(pieces), replicas)


def checksum(file: str, data: bytes, offset: int, length: int, *, wrong: bool = False) -> StoredChecksum:
    return StoredChecksum(file, offset, length, zlib.crc32(data[offset : offset + length]) ^ wrong, f"data/{offset}")


def checkpoint(*tensors: TensorEntry, checksums: tuple[StoredChecksum, ...] = ()) -> Checkpoint:
    return Checkpoint("memory", "torch", tensors, checksums=checksums)


def scanned(source, opened: Checkpoint, **wanted) -> Scan:
    return scan(source, opened, algorithm="sha256", **wanted)


def codes(result: Scan) -> list[str]:
    return [f.code for f in result.findings]


DATA = bytes(range(256)) * 4


class TestDigests:
    def test_digest_is_over_the_bytes_of_the_tensor_alone(self):
        result = scanned(CountingSource(f=DATA), checkpoint(tensor("w", "f", 3, 10)))
        assert {"w": sha256(DATA[3:13])} == {n: d.digest for n, d in result.digests.items()}

    def test_digest_of_a_tensor_in_pieces_is_that_of_the_whole(self):
        source = CountingSource(a=DATA, b=DATA)
        result = scanned(source, checkpoint(tensor("w", "a", 100, 4, ("b", 7, 9))))
        assert sha256(DATA[100:104] + DATA[7:16]) == result.digests["w"].digest

    def test_digest_of_an_empty_tensor_is_that_of_no_bytes(self):
        result = scanned(CountingSource(f=b""), checkpoint(tensor("w", "f", 0, 0)))
        assert sha256(b"") == result.digests["w"].digest

    def test_digests_come_in_the_order_of_the_checkpoint_not_of_the_file(self):
        result = scanned(CountingSource(f=DATA), checkpoint(tensor("z", "f", 50, 2), tensor("a", "f", 0, 2)))
        assert ["z", "a"] == list(result.digests)

    def test_piece_digests_are_per_name_and_box(self):
        source = CountingSource(a=DATA, b=DATA)
        result = scanned(source, checkpoint(tensor("w", "a", 0, 4, ("b", 8, 2))), pieces=True)
        assert {
            ("w", Box((0,), (4,))): sha256(DATA[:4]),
            ("w", Box((4,), (2,))): sha256(DATA[8:10]),
        } == result.piece_digests

    def test_only_the_chosen_tensors_are_read(self):
        first, second = tensor("a", "f", 0, 4), tensor("b", "f", 4, 4)
        source = CountingSource(f=DATA)
        result = scanned(source, checkpoint(first, second), tensors=[second])
        assert (["b"], {("f", i) for i in range(4, 8)}) == (list(result.digests), set(source.counts))


class TestChecksums:
    def test_record_with_its_checksum_is_no_finding(self):
        opened = checkpoint(tensor("w", "f", 0, 64), checksums=(checksum("f", DATA, 0, 64),))
        assert [] == codes(scanned(CountingSource(f=DATA), opened, checksums=True))

    def test_record_without_its_checksum_is_a_finding(self):
        opened = checkpoint(tensor("w", "f", 0, 64), checksums=(checksum("f", DATA, 0, 64, wrong=True),))
        assert ["checksum-mismatch"] == codes(scanned(CountingSource(f=DATA), opened, checksums=True))

    def test_record_that_no_tensor_refers_to_is_checked_too(self):
        opened = checkpoint(tensor("w", "f", 0, 64), checksums=(checksum("f", DATA, 100, 20, wrong=True),))
        assert ["checksum-mismatch"] == codes(scanned(CountingSource(f=DATA), opened, checksums=True))

    def test_empty_record_is_checked(self):
        opened = checkpoint(checksums=(StoredChecksum("f", 0, 0, 1, "data/0"),))
        assert ["checksum-mismatch"] == codes(scanned(CountingSource(f=DATA), opened, checksums=True))

    def test_checksums_are_not_looked_at_unless_asked_for(self):
        opened = checkpoint(tensor("w", "f", 0, 64), checksums=(checksum("f", DATA, 0, 64, wrong=True),))
        assert [] == codes(scanned(CountingSource(f=DATA), opened))

    @given(
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), min_size=1, max_size=5),
        st.lists(st.integers(0, 40), min_size=1, max_size=6),
        st.integers(0, 5),
    )
    def test_verdict_does_not_depend_on_which_tensors_view_the_record(self, views, lengths, bad):
        edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        sums = tuple(checksum("f", DATA, e, n, wrong=i == bad) for i, (e, n) in enumerate(zip(edges, lengths, strict=False)))
        tensors = [tensor(f"t{i}", "f", offset, length) for i, (offset, length) in enumerate(views)]
        fused = scanned(CountingSource(f=DATA), checkpoint(*tensors, checksums=sums), checksums=True)
        apart = scanned(CountingSource(f=DATA), checkpoint(checksums=sums), checksums=True)
        assert sorted(f.where for f in apart.findings) == sorted(f.where for f in fused.findings)

    def test_checksum_of_a_compressed_record_is_over_its_decoded_bytes(self):
        packed = zlib.compressobj(wbits=-15)
        stored = packed.compress(DATA) + packed.flush()
        encoding = Encoding("deflate", 0, len(stored), len(DATA))
        sums = (StoredChecksum("f", 0, len(DATA), zlib.crc32(DATA), "data/0", encoding),)
        piece = Piece(Box((0,), (10,)), Extent("f", 5, 10, encoding=encoding))
        entry = TensorEntry(TensorSpec("w", BY_NAME["uint8"], (10,)), ("w",), (piece,))
        result = scanned(CountingSource(f=stored), checkpoint(entry, checksums=sums), checksums=True)
        assert ([], sha256(DATA[5:15])) == (codes(result), result.digests["w"].digest)


class TestEachByteOnce:
    def test_tensor_that_fills_its_record_is_read_once(self):
        source = CountingSource(f=DATA)
        scanned(source, checkpoint(tensor("w", "f", 0, 1024), checksums=(checksum("f", DATA, 0, 1024),)), checksums=True)
        assert {1} == source.times_read

    def test_tensors_that_are_views_of_one_record_are_read_once(self):
        source = CountingSource(f=DATA)
        views = [tensor("b", "f", 512, 512), tensor("a", "f", 0, 512)]
        scanned(source, checkpoint(*views, checksums=(checksum("f", DATA, 0, 1024),)), checksums=True)
        assert ({1}, 1024) == (source.times_read, len(source.counts))

    def test_view_that_leaves_out_the_end_of_its_record_is_read_once(self):
        source = CountingSource(f=DATA)
        opened = checkpoint(tensor("w", "f", 0, 100), checksums=(checksum("f", DATA, 0, 1024),))
        assert [] == codes(scanned(source, opened, checksums=True))
        assert ({1}, 1024) == (source.times_read, len(source.counts))

    def test_tied_tensors_are_read_once(self):
        source = CountingSource(f=DATA)
        result = scanned(source, checkpoint(tensor("a", "f", 0, 64), tensor("b", "f", 0, 64)))
        assert ({1}, result.digests["a"].digest) == (source.times_read, result.digests["b"].digest)

    def test_tensor_in_pieces_over_files_is_read_once(self):
        source = CountingSource(a=DATA, b=DATA)
        sums = (checksum("a", DATA, 0, 64), checksum("b", DATA, 64, 64))
        opened = checkpoint(tensor("w", "a", 0, 64, ("b", 64, 64)), checksums=sums)
        assert [] == codes(scanned(source, opened, checksums=True))
        assert {1} == source.times_read

    def test_tensor_in_one_piece_needs_no_second_read_for_its_pieces_digest(self):
        source = CountingSource(f=DATA)
        scanned(source, checkpoint(tensor("w", "f", 0, 64)), pieces=True)
        assert {1} == source.times_read

    @pytest.mark.parametrize("name", ["dcp_fsdp2_tp_2x2", "save_zip_many_tensors", "dcp_hsdp_2x2", "hf4_gpt2_bin_sharded"])
    def test_fixtures_are_read_once_outside_of_their_headers(self, name):
        snapshot = open_snapshot(str(FIXTURES / "torch" / name / "ckpt"), is_located=True)
        if name == "save_zip_many_tensors":
            snapshot = open_snapshot(str(next((FIXTURES / "torch" / name / "ckpt").glob("*.pt"))), is_located=True)
        counts: Counter[tuple[str, int]] = Counter()
        inner = snapshot.source

        class Counting:
            location = inner.location
            listing = inner.listing

            def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
                inner.read_into(file, offset, buffer)
                counts.update((file, at) for at in range(offset, offset + len(buffer)))

        scanned(Counting(), snapshot.checkpoint, checksums=True, replicas=True)
        assert {1} == set(counts.values())


def with_replica(data: bytes, start: int = 0, stop: int = 8) -> tuple[CountingSource, Checkpoint]:
    replica = Piece(Box((start,), (stop - start,)), Extent("b", 0, stop - start), 1)
    return CountingSource(a=DATA, b=data), checkpoint(tensor("w", "a", 0, 8, replicas=(replica,)))


class TestReplicas:
    def test_equal_copies_are_no_finding(self):
        assert [] == codes(scanned(*with_replica(DATA[:8]), replicas=True))

    def test_copy_with_another_bit_is_a_finding_that_names_both_files(self):
        result = scanned(*with_replica(b"\x01" + DATA[1:8]), replicas=True)
        assert ["replica-mismatch"] == codes(result)
        assert "a (rank 0) and b (rank 1)" in result.findings[0].where

    def test_copy_of_a_part_is_compared_with_that_part(self):
        assert [] == codes(scanned(*with_replica(DATA[2:5], 2, 5), replicas=True))

    def test_minus_zero_is_not_zero(self):
        spec = TensorSpec("w", BY_NAME["float32"], (1,))
        box = Box((0,), (1,))
        entry = TensorEntry(spec, ("w",), (Piece(box, Extent("a", 0, 4), 0),), replicas=(Piece(box, Extent("b", 0, 4), 1),))
        source = CountingSource(a=b"\0\0\0\0", b=b"\0\0\0\x80")
        assert ["replica-mismatch"] == codes(scanned(source, checkpoint(entry), replicas=True))

    def test_copy_that_ends_early_is_unreadable_and_not_different(self):
        assert ["unreadable-file"] == codes(scanned(*with_replica(DATA[:3]), replicas=True))

    def test_copies_are_not_read_unless_asked_for(self):
        source, opened = with_replica(b"")
        assert [] == codes(scanned(source, opened))


class TestJobs:
    @pytest.mark.parametrize("jobs", [1, 2, 4])
    def test_result_is_the_same_however_many_threads(self, jobs):
        files = {f"f{i}": DATA[i:] for i in range(8)}
        tensors = [tensor(f"t{i}", f"f{i}", 0, 100, (f"f{(i + 1) % 8}", 200, 50)) for i in range(8)]
        sums = tuple(checksum(f"f{i}", files[f"f{i}"], o, 100, wrong=i == 3) for i in range(8) for o in (0, 200))
        opened = checkpoint(*tensors, checksums=sums)
        result = scanned(CountingSource(**files), opened, checksums=True, pieces=True, jobs=jobs)
        expected = scanned(CountingSource(**files), opened, checksums=True, pieces=True, jobs=1)
        assert (expected.digests, expected.piece_digests, expected.findings, expected.bytes_read) == (
            result.digests,
            result.piece_digests,
            result.findings,
            result.bytes_read,
        )


class TestDamage:
    def test_file_that_shrank_is_a_finding_that_names_tensor_and_file(self):
        result = scanned(CountingSource(f=DATA[:5]), checkpoint(tensor("w", "f", 0, 64)))
        assert (["unreadable-file"], "w in f") == (codes(result), result.findings[0].where)

    def test_other_tensors_are_read_all_the_same(self):
        source = CountingSource(f=DATA[:5])
        result = scanned(source, checkpoint(tensor("lost", "f", 0, 64), tensor("kept", "f", 0, 5)))
        assert ["kept"] == list(result.digests)

    def test_record_in_a_file_that_shrank_is_a_finding_of_its_own(self):
        opened = checkpoint(checksums=(checksum("f", DATA, 0, 64),))
        assert ["unreadable-file"] == codes(scanned(CountingSource(f=DATA[:5]), opened, checksums=True))

    def test_tensor_with_a_hole_is_uncovered_and_has_no_digest(self):
        entry = tensor("w", "f", 0, 64)
        holed = TensorEntry(TensorSpec("w", entry.spec.dtype, (65,)), ("w",), entry.pieces)
        result = scanned(CountingSource(f=DATA), checkpoint(holed))
        assert (["uncovered"], {}) == (codes(result), result.digests)

    def test_shrinking_local_file_is_a_finding(self, tmp_path: Path):
        from ckpttools.storage.source import open_source

        (tmp_path / "f").write_bytes(DATA)
        source, _ = open_source(str(tmp_path))
        opened = checkpoint(tensor("w", "f", 0, 1024))
        (tmp_path / "f").write_bytes(DATA[:1000])
        result = scanned(source, opened)
        assert (["file-too-short"], "at least 1024 bytes", "1000 bytes") == (
            codes(result),
            result.findings[0].expected,
            result.findings[0].found,
        )


class TestProgress:
    def test_bytes_told_add_up_to_bytes_read(self):
        told: list[int] = []
        opened = checkpoint(tensor("w", "f", 0, 100), checksums=(checksum("f", DATA, 0, 1024),))
        result = scanned(CountingSource(f=DATA), opened, checksums=True, progress=told.append)
        assert (1024, 1024) == (sum(told), result.bytes_read)
