"""Writes `.metadata`: the pickle of `torch.distributed.checkpoint.metadata.Metadata`, straight as opcodes.

A manifest has two rows for every chunk, and a large checkpoint on many ranks has a million chunks: records of all of them, and
the memo of a general pickler, would take gigabytes. What is written here is what pickle makes of these objects, row after row.

Source: pytorch/pytorch, torch/distributed/checkpoint/metadata.py and filesystem.py, v2.13.0; members that older releases do not
know are set as attributes there and ignored. Python, Lib/pickletools.py, for the opcodes of protocol 4.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckpttools.dtypes import DType
from ckpttools.model import Box, Path, TensorSpec

Place = tuple[str, int, int]
"""(file, offset, length) of an item."""
_METADATA = "torch.distributed.checkpoint.metadata"
_BATCH = 1000
"""As many items as pickle puts on its stack before it stores them."""


def write_metadata(
    tensors: Sequence[tuple[TensorSpec, Sequence[tuple[Box, Place]]]],
    objects: Sequence[tuple[str, Place]],
    paths: Mapping[str, Path] | None,
) -> bytes:
    """The manifest of tensors, each with its chunks and their places, and of objects. Pure.

    Args: paths: name -> keys from which torch rebuilds the nesting; None for a state dict that was not flattened.
    """
    out = _Emitter()
    names = [*(spec.name for spec, _ in tensors), *(name for name, _ in objects)]

    def rows() -> Iterator[None]:
        for spec, chunks in tensors:
            out.text(spec.name)
            out.instance("TensorStorageMetadata", _tensor_members(out, spec, [box for box, _ in chunks]))
            yield
        for name, _ in objects:
            out.text(name)
            out.instance("BytesStorageMetadata", {})
            yield

    def storage() -> Iterator[None]:
        for spec, chunks in tensors:
            for index, (box, place) in enumerate(chunks):
                _index(out, spec.name, box.offsets, index)
                _place(out, place)
                yield
        for name, place in objects:
            _index(out, name, None, None)
            _place(out, place)
            yield

    def keys() -> Iterator[None]:
        for name in names:
            out.text(name)
            out.values(paths[name] if paths else ())
            yield

    members: dict[str, Callable[[], None]] = {
        "state_dict_metadata": lambda: out.mapping(rows()),
        "planner_data": out.none if paths is None else lambda: out.mapping(keys()),
        "storage_data": lambda: out.mapping(storage()),
        "storage_meta": lambda: _storage_meta(out),
        "version": lambda: out.text("1.0.0"),
    }
    out.instance("Metadata", members)
    return out.finish()


def _tensor_members(out: _Emitter, spec: TensorSpec, boxes: Sequence[Box]) -> dict[str, Callable[[], None]]:
    def chunk(box: Box) -> None:
        offsets, sizes = box.offsets, box.sizes
        out.instance("ChunkStorageMetadata", {"offsets": lambda: out.size(offsets), "sizes": lambda: out.size(sizes)})

    return {
        "properties": lambda: out.once(spec.dtype, lambda: _properties(out, spec.dtype)),
        "size": lambda: out.size(spec.shape),
        "chunks": lambda: out.sequence(chunk, boxes),
    }


def _index(out: _Emitter, name: str, offsets: tuple[int, ...] | None, index: int | None) -> None:
    members: dict[str, Callable[[], None]] = {
        "fqn": lambda: out.text(name),
        "offset": out.none if offsets is None else lambda: out.size(offsets),
        "index": out.none if index is None else lambda: out.integer(index),
    }
    out.instance("MetadataIndex", members)


def _place(out: _Emitter, place: Place) -> None:
    file, offset, length = place
    members: dict[str, Callable[[], None]] = {
        "relative_path": lambda: out.text(file),
        "offset": lambda: out.integer(offset),
        "length": lambda: out.integer(length),
    }
    out.instance("_StorageInfo", members, module="torch.distributed.checkpoint.filesystem")


def _storage_meta(out: _Emitter) -> None:
    members: dict[str, Callable[[], None]] = dict.fromkeys(("checkpoint_id", "save_id", "load_id"), out.none)
    out.instance("StorageMeta", members | {"modules": lambda: out.sequence(lambda _: None, ())})


def _properties(out: _Emitter, dtype: DType) -> None:
    """TensorProperties of a dense tensor: (dtype, layout, requires_grad, memory format, pin_memory)."""
    out.new("TensorProperties")
    out.mark()
    out.named("torch", dtype.name)
    out.call("torch.serialization", "_get_layout", lambda: out.text("torch.strided"))
    out.false()
    out.call(_METADATA, "_MEM_FORMAT_ENCODING", lambda: out.integer(0))
    out.false()
    out.build_tuple()


class _Emitter:
    """Opcodes of one pickle of protocol 4, and what it remembers."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x04")
        self._memo: dict[object, int] = {}
        self._count = 0

    def finish(self) -> bytes:
        """The pickle."""
        self._out += b"."
        return bytes(self._out)

    def once(self, key: object, emit: Callable[[], None]) -> None:
        """What a key stands for: emitted the first time, recalled afterwards."""
        known = self._memo.get(key)
        if known is None:
            emit()
            self._memo[key] = self._count
            self._count += 1
            self._out += b"\x94"
        else:
            self._out += b"h" + bytes([known]) if known < 256 else b"j" + struct.pack("<I", known)

    def text(self, value: str) -> None:
        """A text, remembered: names and keys come again and again."""
        self.once(value, lambda: self._text(value))

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._out += b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        self._out += data

    def integer(self, value: int) -> None:
        """A number that is not negative."""
        if value < 1 << 8:
            self._out += b"K" + bytes([value])
        elif value < 1 << 16:
            self._out += b"M" + struct.pack("<H", value)
        elif value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little")
            self._out += b"\x8a" + bytes([len(data)]) + data

    def none(self) -> None:
        """None."""
        self._out += b"N"

    def false(self) -> None:
        """False."""
        self._out += b"\x89"

    def mark(self) -> None:
        """Begin a tuple that `build_tuple` makes the state of the object before it."""
        self._out += b"("

    def build_tuple(self) -> None:
        """End it."""
        self._out += b"tb"

    def named(self, module: str, name: str) -> None:
        """A class or a function."""

        def emit() -> None:
            self.text(module)
            self.text(name)
            self._out += b"\x93"

        self.once((module, name), emit)

    def call(self, module: str, name: str, argument: Callable[[], None]) -> None:
        """The result of calling something with one argument."""
        self.named(module, name)
        argument()
        self._out += b"\x85R"

    def size(self, sizes: tuple[int, ...]) -> None:
        """A torch.Size; those that are there already are the same object, as they are in memory."""
        self.once(("size", sizes), lambda: self.call("torch", "Size", lambda: self.values(sizes)))

    def values(self, items: tuple[object, ...]) -> None:
        """A tuple of numbers and texts."""
        self._out += b"(" if items else b")"
        for item in items:
            if isinstance(item, int):
                self.integer(item)
            else:
                self.text(str(item))
        self._out += b"t" if items else b""

    def new(self, name: str, module: str = _METADATA) -> None:
        """An instance without members."""
        self.named(module, name)
        self._out += b")\x81"

    def instance(self, name: str, members: Mapping[str, Callable[[], None]], module: str = _METADATA) -> None:
        """An instance whose members are emitted in turn."""
        self.new(name, module)
        if members:
            self._out += b"}("
            for key, emit in members.items():
                self.text(key)
                emit()
            self._out += b"ub"

    def sequence(self, emit: Callable[[Box], None], items: Sequence[Box]) -> None:
        """A list."""
        self._out += b"]"
        for start in range(0, len(items), _BATCH):
            self._out += b"("
            for item in items[start : start + _BATCH]:
                emit(item)
            self._out += b"e"

    def mapping(self, rows: Iterable[None]) -> None:
        """A dict, of which each step of `rows` emits a key and a value."""
        self._out += b"}"
        rows, count = iter(rows), 0
        start = len(self._out)
        self._out += b"("
        for _ in rows:
            count += 1
            if count % _BATCH == 0:
                self._out += b"u("
        self._out += b"u" if len(self._out) > start + 1 else b""
        if not count:
            del self._out[start:]
