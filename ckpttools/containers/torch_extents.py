"""From a tensor of a torch file to the extent of its values: bounds, strides, byte order, conjugate and negative bits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ckpttools.containers.torch_file import TorchFile
from ckpttools.containers.torch_values import TensorValue
from ckpttools.findings import Finding
from ckpttools.geometry import is_row_major, span_elements
from ckpttools.model import Extent

_MAX_EXPANSION = 64


@dataclass(slots=True)
class Expansion:
    """How many bytes the views of some files may have, all together, beyond those that they span.

    A stride of 0 makes a terabyte of four bytes; hashing that, or writing it out, is what an attacker wants.
    """

    allowed_bytes: int = 1 << 30

    def add_file(self, file: TorchFile) -> None:
        """Allow more for what a file stores."""
        self.allowed_bytes += _MAX_EXPANSION * sum(s.length for s in file.storages.values())

    def spend(self, excess_bytes: int, where: str) -> Finding | None:
        """A finding when a view has more excess bytes than are left; else they are taken off."""
        if excess_bytes > self.allowed_bytes:
            expected = f"at most {self.allowed_bytes} bytes beyond those stored"
            return Finding("amplification", where, expected, f"{excess_bytes} bytes")
        self.allowed_bytes -= max(0, excess_bytes)
        return None


def locate_tensor(file: TorchFile, path: str, tensor: TensorValue, where: str, expansion: Expansion) -> Extent | Finding:
    """Where the values of a tensor lie in file `path`; a finding when its storage does not hold them."""
    storage = file.storages.get(tensor.storage.key)
    if storage is None:
        return Finding("bad-container", where, f"a storage record `data/{tensor.storage.key}`", "none")
    item_bytes = tensor.dtype.item_bytes
    unit_bytes = tensor.storage.dtype.item_bytes if tensor.storage.dtype else 1
    stated_bytes = (tensor.storage.numel + tensor.storage.view_offset) * unit_bytes
    is_exact = storage.length == stated_bytes or (tensor.storage.view_offset and storage.length >= stated_bytes)
    if not is_exact:
        expected = f"{stated_bytes} bytes in storage `{tensor.storage.key}`"
        return Finding("storage-mismatch", where, expected, f"{storage.length} bytes")
    span_bytes = span_elements(tensor.shape, tensor.strides) * item_bytes
    offset_bytes = tensor.storage_offset * item_bytes
    if span_bytes and offset_bytes + span_bytes > storage.length:
        expected = f"bytes [{offset_bytes}, {offset_bytes + span_bytes}) inside storage `{tensor.storage.key}`"
        return Finding("storage-mismatch", where, expected, f"{storage.length} bytes")
    refused = expansion.spend(prod(tensor.shape) * item_bytes - span_bytes, where)
    if refused is not None:
        return refused
    is_dense = is_row_major(tensor.shape, tensor.strides)
    start = offset_bytes if span_bytes else 0  # a view without elements may point anywhere
    return Extent(
        path,
        storage.offset + start,
        span_bytes,
        None if is_dense else tensor.strides,
        _transforms(file, tensor),
        storage.encoding,
    )


def _transforms(file: TorchFile, tensor: TensorValue) -> tuple[str, ...]:
    """What turns the stored elements into the logical ones."""
    swaps = ("byteswap",) if file.is_big_endian and tensor.dtype.component_bytes > 1 else ()
    conjugates = ("conj",) if tensor.is_conjugated and tensor.dtype.kind == "complex" else ()
    return (*swaps, *conjugates, *(("neg",) if tensor.is_negated else ()))
