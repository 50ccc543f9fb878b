"""The protocol of a layout, and what it hands over.

A snapshot is made of parts: the model, the optimizer, a scheduler, each a family of state in files of its own. A layout
says which parts it recognises in a listing (`sniff`) and turns one part into its contents (`read`), from manifests and
headers alone. `layouts.open` puts the parts together into one `Checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ckpttools.findings import Finding
from ckpttools.model import Commit, FileEntry, Mesh, ObjectEntry, Path, StoredChecksum, TensorEntry
from ckpttools.storage.source import Listing, Source

Peek = Callable[[str], bytes]
"""The first 64 bytes of a listed file (fewer if it is shorter)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A family of state that one layout recognised, and the files that hold it."""

    layout: str
    family: str
    """`model`, `optimizer`, `scheduler`, `rng_state`, `extra_state`, ...: what other families' names start with."""
    files: tuple[str, ...]
    """Every file that belongs to it, manifests and data; no other part may claim them."""
    manifest: str = ""
    """The file to start from (an index, `.metadata`), where the layout has one."""
    directory: str = ""
    """Where in the snapshot it lies; references in manifests are relative to it."""


@dataclass(frozen=True)
class Contents:
    """What one part holds, under the names as stored."""

    tensors: tuple[TensorEntry, ...] = ()
    objects: tuple[ObjectEntry, ...] = ()
    files: tuple[FileEntry, ...] = ()
    findings: tuple[Finding, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)
    step: int | None = None
    written_by: str = ""
    commit: Commit = field(default_factory=lambda: Commit(True))
    checksums: tuple[StoredChecksum, ...] = ()
    trees: Mapping[Path, object] = field(default_factory=dict)
    """Nested values by the keys that lead to them (see `Checkpoint.trees`)."""
    families_are_told: bool = False
    """Whether every entry has its family and its whole name already; else the part's family and top-level keys tell."""


class Layout(Protocol):
    """How one training stack cuts tensors into pieces and puts pieces into files."""

    name: str
    """As users say it: `dcp`, `safetensors`."""
    looks_for: str
    """One line for the error message when nothing is recognised: the files by which it is known."""

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """The parts of a snapshot that this layout recognises, from names and lengths (and a few header bytes)."""
        ...

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """What a part holds. What is wrong with it becomes findings; nothing is raised but storage errors."""
        ...
