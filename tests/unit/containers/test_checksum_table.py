"""A table of checksums is the list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpttools.containers.checksum_table import ChecksumTable
from ckpttools.model import Encoding, StoredChecksum

NUMBERS = st.integers(0, (1 << 40) - 1)
ENCODINGS = st.sampled_from([None, Encoding("zstd", 7, 9), Encoding("deflate", 3, 4, 5)])
MEMBERS = st.tuples(NUMBERS, NUMBERS, st.integers(0, (1 << 32) - 1), st.sampled_from(["version", "data/0"]), ENCODINGS)
ARCHIVES = st.lists(st.tuples(st.sampled_from(["", "layers.0.w"]), st.lists(MEMBERS, max_size=4)), max_size=4)


def listed(archives: list) -> list[StoredChecksum]:
    return [
        StoredChecksum("f", offset, length, crc, f"{owner}: {name}" if owner else name, encoding)
        for owner, members in archives
        for offset, length, crc, name, encoding in members
    ]


def table_of(archives: list) -> ChecksumTable:
    table = ChecksumTable()
    for owner, members in archives:
        table.add(owner, [StoredChecksum("f", *member) for member in members])
    return table


@given(ARCHIVES, ARCHIVES)
def test_what_is_added_is_there_by_number_in_order_and_after_another_table(some, others):
    table, wanted = table_of(some), listed(some + others)
    table.extend(table_of(others))
    assert wanted == list(table) == [table[n] for n in range(len(table))] == list(table[:])
    assert wanted[::-2] == list(table[::-2])
    assert wanted[-1:] == ([table[-1]] if wanted else [])


def test_a_table_of_a_list_is_the_list():
    wanted = listed([("", [(1, 2, 3, "a", None), (5, 6, 7, "b", None)])])
    assert wanted == list(ChecksumTable(wanted))
