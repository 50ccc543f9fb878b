"""One torch file per rank: DTensors of FSDP2 (verl, plain), ShardedTensors of FSDP1, local flat parameters, HSDP.

Source: verl-project/verl, verl/utils/checkpoint/fsdp_checkpoint_manager.py; huggingface/accelerate,
src/accelerate/utils/fsdp_utils.py; pytorch/pytorch, torch/distributed/fsdp/_state_dict_utils.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import islice, pairwise

from ckpttools.containers.local_boxes import LocalBoxes
from ckpttools.containers.torch_entries import open_rank_file, read_entries
from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.layouts.families import MODEL, RANK_LOCAL, family_of_stem
from ckpttools.layouts.per_rank.write import arrange_ranks
from ckpttools.model import FileEntry
from ckpttools.storage.source import Listing, Source

_RANK_FILE = re.compile(
    r"(?P<stem>.*?)[._-]?(?P<world>world_size_\d{1,9}_)?rank_?(?P<rank>\d{1,9})\.(?P<suffix>pt|pth|bin|pkl|ckpt)"
)
_STATE_FILE = re.compile(r"(?P<stem>rng_state|random_states)_(?P<world>)(?P<rank>\d{1,9})\.(?P<suffix>pth|pkl)")

_MAX_NAMED_RANKS = 64


class PerRank:
    """Pickled state dicts, one file per rank."""

    name = "per_rank"
    looks_for = "`<family>_world_size_<W>_rank_<R>.pt`, `<family>_rank<R>.pt` or .bin, one file per rank"

    arrange_ranks = staticmethod(arrange_ranks)

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """One part per family of files that differ only in their rank."""
        groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for file in listing.in_directory(""):
            match = _match(file.path)
            if match and file.is_regular:
                groups[match["stem"], match["world"] or "", match["suffix"]].append(file.path)
        return [Part(self.name, family_of_stem(stem), tuple(sorted(files, key=_rank))) for (stem, _, _), files in groups.items()]

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The boxes of all ranks put together; ranks that are absent are findings."""
        files = [open_rank_file(source, path, listing.length_bytes(path), _rank(path)) for path in part.files]
        entries = read_entries(files, is_rank_local=part.family in RANK_LOCAL)
        stated = _match(part.files[0])
        digits = re.search(r"\d+", stated["world"] or "") if stated else None
        ranks = int(digits.group()) if digits else max(entries.ranks, max(f.rank for f in files) + 1)
        findings = [*_missing_ranks(part.files, ranks), *_doubled_ranks(part.files), *entries.findings]
        if digits and entries.ranks > 1 and entries.ranks != ranks:
            expected, found = f"tensors of {ranks} ranks, as the file names say", f"tensors of {entries.ranks} ranks"
            findings.append(Finding("rank-mismatch", part.files[0], expected, found))
        findings += [_misplaced(f.path, f.rank, f.torch.note) for f in files if f.torch.note and f.torch.note.rank != f.rank]
        role = "data" if part.family == MODEL else "objects"
        return Contents(
            tensors=tuple(entries.tensors),
            objects=tuple(entries.objects),
            files=tuple(FileEntry(p, listing.length_bytes(p), role, part.family) for p in part.files),
            findings=tuple(findings),
            mesh=entries.mesh,
            written_by="torch.save per rank",
            checksums=tuple(entries.checksums),
            trees=entries.trees,
        )


LAYOUT = PerRank()


def _misplaced(path: str, rank: int, note: LocalBoxes) -> Finding:
    return Finding("rank-mismatch", path, f"the file of rank {rank}", f"what rank {note.rank} of {note.mesh} holds")


def _match(path: str) -> re.Match[str] | None:
    return _STATE_FILE.fullmatch(path) or _RANK_FILE.fullmatch(path)


def _rank(path: str) -> int:
    match = _match(path)
    return int(match["rank"]) if match else 0


def _doubled_ranks(files: tuple[str, ...]) -> list[Finding]:
    """A finding per file of a rank that has another one: `rank_0` and `rank_00`, of which a loader takes either."""
    return [
        Finding("rank-mismatch", after, "one file of each rank", f"`{before}` of the same rank")
        for before, after in pairwise(files)
        if _rank(before) == _rank(after)
    ]


def _missing_ranks(files: tuple[str, ...], ranks: int) -> list[Finding]:
    """A finding per absent rank, under the name that its file would have (the first few when many are absent)."""
    there = {_rank(path) for path in files}
    model = _match(files[0])
    if model is None:
        return []
    start, stop = model.span("rank")
    absent = islice((r for r in range(ranks) if r not in there), _MAX_NAMED_RANKS)
    names = [f"{files[0][:start]}{r}{files[0][stop:]}" for r in absent]
    found = f"{len(there)} of {ranks} files"
    return [Finding("missing-rank", name, f"one file for each of {ranks} ranks", found) for name in names]
