"""The checksums of very many archives in little memory: what all archives of one kind have in common is there once."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

from ckpttools.model import Encoding, StoredChecksum

Member = tuple[int, int, str, tuple[Encoding | None, ...]]
"""(bytes from the first member, length, name, encoding where it is another than the first one's) of a member of an archive."""


class ChecksumTable(Sequence[StoredChecksum]):
    """Stored checksums, made as they are asked for; a tenth of the memory of a million of them."""

    def __init__(self, checksums: Sequence[StoredChecksum] = ()) -> None:
        self._expected = array("I")
        self._firsts = array("Q")
        """Per archive: number of its first checksum."""
        self._offsets = array("Q")
        self._files: list[str] = []
        self._owners: list[str] = []
        self._encodings: list[Encoding | None] = []
        self._members: list[tuple[Member, ...]] = []
        self._known: dict[tuple[Member, ...], tuple[Member, ...]] = {}
        for checksum in checksums:
            self.add("", [checksum])

    def add(self, owner: str, checksums: Sequence[StoredChecksum]) -> None:
        """Append those of one archive, all in one file; `owner`, unless empty, goes in front of their labels."""
        if not checksums:
            return
        first = checksums[0]
        members = tuple(
            (c.offset - first.offset, c.length, c.label, () if c.encoding == first.encoding else (c.encoding,)) for c in checksums
        )
        self._firsts.append(len(self._expected))
        self._expected.extend(c.expected for c in checksums)
        self._offsets.append(first.offset)
        self._files.append(first.file)
        self._owners.append(owner)
        self._encodings.append(first.encoding)
        self._members.append(self._known.setdefault(members, members))

    def extend(self, other: ChecksumTable) -> None:
        """Append all of another table."""
        self._firsts.extend(first + len(self._expected) for first in other._firsts)
        self._expected.extend(other._expected)
        self._offsets.extend(other._offsets)
        self._files += other._files
        self._owners += other._owners
        self._encodings += other._encodings
        self._members += [self._known.setdefault(members, members) for members in other._members]

    def __len__(self) -> int:
        return len(self._expected)

    @overload
    def __getitem__(self, number: int) -> StoredChecksum: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[StoredChecksum]: ...
    def __getitem__(self, number: int | slice) -> StoredChecksum | Sequence[StoredChecksum]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        archive = bisect_right(self._firsts, number) - 1
        return self._checksum(archive, self._members[archive][number - self._firsts[archive]], self._expected[number])

    def __iter__(self) -> Iterator[StoredChecksum]:
        expected = iter(self._expected)
        for archive, members in enumerate(self._members):
            for member, value in zip(members, islice(expected, len(members)), strict=True):
                yield self._checksum(archive, member, value)

    def _checksum(self, archive: int, member: Member, expected: int) -> StoredChecksum:
        place, length, name, own = member
        owner = self._owners[archive]
        encoding = own[0] if own else self._encodings[archive]
        label = f"{owner}: {name}" if owner else name
        return StoredChecksum(self._files[archive], self._offsets[archive] + place, length, expected, label, encoding)
