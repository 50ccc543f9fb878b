"""A destination is complete or not there: refusals touch nothing, replacing loses nothing, object stores commit last."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckpttools.errors import DestinationError, LockedError, StorageError
from ckpttools.storage.local_target import LocalTarget
from ckpttools.storage.target import open_target
from ckpttools.storage.upload import UrlTarget
from tests.plan_cases import files_in, leftovers


def begin(destination: Path, *, is_file: bool = False, overwrite: bool = False, sources: tuple[str, ...] = ()) -> LocalTarget:
    target = LocalTarget(str(destination), is_file=is_file)
    target.begin(overwrite=overwrite, sources=sources)
    return target


def write(target: LocalTarget, files: dict[str, bytes]) -> LocalTarget:
    target.start_journal("header")
    for path, data in files.items():
        target.create(path, len(data))
        target.write(path, 0, data)
        target.sync(path)
    return target


def finish(target: LocalTarget, files: dict[str, bytes]) -> None:
    write(target, files).commit()
    target.close()


def test_a_directory_appears_with_all_its_files(tmp_path):
    target = write(begin(tmp_path / "out"), {"a.bin": b"abc", "sub/b.bin": b"", "c": b"x" * 600_000})
    assert not (tmp_path / "out").exists()
    target.commit()
    target.close()
    assert files_in(tmp_path / "out") == {"a.bin": b"abc", "sub/b.bin": b"", "c": b"x" * 600_000}
    assert leftovers(tmp_path) == []


def test_a_single_file_appears_under_its_name_whatever_the_plan_calls_it(tmp_path):
    target = write(begin(tmp_path / "m.safetensors", is_file=True), {"model.safetensors": b"abc"})
    target.put("m.safetensors.seal", [b"seal"])
    target.commit()
    target.close()
    assert files_in(tmp_path) == {"m.safetensors": b"abc", "m.safetensors.seal": b"seal"}


def test_bytes_are_written_at_any_place(tmp_path):
    target = begin(tmp_path / "out")
    target.start_journal("header")
    target.create("f", 700_000)
    target.write("f", 400_000, memoryview(b"y" * 300_000))
    target.write("f", 0, b"x" * 400_000)
    buffer = bytearray(4)
    target.read_into("f", 399_998, memoryview(buffer))
    assert bytes(buffer) == b"xxyy"
    target.close()


def test_reading_past_the_end_is_an_error(tmp_path):
    target = write(begin(tmp_path / "out"), {"f": b"abc"})
    with pytest.raises(StorageError, match="shorter than what was written") as e:
        target.read_into("f", 1, memoryview(bytearray(3)))
    assert e.value.where.endswith("out/f at byte 3")
    target.close()


@pytest.mark.parametrize("is_file", [True, False])
def test_an_existing_destination_is_refused_and_nothing_is_touched(tmp_path, is_file):
    existing = tmp_path / "out" if is_file else tmp_path / "out" / "old"
    existing.parent.mkdir(exist_ok=True)
    existing.write_bytes(b"old")
    with pytest.raises(DestinationError, match="the destination exists") as e:
        begin(tmp_path / "out", is_file=is_file)
    assert e.value.exit_code == 4
    assert files_in(tmp_path) == {str(existing.relative_to(tmp_path)): b"old"}
    assert leftovers(tmp_path) == []


def test_an_empty_directory_is_as_good_as_none(tmp_path):
    (tmp_path / "out").mkdir()
    finish(begin(tmp_path / "out"), {"a": b"new"})
    assert files_in(tmp_path) == {"out/a": b"new"}


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_directory_is_not_replaced_by_a_file_nor_a_file_by_a_directory(tmp_path, overwrite):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    for name, is_file in (("directory", True), ("file", False)):
        with pytest.raises(DestinationError, match="of another kind"):
            begin(tmp_path / name, is_file=is_file, overwrite=overwrite)


def test_a_device_is_not_replaced():
    with pytest.raises(DestinationError, match="of another kind"):
        begin(Path("/dev/null"), is_file=True, overwrite=True)


def test_the_old_directory_stays_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_bytes(b"old")
    target = write(begin(tmp_path / "out", overwrite=True), {"new": b"new"})
    assert files_in(tmp_path / "out") == {"old": b"old"}
    target.commit()
    target.close()
    assert files_in(tmp_path) == {"out/new": b"new"}
    assert leftovers(tmp_path) == []


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "out").write_bytes(b"old")
    target = write(begin(tmp_path / "out", is_file=True, overwrite=True), {"out": b"new"})
    assert (tmp_path / "out").read_bytes() == b"old"
    target.commit()
    target.close()
    assert files_in(tmp_path) == {"out": b"new"}


def test_a_crash_while_replacing_loses_neither(tmp_path):
    """Between its two renames the destination is gone, the old output aside, the new one complete."""
    old = tmp_path / ".out.ckpttools-old"
    old.mkdir()
    (old / "old").write_bytes(b"old")
    with pytest.raises(DestinationError, match="the destination exists"):
        begin(tmp_path / "out").close()
    assert files_in(tmp_path / "out") == {"old": b"old"}


def test_a_crash_after_replacing_leaves_the_new_one(tmp_path):
    for name in ("out", ".out.ckpttools-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(name.encode())
    begin(tmp_path / "out", overwrite=True).close()
    assert files_in(tmp_path) == {"out/f": b"out"}
    assert leftovers(tmp_path) == []


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "m").write_bytes(b"old")
    (tmp_path / "m").symlink_to("disk/m")
    finish(begin(tmp_path / "m", is_file=True, overwrite=True), {"m": b"new"})
    assert (tmp_path / "m").is_symlink()
    assert (tmp_path / "disk" / "m").read_bytes() == b"new"


def test_a_link_that_leads_nowhere_says_where_to_write(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/new")
    finish(begin(tmp_path / "out"), {"f": b"x"})
    assert files_in(tmp_path / "disk") == {"new/f": b"x"}


def test_missing_parents_are_made(tmp_path):
    finish(begin(tmp_path / "a" / "b" / "out"), {"f": b"x"})
    assert files_in(tmp_path) == {"a/b/out/f": b"x"}


@pytest.mark.parametrize("spelling", ["source", "source/", "source/sub/out", "./source", "link", "link/out"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_the_source_is_never_a_destination(tmp_path, monkeypatch, spelling, overwrite):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to("source")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DestinationError, match=r"the destination (lies in|is) the source"):
        LocalTarget(spelling).begin(overwrite=overwrite, sources=("source",))
    assert files_in(tmp_path / "source") == {"f": b"x"}


def test_a_directory_that_holds_the_source_is_not_replaced(tmp_path):
    (tmp_path / "run" / "source").mkdir(parents=True)
    with pytest.raises(DestinationError, match="the source lies in the destination"):
        begin(tmp_path / "run", overwrite=True, sources=(str(tmp_path / "run" / "source"),))


def test_a_file_beside_a_single_source_file_is_no_part_of_it(tmp_path):
    (tmp_path / "m.pt").write_bytes(b"x")
    finish(begin(tmp_path / "m.safetensors", is_file=True, sources=(str(tmp_path / "m.pt"),)), {"m": b"new"})
    assert (tmp_path / "m.safetensors").read_bytes() == b"new"


@pytest.mark.parametrize("spelling", [".", "..", ""])
def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch, spelling):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DestinationError, match="working directory or one above it"):
        LocalTarget(spelling).begin(overwrite=True)


def test_the_root_is_no_destination():
    with pytest.raises(DestinationError, match="root of the file system"):
        begin(Path("/"), overwrite=True)


def test_a_mount_point_is_refused_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path / "out"))
    with pytest.raises(DestinationError, match="mount point") as e:
        begin(tmp_path / "out")
    assert e.value.hints == ("name a directory below it",)


def test_another_run_is_kept_out(tmp_path):
    first = write(begin(tmp_path / "out"), {"f": b"x"})
    second = LocalTarget(str(tmp_path / "out"))
    with pytest.raises(LockedError, match="another run is writing") as e:
        second.begin(overwrite=False)
    second.close()
    assert e.value.exit_code == 5
    assert f"process {os.getpid()} on " in e.value.found
    first.commit()
    first.close()
    assert files_in(tmp_path) == {"out/f": b"x"}


def test_a_lock_ends_with_its_run(tmp_path):
    write(begin(tmp_path / "out"), {"f": b"x"}).close()
    begin(tmp_path / "out").close()


def test_a_file_system_without_locks_is_written_without(tmp_path, monkeypatch):
    def refuse(_fd: int, _operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    finish(begin(tmp_path / "out"), {"f": b"x"})
    assert files_in(tmp_path) == {"out/f": b"x"}


def test_a_link_in_the_place_of_the_partial_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.ckpttools-partial").symlink_to("elsewhere")
    with pytest.raises(DestinationError, match="a link has the name of the partial directory"):
        begin(tmp_path / "out")


@pytest.mark.parametrize(
    ("umask", "file_mode", "directory_mode"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770), (0, 0o666, 0o777)]
)
def test_modes_follow_the_umask(tmp_path, umask, file_mode, directory_mode):
    before = os.umask(umask)
    try:
        target = write(begin(tmp_path / "out"), {"sub/f": b"x"})
        target.put("seal", [b"x"])
        target.commit()
        target.close()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("out", "out/sub", "out/sub/f", "out/seal")]
    assert modes == [0o777 & ~umask, 0o777 & ~umask, 0o666 & ~umask, 0o666 & ~umask]


def test_nothing_is_left_where_nothing_was_written(tmp_path):
    target = begin(tmp_path / "out")
    target.start_journal("header")
    target.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_stays_for_the_next_run(tmp_path):
    first = write(begin(tmp_path / "out"), {"f": b"abc"})
    first.append_journal("done f")
    first.close()
    second = begin(tmp_path / "out")
    assert second.journal_lines() == ["header", "done f"]
    assert second.length_bytes("f") == 3
    assert second.length_bytes("g") is None
    second.close()


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    write(begin(tmp_path / "out"), {"f": b"abc"}).close()
    with open(tmp_path / ".out.ckpttools-partial" / "journal", "ab") as journal:
        journal.write(b'{"half')
    target = begin(tmp_path / "out")
    assert target.journal_lines() == ["header"]
    target.append_journal("next")
    assert target.journal_lines() == ["header", "next"]
    target.reset_journal()
    assert target.journal_lines() == ["header"]
    target.close()


def test_starting_throws_away_what_is_there(tmp_path):
    write(begin(tmp_path / "out"), {"f": b"abc"}).close()
    finish(begin(tmp_path / "out"), {"g": b"new"})
    assert files_in(tmp_path) == {"out/g": b"new"}


def test_files_of_no_plan_are_removed(tmp_path):
    target = write(begin(tmp_path / "out"), {"f": b"abc", "sub/g": b"x", "seal": b"old"})
    target.keep_only(["f", "sub/g"])
    target.commit()
    target.close()
    assert files_in(tmp_path / "out") == {"f": b"abc", "sub/g": b"x"}


def test_a_file_is_made_its_length_again(tmp_path):
    target = write(begin(tmp_path / "out"), {"f": b"abcdef"})
    target.create("f", 3)
    assert target.length_bytes("f") == 3
    target.close()


def test_room_is_told_in_bytes_and_inodes(tmp_path):
    target = write(begin(tmp_path / "out"), {"f": b"x" * 10_000})
    space = target.space()
    assert space.free_bytes > 0
    assert space.used_bytes >= 10_000
    target.close()


def test_a_file_beside_a_single_file_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "m.seal").write_bytes(b"old")
    target = write(begin(tmp_path / "m", is_file=True), {"m": b"x"})
    with pytest.raises(DestinationError, match="a file of this name exists"):
        target.put("m.seal", [b"new"])
    target.close()
    assert (tmp_path / "m.seal").read_bytes() == b"old"


def test_more_files_than_may_be_open_at_once(tmp_path):
    files = {f"f{i}": str(i).encode() for i in range(300)}
    finish(begin(tmp_path / "out"), files)
    assert files_in(tmp_path / "out") == files


# object stores, by fsspec's in memory


@pytest.fixture
def memory():
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def upload(target: UrlTarget, files: dict[str, bytes]) -> UrlTarget:
    for path, data in files.items():
        with target.append(path, len(data)) as append:
            append(memoryview(data)[:1])
            append(memoryview(data)[1:])
    return target


def open_url(url: str, *, is_file: bool = False, overwrite: bool = False) -> UrlTarget:
    target = open_target(url, is_file=is_file)
    assert isinstance(target, UrlTarget)
    target.begin(overwrite=overwrite, sources=())
    return target


def contents(fs) -> dict[str, bytes]:
    return {path: fs.cat_file(path) for path in fs.find("/")}


def test_files_get_their_final_keys_and_the_journal_goes(memory):
    target = open_url("memory://bucket/out")
    target.start_journal("header")
    upload(target, {"a.bin": b"abc", "sub/b": b"de"})
    target.append_journal("done")
    assert len(memory.find("/bucket/.out.ckpttools-partial")) == 2
    target.put("seal", [b"s"])
    target.commit()
    assert contents(memory) == {"/bucket/out/a.bin": b"abc", "/bucket/out/sub/b": b"de", "/bucket/out/seal": b"s"}


def test_a_single_key(memory):
    target = open_url("memory://bucket/m.safetensors", is_file=True)
    target.start_journal("header")
    upload(target, {"model.safetensors": b"abc"})
    target.put("m.safetensors.seal", [b"s"])
    target.commit()
    assert contents(memory) == {"/bucket/m.safetensors": b"abc", "/bucket/m.safetensors.seal": b"s"}


def test_a_failed_upload_leaves_no_file(memory):
    target = open_url("memory://bucket/out")
    target.start_journal("header")
    with pytest.raises(KeyboardInterrupt), target.append("a", 3) as append:  # noqa: PT012
        append(memoryview(b"ab"))
        raise KeyboardInterrupt
    assert memory.find("/bucket/out") == []


def test_an_upload_of_another_length_is_an_error(memory):
    target = open_url("memory://bucket/out")
    with pytest.raises(StorageError, match="another length") as e, target.append("a", 3) as append:
        append(memoryview(b"ab"))
    assert (e.value.expected, e.value.found) == ("3 bytes", "2 bytes")


def test_a_prefix_with_objects_is_refused_even_to_overwrite(memory):
    memory.pipe_file("/bucket/out/old", b"old")
    for overwrite, reason in ((False, ""), (True, "cannot replace several")):
        with pytest.raises(DestinationError, match="the destination exists") as e:
            open_url("memory://bucket/out", overwrite=overwrite)
        assert reason in e.value.found


def test_a_single_object_is_replaced_when_asked(memory):
    memory.pipe_file("/bucket/m", b"old")
    with pytest.raises(DestinationError, match="the destination exists"):
        open_url("memory://bucket/m", is_file=True)
    target = open_url("memory://bucket/m", is_file=True, overwrite=True)
    target.start_journal("header")
    upload(target, {"m": b"new"}).commit()
    assert contents(memory) == {"/bucket/m": b"new"}


def test_unfinished_output_is_told_from_a_strangers_by_its_journal(memory):
    first = open_url("memory://bucket/out")
    first.start_journal("header")
    upload(first, {"a": b"abc"})
    first.append_journal("done a\nand more")
    second = open_url("memory://bucket/out")
    assert second.journal_lines() == ["header", "done a", "and more"]
    assert second.length_bytes("a") == 3
    with pytest.raises(DestinationError, match="unfinished output of another conversion"):
        second.start_journal("another header")
    second.append_journal("done b")
    assert second.journal_lines() == ["header", "done a", "and more", "done b"]
    second.reset_journal()
    assert second.journal_lines() == ["header"]


@pytest.mark.parametrize("source", ["memory://bucket/out", "memory://bucket/out/sub", "memory://bucket"])
def test_a_source_on_the_same_store_is_no_destination(memory, source):
    target = UrlTarget("memory://bucket/out")
    with pytest.raises(DestinationError, match="overlap"):
        target.begin(overwrite=True, sources=(source,))


def test_a_local_url_is_a_local_target(tmp_path):
    target = open_target(f"file://{tmp_path}/out", is_file=False)
    assert isinstance(target, LocalTarget)
    target.begin(overwrite=False)
    finish(target, {"f": b"x"})
    assert files_in(tmp_path) == {"out/f": b"x"}
