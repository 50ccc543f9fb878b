"""Digests of tensors: over logical values alone, so that they are the same in every container.

The digest of a tensor is over its row-major little-endian bytes; nothing is put in front of them, so `b3sum` of an
extracted tensor gives the same. The fingerprint is the digest of the sorted lines `digest  dtype  shape  name`. Only
this module imports blake3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, cast

from ckpttools.model import TensorSpec

ALGORITHMS = ("blake3", "sha256")
DIGEST_HEX_LENGTH = 64


class Hasher(Protocol):
    """What hashlib and blake3 share."""

    def update(self, data: memoryview | bytes, /) -> object:
        """Take further bytes."""
        ...

    def hexdigest(self) -> str:
        """64 lower-case hexadecimal digits."""
        ...


def new_hasher(algorithm: str = "blake3") -> Hasher:
    """An empty hasher. Raises ValueError for an algorithm that is not in ALGORITHMS."""
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm != "blake3":
        raise ValueError(f"unknown digest algorithm: `{algorithm}`")
    from blake3 import blake3

    return cast(Hasher, blake3())


def digest_bytes(data: bytes | memoryview, algorithm: str = "blake3") -> str:
    """The digest of bytes in memory. Pure."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One line of a hash list."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, spec: TensorSpec, digest: str) -> TensorDigest:
        """The line of a tensor."""
        return cls(spec.name, spec.dtype.name, spec.shape, digest)

    @property
    def line(self) -> str:
        """`digest  dtype  shape  name`, the shape as `[2,3]`."""
        return f"{self.digest}  {self.dtype}  [{','.join(map(str, self.shape))}]  {self.name}"

    @property
    def listed_line(self) -> str:
        """The line as `hash` prints it: like `line`, but a name with a line break is escaped, and the line says so by a
        backslash in front, as sha256sum does it."""
        if not any(c in self.name for c in "\n\r\\"):
            return self.line
        escaped = self.name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        return "\\" + TensorDigest(escaped, self.dtype, self.shape, self.digest).line


def fingerprint(digests: Iterable[TensorDigest], algorithm: str = "blake3") -> str:
    """One digest for a whole checkpoint: over its tensors' lines, sorted by their UTF-8 bytes, each ended by a newline. Pure.

    Names with a lone surrogate have no UTF-8 and are taken with `surrogatepass`.
    """
    lines = sorted(d.line.encode("utf-8", "surrogatepass") for d in digests)
    return digest_bytes(b"".join(line + b"\n" for line in lines), algorithm)
