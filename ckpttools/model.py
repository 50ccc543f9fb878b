"""What every layout is turned into: `Checkpoint -> tensors -> pieces -> extents`, and the words for it.

Frozen plain data, no I/O, no arithmetic beyond a product. Start with `TensorEntry` and `Checkpoint`; the laws that
these values keep are in `geometry`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import add

from ckpttools.dtypes import DType
from ckpttools.findings import Finding

PathKey = str | int | float | bool | bytes | tuple[object, ...] | None
"""A key on the way to an entry: of a dict, or the place in a list."""
Path = tuple[PathKey, ...]
"""The typed keys that lead to an entry: `("optimizer", "state", 0, "exp_avg")`; 0 is not "0"."""


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor, in elements: per dimension [offset, offset + size). Rank 0 has volume 1."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; 1 for rank 0, 0 when any size is 0."""
        return prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """Per dimension the first index past the box."""
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"{len(self.offsets)} offsets and {len(self.sizes)} sizes")
        return tuple(map(add, self.offsets, self.sizes))  # three times as fast as a generator, and asked for millions of times


@dataclass(frozen=True, slots=True)
class Encoding:
    """A compressed stretch of a file: `file[offset, offset + length)` decodes by `codec` into `decoded_length` bytes."""

    codec: str
    """`zstd` or `deflate`."""
    offset: int
    """Bytes from the start of the file."""
    length: int
    """Bytes of compressed data."""
    decoded_length: int | None = None
    """Bytes after decoding, where something declares it."""


VOID = "void"
"""The transform of an extent that its writer never set: whatever is stored there, the values are zeros."""


@dataclass(frozen=True, slots=True)
class ItemPart:
    """What a lazy item holds, where a piece is a run of its row-major elements and not all of it."""

    shape: tuple[int, ...]
    """Of the tensor in the item."""
    first: int
    """Which of its elements the piece starts with."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of a box lie."""

    file: str
    """Path relative to the snapshot, `/` between its parts."""
    offset: int
    """Byte of the box's first element, from the start of the file (or of the decoded stream)."""
    length: int
    """Bytes from the first to the last element, both included."""
    strides: tuple[int, ...] | None = None
    """Elements between neighbours along each dimension; None when the box is stored row-major without gaps."""
    transforms: tuple[str, ...] = ()
    """What turns stored elements into logical ones, in order: `byteswap`, `conj`, `neg`, `void`."""
    encoding: Encoding | None = None
    """The compressed stretch in which `offset` counts, if any."""
    container: str = ""
    """`torch` when the stretch is a whole torch file that holds the box and was not opened yet: a manifest (DCP's) says
    where it lies, and only its own directory says where in it the values are. `containers.items` opens it."""
    part: ItemPart | None = None
    """With `container`: which part of the item it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of one tensor, stored in one extent."""

    box: Box
    extent: Extent
    rank: int | None = None
    """The rank that wrote it, where the layout says."""
    mean_with: tuple[Extent, ...] = ()
    """Further copies of the box, when its values are to be the mean of all copies: only where a user asked for it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a writer needs to know of a tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def length_bytes(self) -> int:
        """Bytes of its row-major values."""
        return self.dtype.length_bytes(self.volume)

    @property
    def box(self) -> Box:
        """The whole tensor."""
        return Box((0,) * len(self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint and where its values lie."""

    spec: TensorSpec
    path: Path
    """The typed keys that lead to it, as stored."""
    pieces: tuple[Piece, ...]
    """Cover the shape exactly once, or a finding says what is missing."""
    replicas: tuple[Piece, ...] = ()
    """Further copies of boxes of it; they must hold the same values."""
    shape_is_declared: bool = True
    """Whether something other than the pieces found states the global shape, so that completeness can be proved."""
    family: str = "model"
    """`model`, `optimizer`, `scheduler`, ...: what kind of state it is part of."""
    part_of: str = ""
    """For a part of a sparse, quantized or nested tensor: what the whole is, e.g. `sparse_coo float32 [4, 6]`."""
    replicas_may_differ: bool = False
    """Whether nothing in training makes the copies equal, so that a difference is worth a remark and is no damage."""
    rule: str = ""
    """How the pieces were put together, where the files do not say it and a layout's table does: `row dim 1`."""
    stale_copies: tuple[Piece, ...] = ()
    """Further copies that nothing reads when training resumes, such as a tied module's on a later pipeline stage: they may have
    fallen behind, and a difference is a warning."""
    rounded_from: str = ""
    """The name of the tensor of higher precision whose values, rounded, these must be, where the writer keeps both."""
    factors: tuple[tuple[int, ...], ...] = ()
    """Per dimension the numbers whose product it is, where pieces count in these: a row is (head, half, place in the half), and
    rows in another order are one box. Empty where pieces count in the dimensions themselves, as all that are read do."""

    @property
    def name(self) -> str:
        """The dotted name."""
        return self.spec.name

    @property
    def counted(self) -> TensorEntry:
        """The same values, row-major, in the shape in which the pieces count."""
        if not self.factors:
            return self
        shape = tuple(n for own in self.factors for n in own)
        return replace(self, spec=replace(self.spec, shape=shape), factors=())


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A named entry that is not a tensor: inert, and re-emitted as it was read."""

    name: str
    path: Path
    kind: str
    """For people and JSON: `int`, `dict`, `argparse.Namespace`, `sparse_coo float32 [4, 6]`, ..."""
    record: object = None
    """The value as `pickles` read it; None while it was not read (see `extent`)."""
    extent: Extent | None = None
    """Where its bytes lie, where it has a stretch of its own."""
    family: str = "model"
    copies: tuple[Extent, ...] = ()
    """Further copies of that stretch, in other roots."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, in order; prints and parses as `tp=2,pp=4`."""

    axes: tuple[tuple[str, int], ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the sizes."""
        return prod(size for _, size in self.axes)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh that `tp=2,pp=4` describes. Raises ValueError where it does not."""
        axes = []
        for part in filter(None, text.split(",")):
            name, equals, number = part.partition("=")
            if not (name.isidentifier() and equals and number.isascii() and number.isdigit() and int(number) > 0):
                raise ValueError(f"not a mesh axis: `{part}` (write it like tp=2)")
            axes.append((name, int(number)))
        if len({name for name, _ in axes}) != len(axes):
            raise ValueError(f"an axis is named twice: `{text}`")
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a snapshot."""

    path: str
    length_bytes: int
    role: str = "companion"
    """`data` holds tensors, `manifest` describes them, `objects` holds other state, `companion` comes along
    (config, tokenizer), `unreferenced` looks like data and nothing names it, `seal` is ours, `replica` is a copy of a file
    that another root holds too."""
    family: str = "model"
    root: str = ""
    """Of several roots the one that holds it."""
    copy_of: str = ""
    """For a `replica`: the path of the file that it must be equal to."""

    @property
    def place(self) -> str:
        """The path with its root in front; a copy in a further root has that path already."""
        return f"{self.root}/{self.path}" if self.root and not self.path.startswith(f"{self.root}/") else self.path


@dataclass(frozen=True, slots=True)
class StoredChecksum:
    """A checksum that the writer stored over one stretch of a file."""

    file: str
    offset: int
    length: int
    expected: int
    """CRC-32 as in zip."""
    label: str
    """What is covered, for messages: a zip member's name."""
    encoding: Encoding | None = None
    """Where the stretch lies in a compressed stream."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Whether the save finished, as far as the layout can tell."""

    is_committed: bool
    record: str = ""
    """The file that proves it, or what is missing."""


@dataclass(frozen=True)
class Checkpoint:
    """What a snapshot means; built from manifests and headers, without reading one tensor's bytes."""

    path: str
    layout: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...] = ()
    files: tuple[FileEntry, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)
    step: int | None = None
    written_by: str = ""
    commit: Commit = field(default_factory=lambda: Commit(True))
    findings: tuple[Finding, ...] = ()
    aliases: tuple[tuple[str, ...], ...] = ()
    """Groups of tensors that are one stored tensor under several names."""
    checksums: Sequence[StoredChecksum] = ()
    trees: Mapping[Path, object] = field(default_factory=dict)
    """Nested values as pickles held them, tensors in place, by the keys that lead to them: what is a list and what a dict."""
    roots: tuple[str, ...] = ()
    """All locations that it is spread over, `path` first; empty where it is at one."""

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Tensors by dotted name."""
        return {t.name: t for t in self.tensors}

    def __iter__(self) -> Iterator[TensorEntry]:
        return iter(self.tensors)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all logical values."""
        return sum(t.spec.length_bytes for t in self.tensors)


