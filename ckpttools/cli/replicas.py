"""What a conversion did about copies that differ, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MAX_BOXES = 8


def replica_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """A line per box of which copies differ, of the first few; none when they had to be equal. Pure."""
    boxes = record.get("boxes", [])
    for row in boxes[:_MAX_BOXES]:
        taken = f"mean of {', '.join(row['taken'])}" if len(row["taken"]) > 1 else row["taken"][0]
        yield f"replicas: {row['tensor']} at {row['offsets']}: {taken}"
    if len(boxes) > _MAX_BOXES:
        yield f"replicas: and {len(boxes) - _MAX_BOXES} more, which the seal lists"
