"""Opens the files of a snapshot and reads what their pickles say: plain values with their types checked, tensors located.

Nothing is trusted: what has not the type that DeepSpeed gives it is a finding, or is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.containers.torch_entries import RankFile, open_rank_file
from ckpttools.containers.torch_extents import Expansion, locate_tensor
from ckpttools.containers.torch_file import KnownPickles
from ckpttools.containers.torch_values import MalformedError, TensorValue, read_value
from ckpttools.dtypes import DType
from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.names import numbers_of
from ckpttools.model import Extent, StoredChecksum
from ckpttools.pickles.records import Object
from ckpttools.pickles.views import attributes, class_of, mapping_items, sequence_items
from ckpttools.storage.source import Listing, Source

Shapes = dict[str, tuple[int, ...]]
MAX_ELEMENTS = 2**62


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file and where its values lie."""

    dtype: DType
    shape: tuple[int, ...]
    extent: Extent

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(slots=True)
class Files:
    """Opens files of one snapshot and keeps what is wrong with them."""

    source: Source
    listing: Listing
    findings: list[Finding] = field(default_factory=list)
    checksums: list[StoredChecksum] = field(default_factory=list)
    _expansion: Expansion = field(default_factory=Expansion)
    _pickles: KnownPickles = field(default_factory=KnownPickles)

    def open(self, path: str, rank: int = 0) -> RankFile | None:
        """An opened torch file; None, with findings, when nothing in it can be understood. Raises StorageError."""
        file = open_rank_file(self.source, path, self.listing.length_bytes(path), rank, self._pickles)
        self.findings += file.torch.findings
        self.findings += _check_name(path, file.torch.root)
        self.checksums += file.torch.checksums
        self._expansion.add_file(file.torch)
        return file if file.torch.value is not None else None

    def locate(self, file: RankFile, record: object, what: str) -> Stored | None:
        """Where a tensor of a file lies; None for what is no dense tensor, with a finding when it should be one."""
        where = f"{what} in {file.path}"
        try:
            value = read_value(record)
        except MalformedError as e:
            self.findings.append(Finding("bad-pickle", where, "a tensor as torch pickles it", str(e)))
            return None
        if not isinstance(value, TensorValue):
            return None
        extent = locate_tensor(file.torch, file.path, value, where, self._expansion)
        if isinstance(extent, Finding):
            self.findings.append(extent)
            return None
        return Stored(value.dtype, value.shape, extent)

    def read_number(self, stored: Stored) -> float | int | None:
        """The value of a tensor of one element, read at once: a step counter. Raises StorageError."""
        from struct import unpack

        code = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}.get(stored.dtype.name)
        if stored.numel != 1 or code is None or stored.extent.encoding is not None:
            return None
        data = bytearray(stored.dtype.item_bytes)
        self.source.read_into(stored.extent.file, stored.extent.offset, memoryview(data))
        order = ">" if "byteswap" in stored.extent.transforms else "<"
        number = unpack(order + code, data)[0]
        return int(number) if float(number).is_integer() else float(number)


def _check_name(path: str, root: str) -> list[Finding]:
    """A finding when a file has the name of another rank, layer or expert than the one under which it was written."""
    claimed, written = numbers_of(path), numbers_of(f"{root}.pt")
    if written is None or claimed is None or claimed == written:
        return []
    expected, found = "the file that was written under this name", f"`{root}.pt`, by the name in its archive"
    return [Finding("rank-mismatch", path, expected, found)]


def table(record: object) -> dict[str, object]:
    """A mapping with text keys; empty for anything else. Pure."""
    return {k: v for k, v in mapping_items(record) or [] if isinstance(k, str)}


def numbered(record: object) -> dict[int, object]:
    """A mapping with whole numbers as keys, or the items of a sequence by their place. Pure."""
    pairs = mapping_items(record)
    if pairs is None:
        return dict(enumerate(items(record)))
    return {k: v for k, v in pairs if type(k) is int}


def items(record: object) -> list[object]:
    """The items of a sequence; none of anything else. Pure."""
    return sequence_items(record) or []


def count(value: object) -> int | None:
    """A non-negative whole number; None for anything else (bool is none). Pure."""
    return value if type(value) is int and 0 <= value <= MAX_ELEMENTS else None


def counts(record: object) -> list[int]:
    """A list of non-negative whole numbers; what is none counts as 0. Pure."""
    return [count(v) or 0 for v in items(record)]


def enum_value(record: object) -> int | None:
    """The number of an enum member, which is pickled as a call of its class, or a plain number. Pure."""
    if isinstance(record, Object) and record.args:
        return count(record.args[0])
    return count(record)


def members(record: object) -> Mapping[str, object]:
    """What an object's attributes or a mapping's keys say (`argparse.Namespace` or dict). Pure."""
    found = table(record)
    return found or (attributes(record) or {} if class_of(record) is not None else {})


def shape_of(record: object) -> tuple[int, ...] | None:
    """A `torch.Size` or a tuple of numbers; None for what is no shape of a tensor. Pure."""
    sizes = sequence_items(record)
    if sizes is None or len(sizes) > 64:
        return None
    volume, found = 1, []
    for size in sizes:
        n = count(size)
        if n is None:
            return None
        volume *= max(n, 1)
        found.append(n)
    return tuple(found) if volume <= MAX_ELEMENTS else None


def shape_tables(record: object, findings: list[Finding], where: str) -> list[Shapes] | None:
    """`param_shapes`: per group the shape of each parameter, in the order of the flat buffer; None when not recorded.

    Releases before 0.4 had one mapping for the only group.
    """
    if record is None:
        return None
    groups: Sequence[object] = [record] if mapping_items(record) is not None else items(record)
    found: list[Shapes] = []
    for group in groups:
        shapes: Shapes = {}
        for name, value in table(group).items():
            shape = shape_of(value)
            if shape is None:
                findings.append(Finding("bad-pickle", f"shape of `{name}` in {where}", "a shape", type(value).__name__))
            else:
                shapes[name] = shape
        found.append(shapes)
    return found
