"""Buffers keep their memory and begin at a page."""

from __future__ import annotations

import mmap

import numpy as np

from ckpttools.storage.buffer import Buffer


def address(view: memoryview) -> int:
    return np.frombuffer(view, "u1").ctypes.data


def test_a_view_is_as_long_as_asked_for():
    buffer = Buffer()
    assert [0, 1, 5000, 3] == [len(buffer.view(n)) for n in (0, 1, 5000, 3)]


def test_memory_is_used_again_and_grows():
    buffer = Buffer()
    buffer.view(10)[:2] = b"ab"
    assert buffer.view(5)[:2] == b"ab"
    assert len(buffer.view(3 * mmap.PAGESIZE)) == 3 * mmap.PAGESIZE


def test_it_begins_at_a_page():
    assert 0 == address(Buffer().view(100)) % mmap.PAGESIZE
