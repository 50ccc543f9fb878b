"""`run` writes exactly what the plan says, digests what passes, and gives the same output however it is cut and shared out."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.cast import CastCounts, cast
from ckpttools.digest import digest_bytes
from ckpttools.dtypes import BY_NAME
from ckpttools.errors import ConversionError, DestinationError, FindingsError, StorageError
from ckpttools.execute import run
from ckpttools.execute.checksums import combine_crc32
from ckpttools.execute.crew import Crew, StoppedError
from ckpttools.execute.flow import Flow
from ckpttools.execute.records import Executed, SegmentRecord, SegmentTable
from ckpttools.execute.sink import Sink
from ckpttools.execute.space import require_space
from ckpttools.gather import Gather
from ckpttools.model import ArrangedFile, Arrangement, ChecksumSlot, FileEntry, Literal, Slot, TensorSpec
from ckpttools.plan import Plan
from ckpttools.storage.target import open_target
from ckpttools.storage.writing import Space
from tests.plan_cases import (
    BF16,
    FP32,
    Case,
    along,
    arrange,
    bytes_of,
    cells,
    expected_files,
    files_in,
    leftovers,
    make_case,
    some_tensors,
    whole,
)
from tests.strategies import dtypes, partitions, shapes


def carry_out(case: Case, plan: Plan, destination: Path | str, *, is_file: bool = False, **options) -> Executed:
    return run(plan, case.source, open_target(str(destination), is_file=is_file), **options)


def require_right(case: Case, plan: Plan, executed: Executed, directory: Path) -> None:
    """Every byte and every digest is what brute force says."""
    assert files_in(directory) == expected_files(case, plan)
    for tensor in executed.tensors:
        planned = plan.tensors[tensor.spec.name]
        values = case.values[tensor.spec.name]
        assert tensor.source_digest == digest_bytes(values, executed.algorithm)
        if planned.is_cast:
            values = bytes(cast(memoryview(values), planned.source.spec.dtype, planned.dtype)[0])
        assert tensor.digest == digest_bytes(values, executed.algorithm)
        for slot in executed.pieces[tensor.spec.name]:
            data = (directory / slot.file).read_bytes()[slot.offset : slot.offset + slot.length]
            assert slot.digest == digest_bytes(data, executed.algorithm)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source", some_tensors(), along(0, 3))


@pytest.fixture
def memory():
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture
def tiny_tiles(monkeypatch) -> None:
    """Tiles of a few elements, so that small tensors take many."""
    whole_init = Gather.__init__

    def small_init(self, *args, **kwargs):
        whole_init(self, *args, **kwargs)
        self._tile_bytes = self._strided_tile_bytes = 48

    monkeypatch.setattr(Gather, "__init__", small_init)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("cut", [whole, along(0, 2), along(1, 2), along(2, 3)], ids=["whole", "rows", "columns", "third"])
@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_output_and_digests_are_right_for_any_cut_and_any_jobs(case, tmp_path, cut, jobs):
    plan = case.plan(arrange(case, cut), companions=[FileEntry("config.json", 17)])
    executed = carry_out(case, plan, tmp_path / "out", jobs=jobs, verify=True)
    require_right(case, plan, executed, tmp_path / "out")
    assert leftovers(tmp_path) == []
    assert executed.is_verified


@st.composite
def cut_tensors(draw):
    """A dtype, a shape, how the source cuts it and how the output does."""
    shape = draw(shapes(max_rank=4, max_side=5))
    return draw(dtypes(sub_byte=False)), shape, draw(partitions(shape)), draw(partitions(shape))


@settings(max_examples=60)
@given(tensors=st.lists(cut_tensors(), min_size=1, max_size=3), tile_bytes=st.integers(16, 200))
def test_any_partition_becomes_any_other(tensors, tile_bytes):
    whole_init = Gather.__init__

    def small_init(self, *args, **kwargs):
        whole_init(self, *args, **kwargs)
        self._tile_bytes = self._strided_tile_bytes = tile_bytes

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gather, "__init__", small_init)
        sources, targets = iter([t[2] for t in tensors]), iter([t[3] for t in tensors])
        named = {f"t{i}": (dtype, shape) for i, (dtype, shape, _, _) in enumerate(tensors)}
        case = make_case(Path(directory, "source"), named, lambda _: next(sources))
        plan = case.plan(arrange(case, lambda _: next(targets), files=3))
        require_right(case, plan, carry_out(case, plan, Path(directory, "out")), Path(directory, "out"))


def test_a_tensor_of_many_tiles_is_right(tmp_path):
    case = make_case(tmp_path / "source", {"w": (FP32, (301, 257)), "v": (BF16, (513, 300))}, along(1, 3))
    for i, cut in enumerate([whole, along(0, 4), along(1, 4)]):
        plan = case.plan(arrange(case, cut, files=3))
        executed = carry_out(case, plan, tmp_path / f"out{i}", memory_bytes=1)
        require_right(case, plan, executed, tmp_path / f"out{i}")


@pytest.mark.parametrize("cut", [whole, along(1, 3)], ids=["whole", "columns"])
def test_a_cast_digests_what_was_read_and_what_was_written(tmp_path, cut):
    case = make_case(tmp_path / "source", {"w": (FP32, (300, 300)), "n": (BY_NAME["int8"], (3, 3))}, along(0, 2))
    files = arrange(replace_specs(case, "w", BF16), cut)
    plan = case.plan(files, casts={"w": BF16})
    executed = carry_out(case, plan, tmp_path / "out", memory_bytes=1, verify=True)
    require_right(case, plan, executed, tmp_path / "out")
    by_name = {t.spec.name: t for t in executed.tensors}
    assert by_name["w"].spec == TensorSpec("w", BF16, (300, 300))
    assert by_name["w"].counts == cast(memoryview(case.values["w"]), FP32, BF16)[1]
    assert by_name["n"].counts is None
    assert by_name["n"].digest == by_name["n"].source_digest


def replace_specs(case: Case, name: str, dtype) -> Case:
    """The case as its output is laid out: one tensor of another dtype."""
    tensors = tuple(replace(t, spec=replace(t.spec, dtype=dtype)) if t.name == name else t for t in case.checkpoint.tensors)
    return replace(case, checkpoint=replace(case.checkpoint, tensors=tensors))


def test_a_cast_counts_over_all_tiles(tmp_path):
    case = make_case(tmp_path / "source", {"w": (FP32, (200, 200))})
    (tmp_path / "source" / "part0.bin").write_bytes(b"gap" + (b"\0\0\x80\x7f" + b"\xff\xff\x7f\x7f") * 20_000)
    plan = case.plan(arrange(replace_specs(case, "w", BY_NAME["float8_e4m3fn"])), casts={"w": BY_NAME["float8_e4m3fn"]})
    executed = carry_out(case, plan, tmp_path / "out", memory_bytes=1)
    assert executed.tensors[0].counts == CastCounts(saturated=20_000, infinities_lost=20_000)


def test_elements_that_share_bytes_are_copied_whole(tmp_path):
    case = make_case(tmp_path / "source", {"f6": (BY_NAME["float6_e2m3fn"], (4, 4)), "f4": (BY_NAME["float4_e2m1fn"], (6,))})
    plan = case.plan(arrange(case))
    require_right(case, plan, carry_out(case, plan, tmp_path / "out"), tmp_path / "out")


def test_a_single_file(case, tmp_path):
    plan = case.plan(arrange(case, files=1))
    carry_out(case, plan, tmp_path / "m.bin", is_file=True)
    assert (tmp_path / "m.bin").read_bytes() == expected_files(case, plan)["out/file0.bin"]
    assert leftovers(tmp_path) == []


def test_several_files_do_not_go_into_one(case, tmp_path):
    with pytest.raises(ConversionError, match="2 files do not fit into one"):
        carry_out(case, case.plan(arrange(case)), tmp_path / "m.bin", is_file=True)


def test_sha256(case, tmp_path):
    plan = case.plan(arrange(case, along(0, 2)))
    executed = carry_out(case, plan, tmp_path / "out", algorithm="sha256")
    assert executed.algorithm == "sha256"
    require_right(case, plan, executed, tmp_path / "out")


def test_an_empty_plan_makes_an_empty_directory(tmp_path):
    case = make_case(tmp_path / "source", {})
    executed = carry_out(case, case.plan(Arrangement("raw", ())), tmp_path / "out", verify=True)
    assert files_in(tmp_path / "out") == {}
    assert (executed.tensors, executed.bytes_written) == ((), 0)


def test_counts_what_it_read_and_wrote(case, tmp_path):
    plan = case.plan(arrange(case), companions=[FileEntry("config.json", 17)])
    executed = carry_out(case, plan, tmp_path / "out")
    assert (executed.bytes_read, executed.bytes_written) == (plan.bytes_read, plan.bytes_written)
    assert (executed.resumed_bytes, executed.resumed_files) == (0, 0)
    assert [(c.source_file, c.file, c.offset, c.length) for c in executed.carries] == [("config.json", "config.json", 0, 17)]
    assert executed.carries[0].digest == digest_bytes(b'{"vocab_size": 7}')


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("destination", ["out", "memory://progress/out"])
def test_progress_adds_up_to_the_bytes_of_the_output(case, tmp_path, verify, destination):
    plan = case.plan(arrange(case, along(0, 2), index=True), companions=[FileEntry("config.json", 17)])
    told: list[int] = []
    where = destination if "://" in destination else tmp_path / destination
    carry_out(case, plan, where, jobs=3, verify=verify, progress=told.append)
    assert sum(told) == plan.bytes_written * (2 if verify else 1)


def test_finishing_adds_small_files(case, tmp_path):
    plan = case.plan(arrange(case))
    carry_out(case, plan, tmp_path / "out", finish=lambda executed: {"seal.json": [json.dumps(executed.algorithm).encode()]})
    assert files_in(tmp_path / "out") == {**expected_files(case, plan), "seal.json": b'"blake3"'}


def test_finishing_does_not_replace_an_output_file(case, tmp_path):
    with pytest.raises(ConversionError, match=r"same name: out/file0\.bin"):
        carry_out(case, case.plan(arrange(case)), tmp_path / "out", finish=lambda _: {"out/file0.bin": [b""]})
    assert not (tmp_path / "out").exists()


def test_when_finishing_fails_nothing_is_finished_and_the_next_run_goes_on(case, tmp_path):
    def fail(_executed: Executed) -> dict[str, bytes]:
        raise RuntimeError("no seal")

    plan = case.plan(arrange(case, along(0, 2)))
    with pytest.raises(RuntimeError, match="no seal"):
        carry_out(case, plan, tmp_path / "out", finish=fail)
    assert not (tmp_path / "out").exists()
    executed = carry_out(case, plan, tmp_path / "out")
    assert executed.resumed_files == 2
    assert executed.bytes_read == 0
    assert files_in(tmp_path / "out") == expected_files(case, plan)


def test_commit_records_are_written_when_all_else_is_on_disk(case, tmp_path, monkeypatch):
    calls: list[tuple[str, str]] = []
    target = open_target(str(tmp_path / "out"), is_file=False)
    for name in ("write", "sync"):
        original = getattr(target, name)

        def noted(path, *args, name=name, original=original):
            calls.append((name, path))
            return original(path, *args)

        monkeypatch.setattr(target, name, noted)
    run(case.plan(arrange(case, index=True)), case.source, target)
    first_of_index = calls.index(("write", "index.json"))
    assert all(first_of_index > calls.index(("sync", f"out/file{i}.bin")) for i in range(2))
    assert not [c for c in calls[first_of_index:] if c[1] != "index.json"]


def test_the_next_run_does_not_copy_again_what_is_on_disk(case, tmp_path):
    plan = case.plan(arrange(case, along(0, 2)))
    stop_after(case, plan, tmp_path / "out", tensors=3)
    executed = carry_out(case, plan, tmp_path / "out", verify=True)
    assert 0 < executed.resumed_bytes < plan.bytes_written
    assert executed.bytes_read == plan.bytes_read - sum(
        len(case.values[t.spec.name]) for t in executed.tensors if t.spec.name in list(plan.tensors)[:3]
    )
    require_right(case, plan, executed, tmp_path / "out")


def stop_after(case: Case, plan: Plan, destination: Path, *, tensors: int, **options) -> None:
    """A run that is interrupted after so many tensors, each of them recorded."""
    count = itertools.count()
    stream = Gather.stream

    def interrupted(self, *args, **kwargs):
        if next(count) == tensors:
            raise KeyboardInterrupt
        return stream(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpttools.execute.local._GROUP_TENSORS", 1)
        patch.setattr(Gather, "stream", interrupted)
        with pytest.raises(KeyboardInterrupt):
            carry_out(case, plan, destination, jobs=1, **options)
    assert not destination.exists()


def test_progress_counts_what_an_earlier_run_wrote(case, tmp_path):
    plan = case.plan(arrange(case))
    stop_after(case, plan, tmp_path / "out", tensors=3)
    told: list[int] = []
    executed = carry_out(case, plan, tmp_path / "out", progress=told.append)
    assert told[0] == executed.resumed_bytes
    assert sum(told) == plan.bytes_written


def test_a_run_of_another_plan_starts_afresh(case, tmp_path):
    stop_after(case, case.plan(arrange(case)), tmp_path / "out", tensors=5)
    plan = case.plan(arrange(case, along(0, 2), files=1))
    executed = carry_out(case, plan, tmp_path / "out")
    assert executed.resumed_bytes == 0
    require_right(case, plan, executed, tmp_path / "out")


def test_a_run_with_another_digest_starts_afresh(case, tmp_path):
    plan = case.plan(arrange(case))
    stop_after(case, plan, tmp_path / "out", tensors=5)
    executed = carry_out(case, plan, tmp_path / "out", algorithm="sha256")
    assert executed.resumed_bytes == 0
    require_right(case, plan, executed, tmp_path / "out")


def test_a_source_file_that_was_replaced_starts_afresh(case, tmp_path):
    stop_after(case, case.plan(arrange(case)), tmp_path / "out", tensors=5)
    part = tmp_path / "source" / "part0.bin"
    part.write_bytes(part.read_bytes())
    os.utime(part, ns=(0, 0))
    assert carry_out(case, case.plan(arrange(case)), tmp_path / "out").resumed_bytes == 0


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_an_unfinished_file_that_was_touched_is_written_again(case, tmp_path, damage):
    plan = case.plan(arrange(case, along(0, 2)))
    stop_after(case, plan, tmp_path / "out", tensors=5)
    file = tmp_path / ".out.ckpttools-partial" / "files" / "out" / "file0.bin"
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    executed = carry_out(case, plan, tmp_path / "out")
    require_right(case, plan, executed, tmp_path / "out")


def test_values_are_digested_as_they_round_also_when_a_run_goes_on(case, tmp_path):
    plan = case.plan(arrange(case, along(0, 2)))
    roundings = {name: BF16 for name, t in plan.tensors.items() if t.source.spec.dtype == FP32}
    assert roundings
    stop_after(case, plan, tmp_path / "out", tensors=3, roundings=roundings)
    for tensor in carry_out(case, plan, tmp_path / "out", roundings=roundings).tensors:
        if tensor.spec.name in roundings:
            rounded = bytes(cast(memoryview(case.values[tensor.spec.name]), FP32, BF16)[0])
            assert digest_bytes(rounded) == tensor.rounded_digest
        else:
            assert "" == tensor.rounded_digest


def test_a_journal_line_that_is_not_ours_is_not_believed(case, tmp_path):
    plan = case.plan(arrange(case))
    stop_after(case, plan, tmp_path / "out", tensors=3)
    with open(tmp_path / ".out.ckpttools-partial" / "journal", "a") as journal:
        journal.write('{"segments":1}\n[]\nnot json\n\n')
    executed = carry_out(case, plan, tmp_path / "out")
    require_right(case, plan, executed, tmp_path / "out")


@pytest.mark.parametrize("at", ["slot", "literal", "checksum"])
def test_verifying_finds_a_changed_byte_and_nothing_is_finished(case, tmp_path, monkeypatch, at):
    plan = case.plan(arrange(case, files=1))
    wanted = {"slot": Slot, "literal": Literal}.get(at)
    segments = list(plan.files[0].segments)
    offset = next(s.offset for s in segments if (isinstance(s, wanted) if wanted else not isinstance(s, Slot | Literal)))
    if at == "slot":
        offset = next(s.offset for s in segments if isinstance(s, Slot) and s.length)
    target = open_target(str(tmp_path / "out"), is_file=False)
    sync = target.sync

    def flip(path: str) -> None:
        sync(path)
        byte = bytearray(1)
        target.read_into(path, offset, memoryview(byte))
        target.write(path, offset, bytes([byte[0] ^ 1]))

    monkeypatch.setattr(target, "sync", flip)
    # an even number of flips would mend it: the file is synced for the journal and when it is complete
    monkeypatch.setattr("ckpttools.execute.journal.Journal.flush", lambda self: None)
    with pytest.raises(StorageError, match="not what was written") as e:
        run(plan, case.source, target, verify=True)
    assert e.value.where.startswith("out/file0.bin at byte ")
    assert not (tmp_path / "out").exists()
    executed = carry_out(case, plan, tmp_path / "out", verify=True)
    assert executed.resumed_bytes == 0
    require_right(case, plan, executed, tmp_path / "out")


def test_damage_to_an_earlier_runs_output_is_found_and_mended(case, tmp_path):
    plan = case.plan(arrange(case, files=1))
    stop_after(case, plan, tmp_path / "out", tensors=5)
    file = tmp_path / ".out.ckpttools-partial" / "files" / "out" / "file0.bin"
    slot = next(s for s in plan.files[0].segments if isinstance(s, Slot) and s.tensor == "weight")
    data = bytearray(file.read_bytes())
    data[slot.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError, match="not what was written"):
        carry_out(case, plan, tmp_path / "out", verify=True)
    require_right(case, plan, carry_out(case, plan, tmp_path / "out", verify=True), tmp_path / "out")


def test_replacing_keeps_the_old_output_when_the_run_fails(case, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_bytes(b"old")
    plan = case.plan(arrange(case))
    with pytest.raises(DestinationError):
        carry_out(case, plan, tmp_path / "out")
    with pytest.raises(RuntimeError):
        carry_out(case, plan, tmp_path / "out", overwrite=True, finish=lambda _: raise_runtime_error())
    assert files_in(tmp_path / "out") == {"old": b"old"}
    carry_out(case, plan, tmp_path / "out", overwrite=True)
    assert files_in(tmp_path / "out") == expected_files(case, plan)


def raise_runtime_error():
    raise RuntimeError


def test_the_source_is_refused_as_destination(case):
    with pytest.raises(DestinationError, match=r"the destination (lies in|is) the source"):
        carry_out(case, case.plan(arrange(case)), case.source.location, overwrite=True)


def test_a_hole_in_the_source_is_never_filled(tmp_path):
    case = make_case(tmp_path / "source", {"w": (FP32, (6, 4))}, along(0, 3))
    whole_case = case.checkpoint.tensors[0]
    case.checkpoint = replace(case.checkpoint, tensors=(replace(whole_case, pieces=whole_case.pieces[:2]),))
    with pytest.raises(FindingsError, match="do not tile it: w"):
        carry_out(case, case.plan(arrange(case)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# the parts


def test_a_worker_stops_within_a_tile(tmp_path):
    stop = threading.Event()
    big = make_case(tmp_path / "big", {"w": (FP32, (300, 300))})
    plan = big.plan(arrange(big))
    flow = Flow(big.source, memory_bytes=1, algorithm="blake3", stop=stop, progress=lambda _: stop.set())
    written: list[int] = []
    sink = Sink(lambda _, data: written.append(len(data)), 0, flow.new_hasher(), with_crc=False)
    with pytest.raises(StoppedError):
        flow.copy(plan.tensors["w"], [(plan.tensors["w"].source.spec.box, sink)])
    assert 0 < sum(written) < 360_000


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_crcs_of_neighbours_combine(first, second):
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_checksum_covers_slots_of_several_threads_and_earlier_checksums(tmp_path):
    case = make_case(tmp_path / "source", {"a": (FP32, (40, 30)), "b": (BF16, (50,))})
    slots = (Slot("a", case.checkpoint.tensors[0].spec.box, 2, 4800), Slot("b", case.checkpoint.tensors[1].spec.box, 4802, 100))
    sums = (ChecksumSlot(4902, 0, 4902), ChecksumSlot(4906, 4802, 104), ChecksumSlot(4910, 0, 0))
    file = ArrangedFile("f", 4914, slots, (Literal(0, b"ab"),), sums)
    plan = case.plan(Arrangement("raw", (file,)))
    require_right(case, plan, carry_out(case, plan, tmp_path / "out", jobs=2), tmp_path / "out")
    assert (tmp_path / "out" / "f").read_bytes()[-4:] == b"\0\0\0\0"


SPACE = Space(free_bytes=10**6, free_inodes=100, used_bytes=0, where="/disk")


def test_space_is_asked_for_before_the_first_byte(case, tmp_path, monkeypatch):
    plan = case.plan(arrange(case))
    target = open_target(str(tmp_path / "out"), is_file=False)
    monkeypatch.setattr(target, "space", lambda: replace(SPACE, free_bytes=100))
    with pytest.raises(StorageError, match="not enough free space") as e:
        run(plan, case.source, target)
    assert (e.value.where, e.value.found) == ("/disk", "100 bytes")
    assert e.value.expected.endswith(f"({plan.space_bytes} bytes) free")
    assert leftovers(tmp_path) == []


def test_inodes_are_asked_for_too(case):
    plan = case.plan(arrange(case))
    with pytest.raises(StorageError, match="not enough free inodes") as e:
        require_space(plan, replace(SPACE, free_inodes=2))
    assert (e.value.expected, e.value.found) == (f"{plan.inodes} free", "2 free")


def test_a_file_system_that_does_not_count_has_enough(case):
    require_space(case.plan(arrange(case)), replace(SPACE, free_bytes=None, free_inodes=None))


def test_what_an_earlier_run_left_counts_as_room(case):
    plan = case.plan(arrange(case))
    require_space(plan, replace(SPACE, free_bytes=10, used_bytes=plan.space_bytes))


def test_a_crew_raises_the_first_error_and_stops_the_rest():
    stop = threading.Event()
    done: list[int] = []

    def task(i: int, _worker: int) -> None:
        if i == 3:
            raise ValueError(i)
        done.append(i)

    crew = Crew([0], stop)
    with pytest.raises(ValueError, match="3"):
        crew.run(lambda w, i=i: task(i, w) for i in range(100))
    assert done == [0, 1, 2]
    assert stop.is_set()


# object stores


def contents(fs, prefix: str) -> dict[str, bytes]:
    return {path[len(prefix) + 1 :]: fs.cat_file(path) for path in fs.find(prefix)}


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("cut", [whole, along(1, 2)], ids=["whole", "columns"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_store_gets_the_same_bytes_and_digests(case, tmp_path, memory, cut, jobs):
    plan = case.plan(arrange(case, cut, index=True), companions=[FileEntry("config.json", 17)])
    local = carry_out(case, plan, tmp_path / "out")
    remote = carry_out(case, plan, "memory://bucket/out", jobs=jobs, verify=True, finish=lambda _: {"seal": [b"s"]})
    assert contents(memory, "/bucket/out") == {**expected_files(case, plan), "seal": b"s"}
    assert contents(memory, "/bucket") == {f"out/{k}": v for k, v in contents(memory, "/bucket/out").items()}
    assert (remote.tensors, remote.carries) == (local.tensors, local.carries)


def test_on_a_store_the_commit_record_comes_after_the_rest_and_the_seal_after_it(case, memory, monkeypatch):
    order: list[str] = []
    target = open_target("memory://bucket/out", is_file=False)
    append, put = target.append, target.put

    def noted_append(path, length):
        order.append(path)
        return append(path, length)

    def noted_put(path, data):
        order.append(path)
        put(path, data)

    monkeypatch.setattr(target, "append", noted_append)
    monkeypatch.setattr(target, "put", noted_put)
    run(case.plan(arrange(case, index=True)), case.source, target, finish=lambda _: {"seal": [b"s"]})
    assert order[-2:] == ["index.json", "seal"]


def test_on_a_store_the_next_run_uploads_only_what_is_missing(case, memory, monkeypatch):
    plan = case.plan(arrange(case, along(1, 2), files=3, index=True))
    first = open_target("memory://bucket/out", is_file=False)
    append = first.append

    def failing_append(path, length):
        if path == "out/file2.bin":
            raise StorageError("no network")
        return append(path, length)

    monkeypatch.setattr(first, "append", failing_append)
    with pytest.raises(StorageError, match="no network"):
        run(plan, case.source, first, jobs=1)
    assert "index.json" not in contents(memory, "/bucket/out")
    executed = carry_out(case, plan, "memory://bucket/out", verify=True)
    assert executed.resumed_files == 2
    assert contents(memory, "/bucket") == {f"out/{k}": v for k, v in expected_files(case, plan).items()}


def test_on_a_store_a_changed_byte_is_found(case, memory, monkeypatch):
    plan = case.plan(arrange(case, files=1, index=True))
    target = open_target("memory://bucket/out", is_file=False)
    read_into = target.read_into

    def flipped(path, offset, buffer):
        read_into(path, offset, buffer)
        buffer[0] ^= 1

    monkeypatch.setattr(target, "read_into", flipped)
    with pytest.raises(StorageError, match="not what was written"):
        run(plan, case.source, target, verify=True)
    assert "index.json" not in contents(memory, "/bucket/out")
    executed = carry_out(case, plan, "memory://bucket/out", verify=True)
    assert executed.resumed_files == 0


def test_cells_and_boxes_of_the_oracle_agree():
    values = bytes(range(24))
    assert cells(values, FP32, (2, 3)).tobytes() == values
    assert bytes_of(values, FP32, (2, 3), along(1, 3)((2, 3))[1]) == values[4:8] + values[16:20]


class TestRecords:
    @given(
        st.lists(
            st.tuples(
                st.tuples(st.integers(0, 2), st.integers(0, 40)),
                st.binary(min_size=32, max_size=32),
                st.none() | st.integers(0, (1 << 32) - 1),
                st.booleans(),
            )
        )
    )
    def test_the_table_of_a_run_is_the_mapping_that_a_dict_is(self, steps):
        table, wanted = SegmentTable(), {}
        for place, digest, crc, is_kept in steps:
            if is_kept or place not in wanted:
                table[place] = wanted[place] = SegmentRecord(digest.hex(), crc)
            else:
                del table[place], wanted[place]
        assert dict(table) == wanted
        assert len(table) == len(wanted)
        assert (3, 0) not in table
        assert (0, 41) not in table
