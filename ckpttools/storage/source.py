"""Source: list and read a snapshot's files, local or by fsspec URL.

A `Source` cannot write: read-only is a type, not a flag (`storage.target` has the type that writes). Reads are explicit
(`preadv` into the caller's buffer), never a memory map: a map of a file that shrinks kills the process. Read
`open_source` and `Source` first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import unquote

from ckpttools.errors import MissingExtraError, NotFoundError, ShortReadError, StorageError
from ckpttools.storage.store_errors import store_error_types

_UNABLE = "this file system (FUSE over a store, say) cannot do that; write to a local disk, and copy what comes out to it"
CANNOT = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a file system says that lacks a call, and will say again."""
_MAX_DEPTH = 4
_LOCAL_SCHEMES = ("file", "local")
_MAX_OPEN_FILES = 128


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as a listing shows it."""

    path: str
    """Relative to the source's root, `/` between its parts."""
    length_bytes: int
    modified_s: float | None = None
    """Seconds since the epoch; None where the store does not tell."""
    is_regular: bool = True
    """False for devices, pipes, sockets and links that lead nowhere; such files are never opened."""
    root: str = ""
    """Of several roots the one that holds it (`storage.union`)."""

    @property
    def kind(self) -> str:
        """What it is, for people."""
        if self.is_regular:
            return "a regular file"
        return "a device, pipe or socket" if self.modified_s is not None else "a link to a file that is not there"


def is_shadow(path: str) -> bool:
    """Whether a file is an AppleDouble: `._model.safetensors` has what a foreign file system cannot keep of the file. Pure."""
    return path.rpartition("/")[2].startswith("._")


class Listing:
    """The files below a root, by relative path."""

    def __init__(
        self,
        files: list[ListedFile],
        *,
        directories: tuple[str, ...] = (),
        is_one_file: bool = False,
        copies: Mapping[str, tuple[ListedFile, ...]] | None = None,
    ) -> None:
        self.files: dict[str, ListedFile] = {f.path: f for f in sorted(files, key=lambda f: f.path)}
        self.directories = directories
        self.is_one_file = is_one_file
        """Whether a single file was asked for, whatever lies beside it."""
        self.copies = dict(copies or {})
        """Of several roots: what further roots hold under a path of `files`, each under a path of its own."""
        self._copies = {c.path: c for further in self.copies.values() for c in further}

    def __iter__(self) -> Iterator[ListedFile]:
        return iter(self.files.values())

    def __contains__(self, path: str) -> bool:
        return path in self.files or path in self._copies

    def __len__(self) -> int:
        return len(self.files)

    def find(self, path: str) -> ListedFile | None:
        """A listed file, or a copy of one by the path that it has as a copy; None for what is not listed."""
        return self.files.get(path) or self._copies.get(path)

    def length_bytes(self, path: str) -> int:
        """Length of a listed file. Raises KeyError for one that is not listed."""
        return (self._copies.get(path) or self.files[path]).length_bytes

    def holders(self, path: str) -> list[tuple[str, str]]:
        """(root, path as listed) of a file and of its copies; empty for what is not listed."""
        file = self.files.get(path)
        return [(f.root, f.path) for f in (file, *self.copies.get(path, ()))] if file is not None else []

    @cached_property
    def without_shadows(self) -> Listing:
        """The same without what macOS wrote beside the files (`is_shadow`), which no training stack means."""
        if not any(map(is_shadow, self.files)):
            return self
        files = [f for f in self if not is_shadow(f.path)]
        return Listing(files, directories=self.directories, is_one_file=self.is_one_file, copies=self.copies)

    def in_directory(self, directory: str) -> list[ListedFile]:
        """The files directly in `directory` ("" for the root)."""
        return [f for f in self if f.path.rpartition("/")[0] == directory]

    def subdirectories(self, directory: str = "") -> list[str]:
        """Paths of the directories directly in `directory` that hold files, in order."""
        prefix = f"{directory}/" if directory else ""
        names = {p[len(prefix) :].partition("/")[0] for p in self.files if p.startswith(prefix) and "/" in p[len(prefix) :]}
        return [prefix + n for n in sorted(names)]


