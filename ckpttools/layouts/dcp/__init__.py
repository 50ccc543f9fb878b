"""DCP directories: `.metadata` (or one per rank) and `__<rank>_<n>.distcp`, in every dialect of torch's writers.

What the files hold is read by `containers.dcp_directory`; here is where trainers put such directories.
"""

from __future__ import annotations

import re

from ckpttools.containers.dcp_directory import find_directory, read_directory
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.storage.source import Listing, Source

_FAMILIES = (
    (re.compile(r"(pytorch_)?model(_fsdp)?(_\d+)?|weights|model_weights"), "model"),
    (re.compile(r"optim(izer)?(_\d+)?"), "optimizer"),
)


class Dcp:
    """torch.distributed.checkpoint."""

    name = "dcp"
    looks_for = "`.metadata` or `__<rank>.metadata` beside `__<rank>_<n>.distcp`"

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """The root when it holds DCP files; else the directories of accelerate: `pytorch_model_fsdp_0`, `optimizer_0`."""
        root = self._part(listing, "", "model")
        if root is not None:
            return [root]
        parts = []
        for directory in listing.subdirectories():
            family = next((f for pattern, f in _FAMILIES if pattern.fullmatch(directory)), None)
            part = self._part(listing, directory, family) if family else None
            if part is not None:
                parts.append(part)
        return parts

    def _part(self, listing: Listing, directory: str, family: str) -> Part | None:
        found = find_directory(listing, directory)
        return Part(self.name, family, found.files, found.manifest, directory) if found is not None else None

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """Everything `.metadata` states, held against the files that are there. Opens no item."""
        found = find_directory(listing, part.directory)
        if found is None:
            return Contents()
        read = read_directory(source, listing, found, part.family)
        return Contents(read.tensors, read.objects, read.files, read.findings, written_by=read.written_by, commit=read.commit)


LAYOUT = Dcp()