def render_path(path: Path) -> str:
    """The dotted name of typed keys; as stored, nothing is escaped. Pure."""
    return ".".join(key.decode("latin-1") if isinstance(key, bytes) else str(key) for key in path)


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes of an output file that are known before anything is copied: headers, indexes, pickles."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ChecksumSlot:
    """Four bytes of an output file for the CRC-32 (little-endian) of a stretch that lies before them in it."""

    offset: int
    covers_offset: int
    covers_length: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around a slot that is stored by itself, wherever in a file that is. Offsets count from its first byte.

    Slots of one dtype and shape share one, so that a million archives in a plan are a million slots and nothing else.
    """

    before: tuple[Literal, ...]
    """Up to the slot, without gaps."""
    after: tuple[Literal | ChecksumSlot, ...]
    """From the slot's last byte on, without gaps."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one box of one tensor goes in an output file, row-major and without gaps."""

    tensor: str
    """Name in the output."""
    box: Box
    offset: int
    """Bytes from the start of the output file."""
    length: int
    """Bytes."""
    frame: Frame | None = None
    """What else of the file belongs to it, if anything."""


@dataclass(frozen=True, slots=True)
class Carry:
    """A stretch of a source file that goes into an output file as it is."""

    source_file: str
    source_offset: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ArrangedFile:
    """One output file: slots, literals, checksum slots and carries tile it exactly."""

    path: str
    length_bytes: int
    slots: tuple[Slot, ...] = ()
    literals: tuple[Literal, ...] = ()
    checksums: tuple[ChecksumSlot, ...] = ()
    carries: tuple[Carry, ...] = ()
    is_commit_record: bool = False
    """Whether its presence makes the snapshot readable, so that it is written last."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What a writable layout answers to `arrange`: every output file, planned to the byte before one is written."""

    layout: str
    files: tuple[ArrangedFile, ...]