class Source(Protocol):
    """Read access to the files of one root."""

    location: str

    def listing(self) -> Listing:
        """All files below the root, at most four directories deep."""
        ...

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `file` from `offset`. Raises StorageError when the file has fewer."""
        ...


def read(source: Source, file: str, offset: int, length: int) -> bytes:
    """`length` bytes of `file` from `offset`; for manifests and headers, whose length was checked against the listing."""
    buffer = bytearray(length)
    source.read_into(file, offset, memoryview(buffer))
    return bytes(buffer)


def is_url(location: str) -> bool:
    """Whether `location` names an object store or another fsspec file system; `file://` is a path like any other."""
    scheme, separator, _ = location.partition("://")
    return bool(separator) and len(scheme) > 1 and scheme.lower() not in _LOCAL_SCHEMES


def local_path(location: str) -> str:
    """The path that a location which is no URL stands for: itself, or what a `file://` URL names."""
    scheme, separator, rest = location.partition("://")
    if not separator or scheme.lower() not in _LOCAL_SCHEMES:
        return location
    return unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest)


def open_source(location: str) -> tuple[Source, str]:
    """A source for `location` and, when it names a single file, that file's path in the source ("" for a directory).

    A single file's source lists that file alone; a file beside it is not part of what was asked for.

    Raises: NotFoundError: when nothing is there. StorageError: when it cannot be looked at.
    """
    if is_url(location):
        return _open_url(location)
    location = local_path(location)
    try:
        mode = os.stat(location).st_mode
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            raise NotFoundError(f"nothing there: {location}") from e
        raise storage_error(e, location) from e
    if stat.S_ISDIR(mode):
        return LocalSource(location), ""
    if not stat.S_ISREG(mode):
        raise StorageError(f"neither a file nor a directory: {location}")
    directory, name = os.path.split(location)
    return LocalSource(directory or ".", only=name), name


def exists(location: str) -> bool:
    """Whether anything is at a location. Raises StorageError when that cannot be told."""
    try:
        open_source(location)
    except NotFoundError:
        return False
    return True


def holds_more_than(location: str, count: int) -> bool:
    """Whether more than `count` files and directories are below a local directory; stops as soon as that is known.

    False for a URL: a store's listing comes a thousand names at a time. What may not be looked at does not count.
    """
    if is_url(location):
        return False
    waiting, seen = [local_path(location)], 0
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                seen += 1
                if seen > count:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return False


def absolute(location: str) -> str:
    """`location` spelled so that it does not depend on the working directory."""
    return location if is_url(location) else os.path.abspath(local_path(location))


class LocalSource:
    """A directory of the local file system."""

    def __init__(self, root: str, *, only: str = "") -> None:
        self.location = root
        self._only = only
        self._open_files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def listing(self) -> Listing:
        """One scan; links to files are followed (the Hugging Face cache is made of them), links to directories not."""
        try:
            if self._only:
                return Listing([_listed(os.path.join(self.location, self._only), self._only)], is_one_file=True)
            files: list[ListedFile] = []
            directories: list[str] = []
            self._scan("", _MAX_DEPTH, files, directories)
        except OSError as e:
            raise storage_error(e, e.filename or self.location) from e
        return Listing(files, directories=tuple(sorted(directories)))

    def _scan(self, directory: str, depth: int, files: list[ListedFile], directories: list[str]) -> None:
        with os.scandir(os.path.join(self.location, directory) if directory else self.location) as entries:
            for entry in entries:
                path = f"{directory}/{entry.name}" if directory else entry.name
                if not entry.is_dir():
                    files.append(_listed(entry.path, path))
                elif not entry.is_symlink():
                    directories.append(path)
                    if depth > 1:
                        self._scan(path, depth - 1, files, directories)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """See `Source.read_into`."""
        with self._borrow(file) as fd:
            done = 0
            try:
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], offset + done)
                    if count == 0:
                        raise _short_read(file, offset + done, offset + len(buffer))
                    done += count
            except OSError as e:
                raise storage_error(e, file, offset + done) from e

    @contextlib.contextmanager
    def _borrow(self, file: str) -> Iterator[int]:
        """A file descriptor that stays open while it is used; the least recently used ones are closed."""
        with self._lock:
            opened = self._open_files.get(file)
            if opened is None:
                try:
                    opened = _OpenFile(_open_regular(os.path.join(self.location, file), file))
                except (OSError, ValueError) as e:  # ValueError: a name with a NUL in it
                    raise storage_error(e, file) from e
                self._open_files[file] = opened
            opened.users += 1
            self._open_files.move_to_end(file)
            idle = [f for f, o in self._open_files.items() if o.users == 0]
            for name in idle[: max(0, len(self._open_files) - _MAX_OPEN_FILES)]:
                os.close(self._open_files.pop(name).fd)
        try:
            yield opened.fd
        finally:
            with self._lock:
                opened.users -= 1

    def __del__(self) -> None:
        for opened in getattr(self, "_open_files", {}).values():
            with contextlib.suppress(OSError):
                os.close(opened.fd)


def _open_regular(path: str, file: str) -> int:
    """A descriptor for reading; a pipe would wait for a writer for ever, a device gives bytes without end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError("not a regular file", where=file, expected="a regular file", found="a pipe, device or directory")
    return fd


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0


