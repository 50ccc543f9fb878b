"""Writes a DCP snapshot of very many small chunks, without torch: `many_chunks.py DIRECTORY RANKS TENSORS`.

Each tensor is cut into a row per rank, as FSDP does: RANKS * TENSORS chunks of 32 bytes, each a torch archive of its own.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

from ckpttools.containers.dcp_metadata import write_metadata
from ckpttools.containers.torch_archive import TensorItem
from ckpttools.dtypes import parse_dtype
from ckpttools.model import Box, ChecksumSlot, Literal, TensorSpec

ROW = 8


def main(root: Path, ranks: int, tensors: int) -> None:
    """Write the files of the ranks, and `.metadata` last."""
    root.mkdir(parents=True)
    dtype = parse_dtype("float32")
    item = TensorItem.of(dtype, (1, ROW))
    blank = bytearray(item.length_bytes)
    around = [*item.frame.before, *item.frame.after]
    for literal in (x for x in around if isinstance(x, Literal)):
        start = item.data_offset + literal.offset
        blank[start : start + len(literal.data)] = literal.data
    sums = [item.data_offset + x.offset for x in around if isinstance(x, ChecksumSlot)]
    specs = [TensorSpec(f"layers.{t}.weight", dtype, (ranks, ROW)) for t in range(tensors)]
    for rank in range(ranks):
        with (root / f"__{rank}_0.distcp").open("wb") as file:
            for t in range(tensors):
                values = struct.pack(f"<{ROW}f", rank, t, *range(ROW - 2))
                blank[item.data_offset : item.data_offset + item.data_length] = values
                for place in sums:
                    blank[place : place + 4] = zlib.crc32(values).to_bytes(4, "little")
                file.write(blank)
    boxes = [Box((rank, 0), (1, ROW)) for rank in range(ranks)]
    rows = [
        (spec, [(box, (f"__{rank}_0.distcp", t * len(blank), len(blank))) for rank, box in enumerate(boxes)])
        for t, spec in enumerate(specs)
    ]
    (root / ".metadata").write_bytes(write_metadata(rows, [], {spec.name: (spec.name,) for spec in specs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
