"""Whether the output fits, asked before the first byte: bytes and inodes, of the file system it is built on."""

from __future__ import annotations

from ckpttools.errors import StorageError
from ckpttools.plan import Plan
from ckpttools.storage.writing import Space
from ckpttools.units import render_bytes


def require_space(plan: Plan, space: Space) -> None:
    """Raise StorageError when a plan needs more than there is; what an earlier run left of it counts as there."""
    needed_bytes = max(0, plan.space_bytes - space.used_bytes)
    if space.free_bytes is not None and needed_bytes > space.free_bytes:
        raise StorageError(
            "not enough free space for the output",
            where=space.where,
            expected=f"{render_bytes(needed_bytes)} free",
            found=render_bytes(space.free_bytes),
            hints=["free space or choose another destination; nothing was written"],
        )
    if space.free_inodes is not None and plan.inodes > space.free_inodes:
        raise StorageError(
            "not enough free inodes for the output: the file system can hold no more files",
            where=space.where,
            expected=f"{plan.inodes} free",
            found=f"{space.free_inodes} free",
            hints=["delete files or choose another destination; nothing was written"],
        )