def _listed(path: str, relative: str) -> ListedFile:
    """A directory entry with what a stat says; a link that leads nowhere is listed as not regular."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ListedFile(relative, 0, None, is_regular=False)
    return ListedFile(relative, status.st_size, status.st_mtime, is_regular=stat.S_ISREG(status.st_mode))


def _open_url(location: str) -> tuple[Source, str]:
    fs, root = filesystem(location)
    try:
        if fs.isfile(root):
            directory, _, name = root.rpartition("/")
            return UrlSource(location.rstrip("/")[: -len(name) - 1], fs, directory, only=name), name
        if not fs.exists(root):
            raise NotFoundError(f"nothing there: {location}")
    except store_error_types() as e:
        raise storage_error(e, location) from e
    return UrlSource(location, fs, root), ""


def filesystem(location: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, without its listing cache, and the path in it."""
    # gcsfs asks a gRPC storage-layout service by default and waits 60 s where only HTTPS gets through
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    scheme = location.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(location, **({"use_listings_cache": False} if scheme not in ("memory", "file") else {}))
    except ImportError as e:
        extra = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}.get(scheme, scheme)
        raise MissingExtraError(
            f"reading {scheme}:// needs another package: {e}", hints=[f"pip install 'ckpttools[{extra}]'"]
        ) from e
    except ValueError as e:
        raise StorageError(f"no file system for this URL: {location}", found=str(e)) from e
    return fs, root


class UrlSource:
    """A prefix of an fsspec file system."""

    def __init__(self, location: str, fs: Any, root: str, *, only: str = "") -> None:
        self.location = location
        self._fs = fs
        self._root = root.rstrip("/")
        self._only = only

    def listing(self) -> Listing:
        """One recursive listing; object stores have no links and no special files."""
        try:
            if self._only:
                info = self._fs.info(f"{self._root}/{self._only}")
                return Listing([ListedFile(self._only, int(info["size"]), modified_s(info))], is_one_file=True)
            found = self._fs.find(self._root, maxdepth=_MAX_DEPTH, detail=True)
        except store_error_types() as e:
            raise storage_error(e, self.location) from e
        prefix = self._fs._strip_protocol(self._root).rstrip("/") + "/"
        return Listing(
            [ListedFile(p[len(prefix) :], int(i["size"] or 0), modified_s(i)) for p, i in found.items() if p.startswith(prefix)]
        )

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """See `Source.read_into`."""
        if not buffer:
            return
        try:
            data = self._fs.cat_file(f"{self._root}/{file}", start=offset, end=offset + len(buffer))
        except store_error_types() as e:
            raise storage_error(e, file, offset) from e
        if len(data) != len(buffer):
            raise _short_read(file, offset + len(data), offset + len(buffer))
        buffer[:] = data


def modified_s(info: dict[str, Any]) -> float | None:
    """Modification time of an fsspec info record, which each store spells in its own way."""
    for key in ("mtime", "LastModified", "updated", "last_modified", "created"):
        value = info.get(key)
        if isinstance(value, (int, float)):
            return float(value)
        timestamp: Callable[[], float] | None = getattr(value, "timestamp", None)
        if timestamp is not None:
            return timestamp()
    return None


def _short_read(file: str, found_bytes: int, expected_bytes: int) -> StorageError:
    return ShortReadError(
        "a file became shorter while it was read",
        where=file,
        expected=f"at least {expected_bytes} bytes",
        found=f"{found_bytes} bytes",
        hints=["another process is writing to this snapshot; wait until it has finished"],
    )


@contextlib.contextmanager
def store_errors(where: str) -> Iterator[None]:
    """Turns what a store raises into a StorageError about a place."""
    try:
        yield
    except store_error_types() as e:
        raise storage_error(e, where) from e


def storage_error(e: Exception, where: str, offset: int | None = None) -> StorageError:
    """An operating system's or a store's error, with what to do about the common ones."""
    at = where if offset is None else f"{where} at byte {offset}"
    hints = {
        errno.EACCES: "check the permissions of the file and of the directories above it",
        errno.EPERM: "check the permissions of the file and of the directories above it",
        errno.ENOSPC: "free space or choose another destination; the next run goes on where this one stopped",
        errno.EDQUOT: "the quota is used up; free space or choose another destination",
        errno.EIO: "the device or the network file system failed; check it before trusting other files on it",
        errno.ESTALE: "the network file system lost the file; mount it again",
        errno.EROFS: "the file system is mounted read-only",
        **dict.fromkeys(CANNOT, _UNABLE),
    }
    number = getattr(e, "errno", None)
    text = os.strerror(number) if isinstance(number, int) and number > 0 else str(e) or type(e).__name__
    return StorageError(text[:1].lower() + text[1:], where=at, hints=[hints[number]] if number in hints else [])
