"""How complete a snapshot is, told by the names of its files alone. Pure.

Each system leaves its own marks: a record that is written last (`.metadata`, `metadata.json`), or names that say how many
files there must be (`-of-00072`, `world_size_8`, a grid of ranks). What names cannot tell (a `.metadata` that names a file
that is not there, a last rank that is missing everywhere) is for `find`, which compares neighbours, and for opening it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpttools.snapshots.policy import COMMITTED, FOREIGN, UNFINISHED
from ckpttools.storage.source import is_shadow

_DATA = re.compile(r".*\.(?:distcp|safetensors|bin|pt|pth|ckpt|nemo|znn|tar)|.*/\.zarray|\.zarray")
_RECORDS = ("metadata.json", ".metadata", "metadata.pth", "trainer_state.json", "meta.pt")
"""Files that are written last, in the order in which they are believed; the time of one is the time of the commit."""
_INDEX = re.compile(r".*\.index(?:\..+)?\.json")
_LEFTOVER = re.compile(r".*\.(?:tmp|incomplete|part|partial)|.*\.dirty\.pt")
_DISTCP_RANK = re.compile(r"(?:.*_)?_?(\d+)_\d+\.distcp|.*_src(\d+)\.distcp")
_OF = re.compile(r"(?P<group>.*?)[-_]?(?P<one>\d+)-of-(?P<n>\d+)(?P<tail>\..*)")
_WORLD = re.compile(r"(?P<group>.*)world_size_(?P<n>\d+)_rank_(?P<one>\d+)(?P<tail>\..*)")
_GRIDS = (
    re.compile(r"(?P<group>.*?)zero_pp_rank_(?P<a>\d+)_mp_rank_(?P<b>\d+)(?P<tail>_.*)"),
    re.compile(r"(?P<group>.*?)mp_rank_(?P<a>\d+)(?P<tail>_model_states\.pt)"),
    re.compile(r"(?P<group>.*?)mp_rank_(?P<a>\d+)(?:_(?P<b>\d{3}))?(?:_(?P<c>\d{3}))?(?P<tail>/.*\.pt)"),
    re.compile(r"(?P<group>.*?layer_\d+-model)_(?P<a>\d+)(?P<tail>-model_states\.pt)"),
)


@dataclass(frozen=True, slots=True)
class Completeness:
    """What the names of a snapshot's files say."""

    state: str
    """`committed`, `unfinished` or `foreign`."""
    why: str = ""
    """What is missing, for people."""
    done: int | None = None
    expected: int | None = None
    """How many files or ranks are there, and how many there must be; None where the names do not tell."""
    record: str = ""
    """The file whose time is that of the commit; empty when none is written last."""


def judge(names: Sequence[str]) -> Completeness:
    """What the files of a snapshot, by their names relative to it, say about the save."""
    names = [n for n in names if not is_shadow(n)]
    data = [n for n in names if _DATA.fullmatch(n) and not _LEFTOVER.fullmatch(n)]
    leftovers = [n for n in names if _LEFTOVER.fullmatch(n)]
    if not data:
        if names and not leftovers:
            return Completeness(FOREIGN, "no file of a checkpoint in it")
        return Completeness(UNFINISHED, "nothing was written yet" if not names else f"only {leftovers[0]}", 0)
    there = set(names)
    for missing in (_sharded_ranks(there, data), _arrays(there, data), _counted(data), _grids(data)):
        if missing is not None:
            return missing
    record = next((r for r in _RECORDS if r in there), "") or next((n for n in names if _INDEX.fullmatch(n)), "")
    record = record or next((n for n in names if n.endswith("/.metadata")), "")
    if leftovers and not record:
        return Completeness(UNFINISHED, f"{leftovers[0]} is there")
    return Completeness(COMMITTED, record=record)


def _sharded_ranks(there: set[str], data: Iterable[str]) -> Completeness | None:
    """DCP: `.metadata` beside the shards (or above them) is written last; megatron-core's `metadata.json` after it."""
    ranks: dict[str, set[int]] = defaultdict(set)
    for name in data:
        directory, _, file = name.rpartition("/")
        if file.endswith(".distcp"):
            match = _DISTCP_RANK.fullmatch(file)
            ranks[directory].add(int(match[1] or match[2]) if match else len(ranks[directory]))
    for directory, found in ranks.items():
        above = [directory, *(directory.rsplit("/", i)[0] for i in range(1, directory.count("/") + 1)), ""]
        own = sum(f"{directory}/__{rank}.metadata".lstrip("/") in there for rank in found)
        if own != len(found) and not any(f"{d}/.metadata".lstrip("/") in there for d in above):  # own: saved without collectives
            where = f" in {directory}" if directory else ""
            return Completeness(UNFINISHED, f"no .metadata{where}", len(found))
        is_flashpoint = any("_src" in n for n in there)
        beside = f"{directory}/" if directory else ""
        if f"{beside}common.pt" in there and f"{beside}metadata.json" not in there and not is_flashpoint:
            return Completeness(UNFINISHED, "no metadata.json", len(found))
    return None


def _arrays(there: set[str], data: Iterable[str]) -> Completeness | None:
    """Megatron's zarr directories: `metadata.json` beside those of the tensors is written last."""
    arrays = [name.rsplit("/", 2) for name in data if name.endswith("/.zarray")]
    tops = {parts[0] if len(parts) == 3 else "" for parts in arrays}
    if tops and not any(f"{top}/metadata.json".lstrip("/") in there for top in tops):
        return Completeness(UNFINISHED, "no metadata.json", len(arrays))
    return None


def _counted(data: Iterable[str]) -> Completeness | None:
    """Names that say how many there are: `model-00002-of-00003.safetensors`, `model_world_size_8_rank_3.pt`."""
    for pattern in (_OF, _WORLD):
        groups: dict[tuple[str, str, int], set[int]] = defaultdict(set)
        for name in data:
            match = pattern.fullmatch(name)
            if match and not match["group"].rpartition("/")[2].startswith("shard-"):  # DCP's writer counts per rank there
                groups[match["group"], match["tail"], int(match["n"])].add(int(match["one"]))
        for (group, tail, expected), found in sorted(groups.items()):
            if len(found) < expected:
                return Completeness(UNFINISHED, f"{group}...{tail}", len(found), expected)
    return None


def _grids(data: Iterable[str]) -> Completeness | None:
    """Ranks in names: all combinations of those seen must be there, from 0 on."""
    for pattern in _GRIDS:
        groups: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
        for name in data:
            match = pattern.fullmatch(name)
            if match:
                places = tuple(int(match[k] or 0) for k in ("a", "b", "c") if k in pattern.groupindex)
                groups[match["group"], match["tail"]].add(places)
        for (group, tail), found in sorted(groups.items()):
            expected = 1
            for axis in zip(*found, strict=True):
                expected *= max(axis) + 1
            if len(found) < expected:
                return Completeness(UNFINISHED, f"ranks of {group}...{tail}", len(found), expected)
    return None
