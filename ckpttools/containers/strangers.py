"""What a file is that should hold tensors and does not: told by its first bytes or its name, with what to do about it. Pure.

Most files that do not parse were not damaged by a disk: they are a pointer of Git LFS, the error page of a server, an archive
that nobody unpacked, or blocks that were reserved and never written. Whoever reads "bad header" restores a backup; whoever
reads "a Git LFS pointer" runs one command.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

HEAD_BYTES = 512
"""How many bytes of a file are enough to tell."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """What a file is, and what helps."""

    what: str
    remedy: str = ""
    """Empty where the remedy of the finding says it."""


_PAGE = Stranger("a page such as a server sends instead of a file", "read what it says, and download the file again")
_UNPACK = "unpack it, and name the directory that comes out"
_STARTS = (
    (
        b"version https://git-lfs",
        Stranger("a Git LFS pointer, not the file that it stands for", "fetch the file: `git lfs pull`"),
    ),
    (b"\x1f\x8b", Stranger("compressed with gzip", "decompress it: `gunzip`, or `tar xzf` if it is a tar archive")),
    (b"\x28\xb5\x2f\xfd", Stranger("compressed with zstd", "decompress it: `unzstd`")),
    (b"\xfd7zXZ\0", Stranger("compressed with xz", "decompress it: `unxz`")),
    (b"BZh", Stranger("compressed with bzip2", "decompress it: `bunzip2`")),
    (b"7z\xbc\xaf\x27\x1c", Stranger("a 7z archive", _UNPACK)),
    (b"GGUF", Stranger("a GGUF file of llama.cpp", "convert the checkpoint that it was made from; GGUF is not read")),
    (b"\x89HDF\r\n", Stranger("an HDF5 file, as Keras writes", "save it as safetensors with the program that wrote it")),
    (b"\x93NUMPY", Stranger("an array of numpy", "save it as safetensors with the program that wrote it")),
    (b"\x00\x05\x16\x07", Stranger("an AppleDouble file, which macOS puts beside the file itself", "copy the file itself")),
    (b"PK\x03\x04", Stranger("a zip archive, as torch.save writes", "give it a name that ends in .pt")),
)
_NAMES = (
    (r".*\.nemo", Stranger("a `.nemo` archive, which is a tar file", "unpack it with `tar xf`, and name what comes out")),
    (r".*\.(?:tar|tgz|tar\.\w+)", Stranger("a tar archive", _UNPACK)),
    (r".*\.(?:zip|7z|rar)", Stranger("an archive", _UNPACK)),
    (r".*\.(?:gz|zst|xz|bz2)", Stranger("a compressed file", "decompress it")),
    (r".*\.gguf|ggml-.*\.bin", Stranger("a file of llama.cpp", "convert the checkpoint that it was made from; GGUF is not read")),
    (r".*\.npz|.*\.npy", Stranger("arrays of numpy", "save them as safetensors with the program that wrote them")),
    (r".*\.(?:h5|hdf5|keras)", Stranger("a file of Keras", "save it as safetensors with Keras")),
    (r".*\.msgpack", Stranger("a msgpack file of Flax", "save the model with `save_pretrained(safe_serialization=True)`")),
    (r".*\.onnx", Stranger("an ONNX graph", "name the checkpoint that it was exported from")),
    (
        r"(?:.*/)?(?:_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt|_sharding|_strings\.json)",
        Stranger("a checkpoint of Orbax (JAX)", "load it with Orbax, and save it as safetensors; Orbax is not read"),
    ),
    (
        r".*\.data-\d{5}-of-\d{5}|(?:.*/)?saved_model\.pb",
        Stranger("a checkpoint of TensorFlow", "load it with TensorFlow, and save it as safetensors; it is not read"),
    ),
    (
        r".*-model_part-\d+-shard\d+\.pt",
        Stranger("shards of fairscale's FSDP (metaseq)", "consolidate them with metaseq's scripts"),
    ),
    (r".*\.znn", Stranger("a file that ZipNN compressed", "decompress it with zipnn")),
)
_BY_NAME = tuple((re.compile(pattern, re.IGNORECASE), stranger) for pattern, stranger in _NAMES)


def tell(head: bytes, *, is_safetensors: bool = False) -> Stranger | None:
    """What a file is that starts with these bytes (`HEAD_BYTES` of them are enough); None when nothing tells.

    Args: is_safetensors: it was to be one, so that it is not told to be one.
    """
    if len(head) >= 16 and not any(head):
        return Stranger("nothing but zero bytes, as of blocks that were reserved and never written")
    text = head.lstrip()[:16].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<error", b'{"error', b'{"message')):
        return _PAGE
    if not is_safetensors and head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") < 1 << 27:
        return Stranger("a safetensors file", "give it a name that ends in .safetensors")
    return next((stranger for start, stranger in _STARTS if head.startswith(start)), None)


def tell_by_name(paths: Iterable[str]) -> tuple[str, Stranger] | None:
    """(path, what it is) of the first file of a known kind that is not read; None when there is none."""
    for path in paths:
        for pattern, stranger in _BY_NAME:
            if pattern.fullmatch(path):
                return path, stranger
    return None
