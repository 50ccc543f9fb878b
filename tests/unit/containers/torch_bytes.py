"""Torch files as bytes: written by torch itself, or by hand where torch writes no such thing; and how to read them."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ckpttools.gather import Gather
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.operations.validate import Validation, validate


def saved(value: object, **options: object) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def rezipped(data: bytes, change: Callable[[dict[str, bytes]], None] = lambda _: None, *, method: int = 0) -> bytes:
    """The members of an archive after a change, written by Python (which has none of torch's padding)."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def by_hand(pickled: bytes, records: Mapping[str, bytes], *, byteorder: str = "little") -> bytes:
    """An archive with a pickle of the test's own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", byteorder)
        for name, content in records.items():
            archive.writestr(f"archive/data/{name}", content)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def _int(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _ints(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def tensor_pickle(
    *,
    numel: int = 6,
    offset: int = 0,
    size: Sequence[int] = (6,),
    stride: Sequence[int] = (1,),
    storage: str = "FloatStorage",
    key: str = "0",
) -> bytes:
    """The pickle of `{"w": tensor}` with any numbers in it, also those that torch would not write."""
    pid = _text("storage") + b"ctorch\n" + storage.encode() + b"\n" + _text(key) + _text("cpu") + _int(numel)
    hooks = b"ccollections\nOrderedDict\n)R"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n((" + pid + b"tQ" + _int(offset) + _ints(size) + _ints(stride) + b"\x89" + hooks
    return b"\x80\x02}" + _text("w") + tensor + b"tRs."


def checked(directory: Path, data: bytes, name: str = "w.pt") -> Validation:
    """What `validate` says of a file with these bytes."""
    (directory / name).write_bytes(data)
    return validate(str(directory / name))


def codes(result: Validation) -> set[str]:
    """The codes of its errors, warnings and notes."""
    return {f.code for f in result.findings}


def values(directory: Path, data: bytes, name: str = "w.pt") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every tensor of a file, by name."""
    (directory / name).write_bytes(data)
    return streamed(open_snapshot(str(directory / name), is_located=True))


def streamed(snapshot: Snapshot) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every tensor of a snapshot, by name."""
    gather = Gather(snapshot.source, memory_bytes=1 << 26)
    return {
        t.name: (t.spec.dtype.name, t.spec.shape, b"".join(bytes(tile) for tile in gather.stream(t)))
        for t in snapshot.checkpoint.tensors
    }


def as_torch(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """The same three of a tensor in memory."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return str(dense.dtype).removeprefix("torch."), tuple(dense.shape), data
