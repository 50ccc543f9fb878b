"""Hugging Face `.bin` shards: torch files that each hold a part of one state dict, and an index beside them.

Source: huggingface/transformers, src/transformers/modeling_utils.py (save_pretrained, safe_serialization=False), v4.57;
the BLOOM release for names with an underscore.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.containers.shard_index import (
    ShardIndex,
    ShardSet,
    check_index,
    check_numbers,
    check_references,
    check_unique,
    read_index,
    shard_sets,
)
from ckpttools.containers.torch_entries import Entries, open_rank_file, read_entries
from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.layouts.checks import find_aliases
from ckpttools.layouts.families import MODEL
from ckpttools.model import Commit, FileEntry
from ckpttools.storage.source import Listing, Source


class HfBin:
    """Sharded `.bin` weights."""

    name = "hf_bin"
    looks_for = "`pytorch_model.bin.index.json` beside `pytorch_model-00001-of-<n>.bin`"

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """Each set of numbered shards or with an index; a single `pytorch_model.bin` is a plain torch file."""
        parts = []
        for shards in _sets(listing):
            if shards.index or any(f.count is not None for f in shards.files):
                family = f"{MODEL}.{shards.variant}" if shards.variant else MODEL
                parts.append(Part(self.name, family, shards.paths, shards.index))
        if len(parts) == 1:  # a variant that stands alone is the model
            return [Part(self.name, MODEL, parts[0].files, parts[0].manifest)]
        return parts

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The union of the shards, held against the index."""
        shards = next(s for s in _sets(listing) if s.paths == part.files)
        findings: list[Finding] = []
        index: ShardIndex | None = None
        if shards.index:
            index = read_index(source, listing, shards.index)
            findings += [*index.findings, *check_references(index, listing, [f.path for f in shards.files])]
        else:
            expected = "`pytorch_model.bin.index.json`, without which loaders do not find the shards"
            findings.append(Finding("missing-index", shards.files[0].path, expected, "none"))
            findings += check_numbers(shards)
        names = index.files if index and index.is_parsed else tuple(f.path for f in shards.files)
        opened = {p: read_entries([open_rank_file(source, p, listing.length_bytes(p))]) for p in names if p in listing}
        findings += [f for entries in opened.values() for f in entries.findings]
        findings += _check(index, opened)
        files = [FileEntry(p, listing.length_bytes(p), "data", part.family) for p in opened]
        files += [FileEntry(shards.index, listing.length_bytes(shards.index), "manifest", part.family)] if shards.index else []
        stale = [f.path for f in shards.files if f.path not in opened]
        files += [FileEntry(p, listing.length_bytes(p), "unreferenced", part.family) for p in stale]
        return Contents(
            tensors=tuple(t for entries in opened.values() for t in entries.tensors),
            objects=tuple(o for entries in opened.values() for o in entries.objects),
            files=tuple(files),
            findings=tuple(findings),
            written_by="save_pretrained",
            commit=Commit(not any(f.code == "missing-file" for f in findings), shards.index),
            checksums=tuple(c for entries in opened.values() for c in entries.checksums),
        )


LAYOUT = HfBin()


def _sets(listing: Listing) -> list[ShardSet]:
    return shard_sets([f.path for f in listing.in_directory("")], ".bin")


def _check(index: ShardIndex | None, opened: Mapping[str, Entries]) -> list[Finding]:
    """The index against the names in the shards; its total may count tied tensors once or each."""
    # a file that does not open has a finding, and needs none for each of its tensors
    closed = {p for p, e in opened.items() if not (e.tensors or e.objects) and any(f.is_error for f in e.findings)}
    names = {path: [t.name for t in entries.tensors] for path, entries in opened.items() if path not in closed}
    if index is None or not index.is_parsed:
        return check_unique(names)
    tensors = [t for entries in opened.values() for t in entries.tensors]
    total = sum(t.spec.length_bytes for t in tensors)
    of_name = {t.name: t.spec.length_bytes for t in tensors}
    tied = sum(of_name[name] for group in find_aliases(tensors) for name in group[1:])
    return check_index(index, names, total_bytes=(total, total - tied))
