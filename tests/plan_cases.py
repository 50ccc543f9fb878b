"""Small checkpoints of raw bytes, plans over them, and what the output must be by brute force."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ckpttools import plan as plans
from ckpttools.cast import cast
from ckpttools.dtypes import BY_NAME, DType
from ckpttools.model import (
    ArrangedFile,
    Arrangement,
    Box,
    Checkpoint,
    ChecksumSlot,
    Extent,
    FileEntry,
    Literal,
    Piece,
    Slot,
    TensorEntry,
    TensorSpec,
)
from ckpttools.storage.source import LocalSource

BF16, FP32 = BY_NAME["bfloat16"], BY_NAME["float32"]
Cut = Callable[[tuple[int, ...]], Sequence[Box]]


@dataclass
class Case:
    """A checkpoint on disk and the bytes of its tensors."""

    checkpoint: Checkpoint
    source: LocalSource
    values: dict[str, bytes]

    def plan(self, arrangement: Arrangement, **options: object) -> plans.Plan:
        listing = self.source.listing()
        tensor_of = {t.name: t for t in self.checkpoint.tensors}
        return plans.make(self.checkpoint, arrangement, tensor_of=tensor_of, listing=listing, **options)


def whole(shape: tuple[int, ...]) -> list[Box]:
    return [Box((0,) * len(shape), shape)]


def along(axis: int, parts: int) -> Cut:
    """Cuts a shape in equal parts along one axis, where it has that axis."""

    def cut(shape: tuple[int, ...]) -> list[Box]:
        if len(shape) <= axis:
            return whole(shape)
        bounds = [shape[axis] * i // parts for i in range(parts + 1)]
        return [
            Box((*[0] * axis, low, *[0] * (len(shape) - axis - 1)), (*shape[:axis], high - low, *shape[axis + 1 :]))
            for low, high in pairwise(bounds)
        ]

    return cut


def cells(values: bytes, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Values as an array of cells that numpy moves and never looks at."""
    return np.frombuffer(values, f"V{dtype.item_bytes}").reshape(shape)


def bytes_of(values: bytes, dtype: DType, shape: tuple[int, ...], box: Box) -> bytes:
    """The row-major bytes of a box."""
    window = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return cells(values, dtype, shape)[(*window, ...)].tobytes()


def make_case(
    directory: Path, tensors: Mapping[str, tuple[DType, tuple[int, ...]]], cut: Cut = whole, *, files: int = 3, seed: int = 0
) -> Case:
    """Write random tensors, cut into pieces that go to the files in turn, with a gap before each."""
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    contents = [bytearray() for _ in range(files)]
    entries, values = [], {}
    for name, (dtype, shape) in tensors.items():
        spec = TensorSpec(name, dtype, shape)
        values[name] = chance.randbytes(spec.length_bytes)
        pieces = []
        for i, box in enumerate(cut(shape)):
            content = contents[i % files]
            content += b"gap"
            data = values[name] if dtype.is_sub_byte else bytes_of(values[name], dtype, shape, box)
            pieces.append(Piece(box, Extent(f"part{i % files}.bin", len(content), len(data))))
            content += data
        entries.append(TensorEntry(spec, (name,), tuple(pieces)))
    for i, content in enumerate(contents):
        (directory / f"part{i}.bin").write_bytes(content)
    (directory / "config.json").write_bytes(b'{"vocab_size": 7}')
    listed = [FileEntry(f"part{i}.bin", len(c), "data") for i, c in enumerate(contents)]
    listed.append(FileEntry("config.json", 17))
    checkpoint = Checkpoint(str(directory), "raw", tuple(entries), files=tuple(listed))
    return Case(checkpoint, LocalSource(str(directory)), values)


def arrange(case: Case, cut: Cut = whole, *, files: int = 2, dtype: DType | None = None, index: bool = False) -> Arrangement:
    """Slots go to the files in turn, each between literals and followed by the CRC of a literal and itself."""
    slots: list[list[Slot]] = [[] for _ in range(files)]
    literals: list[list[Literal]] = [[Literal(0, b"header")] for _ in range(files)]
    sums: list[list[ChecksumSlot]] = [[] for _ in range(files)]
    ends = [6] * files
    for tensor in case.checkpoint.tensors:
        to = dtype or tensor.spec.dtype
        for i, box in enumerate(cut(tensor.spec.shape)):
            i %= files
            length = to.length_bytes(box.volume)
            literals[i].append(Literal(ends[i], b"<local>"))
            slots[i].append(Slot(tensor.name, box, ends[i] + 7, length))
            sums[i].append(ChecksumSlot(ends[i] + 7 + length, ends[i], 7 + length))
            ends[i] += 7 + length + 4
    arranged = [
        ArrangedFile(f"out/file{i}.bin", ends[i], tuple(slots[i]), tuple(literals[i]), tuple(sums[i])) for i in range(files)
    ]
    if index:
        arranged.append(ArrangedFile("index.json", 2, literals=(Literal(0, b"{}"),), is_commit_record=True))
    return Arrangement("raw", tuple(arranged))


def expected_files(case: Case, plan: plans.Plan) -> dict[str, bytes]:
    """Every output file by its definition."""
    files = {}
    for file in plan.files:
        content = bytearray()
        for segment in file.segments:
            if isinstance(segment, Literal):
                content += segment.data
            elif isinstance(segment, Slot):
                tensor = plan.tensors[segment.tensor]
                spec, values = tensor.source.spec, case.values[segment.tensor]
                if tensor.is_cast:
                    values = bytes(cast(memoryview(values), spec.dtype, tensor.dtype)[0])
                content += values if spec.dtype.is_sub_byte else bytes_of(values, tensor.dtype, spec.shape, segment.box)
            elif isinstance(segment, ChecksumSlot):
                covered = content[segment.covers_offset : segment.covers_offset + segment.covers_length]
                content += zlib.crc32(covered).to_bytes(4, "little")
            else:
                data = Path(case.source.location, segment.source_file).read_bytes()
                content += data[segment.source_offset : segment.source_offset + segment.length]
        files[file.path] = bytes(content)
    return files


def files_in(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def leftovers(directory: Path) -> list[str]:
    """Names of ours that must be gone after a finished run."""
    return sorted(p.name for p in directory.iterdir() if ".ckpttools-" in p.name)


def some_tensors() -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Every rank to 3, an empty one, every element width."""
    return {
        "scalar": (FP32, ()),
        "empty": (FP32, (0, 5)),
        "bias": (BF16, (7,)),
        "weight": (BF16, (9, 10)),
        "mask": (BY_NAME["bool"], (4, 3, 5)),
        "wide": (BY_NAME["complex128"], (3, 4)),
        "step": (BY_NAME["int64"], (1,)),
        "packed": (BY_NAME["float4_e2m1fn_x2"], (2, 3)),
    }
