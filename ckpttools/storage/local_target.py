"""LocalTarget: a destination on a local file system.

A destination `D` is built in `.D.ckpttools-partial/` beside it: `files/` is what will become `D`, `journal` says what of
it is on disk, `lock` keeps other runs out. When all is done `files` is renamed onto `D`; an existing `D` that is to be
replaced is moved to `.D.ckpttools-old` first and deleted afterwards, and whatever a crash leaves of that is put right by
the next run. Read `LocalTarget.begin` and `LocalTarget.commit` first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence

from ckpttools.errors import DestinationError, DestinationExistsError, LockedError, StorageError
from ckpttools.storage.source import is_url, local_path, storage_error
from ckpttools.storage.writing import WRITE_BYTES, Handles, Space, write_error


class LocalTarget:
    """A file or directory of the local file system.

    A destination that is a symbolic link is followed: the file it leads to is replaced and the link stays. Who puts a
    link there means the other disk to be written to; replacing the link (as safetensors does) would fill this one.
    """

    def __init__(self, location: str, *, is_file: bool = False) -> None:
        self.location = location
        self.is_file = is_file
        self._destination = os.path.realpath(local_path(location))
        self._parent, self._name = os.path.split(self._destination)
        self._partial = os.path.join(self._parent, f".{self._name}.ckpttools-partial")
        self._old = os.path.join(self._parent, f".{self._name}.ckpttools-old")
        self._files = os.path.join(self._partial, "files")
        self._journal = os.path.join(self._partial, "journal")
        self._lock_fd: int | None = None
        self._overwrite = False
        self._handles = Handles(os.O_RDWR | os.O_NOFOLLOW)

    def begin(self, *, overwrite: bool, sources: Sequence[str] = ()) -> None:
        """See `Target.begin`."""
        self._overwrite = overwrite
        self.require_apart(sources)
        try:
            self._require_free()
        except DestinationError:
            self._sweep()
            raise
        try:
            self._take_lock()
            self._recover()
        except OSError as e:
            raise _destination_error(e, e.filename or self._partial) from e
        self._require_free()

    @property
    def partial(self) -> str:
        """Where the output is built until it is whole, spelled as the destination was."""
        beside = os.path.join(os.path.dirname(local_path(self.location).rstrip("/")), os.path.basename(self._partial))
        return beside if os.path.realpath(beside) == self._partial else self._partial

    def require_apart(self, sources: Sequence[str]) -> None:
        """Refuse the root, the working directory and what is around a source: none of them is written to or deleted.

        Raises: DestinationError. Looks at names alone.
        """
        if not self._name:
            raise DestinationError(f"the destination is the root of the file system: {self.location}")
        here = os.path.realpath(os.curdir)
        if not self.is_file and _is_inside(here, self._destination):
            raise DestinationError(f"the destination is the working directory or one above it: {self.location}")
        for source in sources:
            if is_url(source):
                continue
            real = os.path.realpath(local_path(source))
            if real == self._destination:
                raise DestinationError(f"the destination is the source: {self.location}")
            if _is_inside(self._destination, real):
                raise DestinationError(f"the destination lies in the source: {self.location}", found=source)
            if _is_inside(real, self._destination):
                raise DestinationError(f"the source lies in the destination: {source}", found=self.location)

    def _require_free(self) -> None:
        """Refuse a destination that exists, unless it is an empty directory or may be replaced."""
        try:
            mode = os.stat(self._destination).st_mode
        except FileNotFoundError:
            return
        except OSError as e:
            raise _destination_error(e, self.location) from e
        if stat.S_ISDIR(mode) == self.is_file or not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            wanted, found = ("a file", "a directory") if stat.S_ISDIR(mode) else ("a directory", "no directory")
            raise DestinationError(f"the destination is of another kind: {self.location}", expected=wanted, found=found)
        if not self.is_file and os.path.ismount(self._destination):
            raise DestinationError(
                f"the destination is a mount point, which cannot be replaced as a whole: {self.location}",
                hints=["name a directory below it"],
            )
        is_empty_directory = stat.S_ISDIR(mode) and not os.listdir(self._destination)
        if not self._overwrite and not is_empty_directory:
            raise DestinationExistsError(
                f"the destination exists: {self.location}",
                hints=["choose another name, or pass --overwrite to replace it when the new one is complete"],
            )

    def _take_lock(self) -> None:
        while True:
            os.makedirs(self._partial, exist_ok=True)
            if os.path.islink(self._partial):
                raise DestinationError(f"a link has the name of the partial directory: {self._partial}")
            path = os.path.join(self._partial, "lock")
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:  # the run that had it has just finished
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                holder = os.pread(fd, 200, 0).decode("utf-8", "replace")
                os.close(fd)
                raise LockedError(
                    f"another run is writing to this destination: {self.location}",
                    found=holder,
                    hints=["wait until it has finished"],
                ) from e
            except OSError:
                pass  # a file system without locks: nothing better can be had there
            if _is_same_file(fd, path):
                break
            os.close(fd)  # removed by the run that held it, between our opening and locking it
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._lock_fd = fd

    def _recover(self) -> None:
        """Put right what a crash while replacing a directory left: the old one back, or, when replaced, deleted."""
        if not os.path.lexists(self._old):
            return
        if os.path.isdir(self._destination) and os.listdir(self._destination):
            shutil.rmtree(self._old)
        else:
            os.rename(self._old, self._destination)
            _sync_directory(self._parent)

    def _sweep(self) -> None:
        """Do what is left to do of a run that died after its rename, when the destination was complete."""
        if not os.path.isdir(self._partial) or os.path.islink(self._partial):
            return
        with contextlib.suppress(LockedError, OSError, StorageError):
            self._take_lock()
            if self.is_file and not os.path.lexists(os.path.join(self._files, self._name)):
                self._place_further_files()
            self.close()

    def journal_lines(self) -> list[str]:
        """See `Target.journal_lines`; a last line that was cut off is removed."""
        try:
            with open(self._journal, "rb+") as file:
                data = file.read()
                complete = data.rfind(b"\n") + 1
                file.truncate(complete)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise storage_error(e, self._journal) from e
        return data[:complete].decode("utf-8", "surrogateescape").splitlines()

    def start_journal(self, header: str) -> None:
        """See `Target.start_journal`."""
        with _storage_errors(self._partial):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._journal)  # first, so that a crash leaves no journal of files that are gone
            if os.path.lexists(self._files):
                shutil.rmtree(self._files)
            os.mkdir(self._files)
        self.append_journal(header)

    def append_journal(self, line: str) -> None:
        """See `Target.append_journal`."""
        with _storage_errors(self._journal), open(self._journal, "ab") as file:
            file.write(line.encode("utf-8", "surrogateescape") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def reset_journal(self) -> None:
        """See `Target.reset_journal`."""
        with _storage_errors(self._journal), open(self._journal, "rb+") as file:
            file.readline()
            file.truncate(file.tell())

    def space(self) -> Space:
        """Free bytes and inodes where the output is built."""
        with _storage_errors(self._partial):
            status = os.statvfs(self._partial)
            used = 0
            for directory, _, names in os.walk(self._files):
                used += sum(os.stat(os.path.join(directory, name)).st_blocks * 512 for name in names)
        free_bytes = status.f_bavail * status.f_frsize if status.f_blocks else None
        return Space(free_bytes, status.f_favail if status.f_files else None, used, self._parent)

    def length_bytes(self, path: str) -> int | None:
        """See `Target.length_bytes`."""
        try:
            return os.stat(self._built(path)).st_size
        except FileNotFoundError:
            return None
        except OSError as e:
            raise storage_error(e, self._named(path)) from e

    def keep_only(self, paths: Collection[str]) -> None:
        """Remove what an earlier run has written besides these output files."""
        wanted = {self._built(path) for path in paths}
        with _storage_errors(self._partial):
            for directory, _, names in os.walk(self._files):
                for name in names:
                    if os.path.join(directory, name) not in wanted:
                        os.unlink(os.path.join(directory, name))

    def create(self, path: str, length_bytes: int) -> None:
        """Make an output file of this length, or keep the one of an earlier run."""
        built = self._built(path)
        with _storage_errors(self._named(path)):
            os.makedirs(os.path.dirname(built), exist_ok=True)
            fd = os.open(built, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                if os.fstat(fd).st_size != length_bytes:
                    os.ftruncate(fd, length_bytes)
            finally:
                os.close(fd)

    def write(self, path: str, offset: int, data: memoryview | bytes) -> None:
        """Write to a created file, at any place."""
        view = memoryview(data)
        done = 0
        try:
            with self._handles.borrow(self._built(path)) as fd:
                while done < len(view):
                    done += os.pwrite(fd, view[done : done + WRITE_BYTES], offset + done)
        except OSError as e:
            raise write_error(e, self._named(path), offset + done) from e

    def sync(self, path: str) -> None:
        """Return when all that was written to a file is on disk."""
        with _storage_errors(self._named(path)), self._handles.borrow(self._built(path)) as fd:
            os.fsync(fd)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Target.read_into`."""
        done = 0
        try:
            with self._handles.borrow(self._built(path)) as fd:
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], offset + done)
                    if count == 0:
                        where = f"{self._named(path)} at byte {offset + done}"
                        raise StorageError("an output file is shorter than what was written to it", where=where)
                    done += count
        except OSError as e:
            raise storage_error(e, self._named(path), offset + done) from e

    def put(self, path: str, data: Iterable[bytes]) -> None:
        """See `Target.put`. Beside a single file the further one goes into the same directory."""
        beside = os.path.join(self._parent, path)
        if self.is_file and (path == self._name or (os.path.lexists(beside) and not self._overwrite)):
            raise DestinationError(f"a file of this name exists: {beside}")
        built = os.path.join(self._files, path)
        with _storage_errors(self._named(path)):
            os.makedirs(os.path.dirname(built), exist_ok=True)
            fd = os.open(built, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with open(fd, "wb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(fd)

    def commit(self) -> None:
        """See `Target.commit`. The one place where a destination changes."""
        with _storage_errors(self.location):
            self._handles.close()
            for directory, _, _ in os.walk(self._files, topdown=False):
                _sync_directory(directory)
            self._require_free()
            if self.is_file:
                os.replace(os.path.join(self._files, self._name), self._destination)
                self._place_further_files()
            else:
                if os.path.isdir(self._destination) and os.listdir(self._destination):
                    os.rename(self._destination, self._old)
                os.rename(self._files, self._destination)
            _sync_directory(self._parent)
            if os.path.lexists(self._old):
                shutil.rmtree(self._old)
            self._clear()

    def _place_further_files(self) -> None:
        """Move what belongs beside a single file to its place; after the file, for which it speaks."""
        for name in sorted(os.listdir(self._files)) if os.path.isdir(self._files) else ():
            os.replace(os.path.join(self._files, name), os.path.join(self._parent, name))

    def close(self) -> None:
        """See `Target.close`."""
        if self._lock_fd is None:
            return
        with contextlib.suppress(OSError):  # what must not fail was flushed before, and why the run ended counts more
            self._handles.close()
            if not any(names for _, _, names in os.walk(self._files)):
                self._clear()  # nothing was written, so nothing is left
        os.close(self._lock_fd)
        self._lock_fd = None

    def _clear(self) -> None:
        """Remove the partial directory; the lock last, while it is held."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._journal)
        if os.path.lexists(self._files):
            shutil.rmtree(self._files)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._partial, "lock"))
        with contextlib.suppress(OSError):  # something that is not ours lies in it
            os.rmdir(self._partial)

    @property
    def built(self) -> str:
        """Where the output is until it gets its name; a directory, or the single file."""
        return self._built(self._name) if self.is_file else self._files

    def _built(self, path: str) -> str:
        """Where an output file is while it is built; a single file under the destination's name, whatever its own."""
        return os.path.join(self._files, self._name if self.is_file else path)

    def _named(self, path: str) -> str:
        """What to call an output file in messages: the place where it will be."""
        return self.location if self.is_file else os.path.join(self.location, path)


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _is_same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such thing
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def _storage_errors(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise write_error(e, where) from e


def _destination_error(e: OSError, where: str) -> DestinationError:
    error = storage_error(e, where)
    return DestinationError(f"the destination cannot be written: {error.message}", where=where, hints=error.hints)
