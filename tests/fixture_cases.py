"""The fixtures and their truth: which path of a case to name, which tensors must be found there, what to expect.

The only file that knows how `truth.json` is spelled. A truth was made from the tensors in memory when the tool saved
them, so it does not depend on any reader. Start with `cases` and `Case.targets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent.parent / "fixtures"
READABLE_FAMILIES = ("torch", "deepspeed", "megatron")
"""Families whose layouts are written; a family enters here together with its first layout."""
NOT_YET_READABLE: tuple[str, ...] = ()
"""Patterns of cases in such a family whose layout is not written yet."""

Truth = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """A tensor as it was in memory."""

    dtype: str
    shape: tuple[int, ...]
    digests: frozenset[str]
    """SHA-256 of its row-major little-endian bytes; several where ranks held different values and one of them survives."""

    def is_held_by(self, line: Truth) -> bool:
        """Whether a line of `hash --json` is this tensor."""
        return (self.dtype, self.shape) == (line["dtype"], tuple(line["shape"])) and line["digest"] in self.digests


@dataclass(frozen=True)
class Target:
    """A path to hand to the command line, and the tensors that must be found there."""

    path: Path
    tensors: Mapping[str, Expected]


@dataclass(frozen=True)
class Case:
    """One folder of fixtures: a checkpoint and its truth."""

    family: str
    name: str

    @property
    def directory(self) -> Path:
        return FIXTURES / self.family / self.name

    @cached_property
    def truth(self) -> Truth:
        return json.loads((self.directory / "truth.json").read_text(encoding="utf-8"))

    @property
    def checkpoint(self) -> Path:
        return self.directory / self.truth["checkpoint"]

    @property
    def is_damaged(self) -> bool:
        return self.truth["kind"] == "damaged" or self.truth["expected_verdict"] != "ok"

    @property
    def verdict(self) -> str:
        """What `validate` must say: `ok`, `refused`, `remarked` (a finding, error or not) or `differs` (only values tell).

        Or `run`: a run directory with damaged snapshots, of which each command has something to say.
        """
        text = self.truth["expected_verdict"]
        if self.truth.get("damaged") is True:
            return "run"
        if "structurally ok" in text:
            return "differs"
        if "or warn" in text:
            return "remarked"
        if text.startswith("ok"):
            return "ok"
        if text.startswith(("reject", "corrupt")):
            return "refused"
        raise ValueError(f"{self.name}: no reading for the verdict `{text}`")

    @property
    def must_mention(self) -> list[str]:
        return self.truth["must_mention"]

    @property
    def payload(self) -> str | None:
        """The file that would appear in the working directory if a pickle of this case were executed."""
        return self.truth.get("must_not_exist_after")

    @property
    def undamaged_tensors(self) -> dict[str, Expected]:
        return _tensors(self.truth["undamaged_tensors"])

    @property
    def aliases(self) -> list[list[str]]:
        """Groups of names that shared one storage in memory; a writer may keep one name of each."""
        for holder in (self.truth, *self.truth.get("checkpoints", {}).values()):
            found = holder.get("in_memory_alias_groups") or holder.get("alias_groups")
            if found:
                return found
        return []

    def targets(self) -> Iterator[Target]:
        """Every path of a sound case that holds tensors."""
        truth = self.truth
        if "snapshots" in truth:
            for snapshot, entry in truth["snapshots"].items():
                weights = {n: e for n, e in entry["tensors"].items() if self._is_stored(n, e)}
                yield Target(self.checkpoint / snapshot, _tensors(weights) | self._optimizer(entry))
        elif "steps" in truth:
            for step, entry in truth["steps"].items():
                yield Target(_step(self.checkpoint, step), _tensors(entry.get("tensors", entry)))
        elif "checkpoints" in truth:
            for step, entry in truth["checkpoints"].items():
                optimizer = _tensors(entry["optimizer"], prefix="optimizer.")
                yield Target(self.checkpoint / step, _tensors(entry["model"]) | optimizer)
        elif "groups" in truth:
            groups = [_tensors(group["tensors"]) for group in truth["groups"].values()]
            yield Target(self.checkpoint, {name: expected for group in groups for name, expected in group.items()})
        elif truth["kind"] == "fsdp1-full":
            yield Target(self.checkpoint / "model_full.pt", _tensors(truth["logical_model_tensors"]))
            yield Target(self.checkpoint / "optim_full.pt", _tensors(truth["optim"]))
        elif truth["kind"] in ("torch-save", "lightning"):
            for file in sorted(p for p in self.checkpoint.iterdir() if p.is_file()):
                yield Target(file, _tensors(truth["tensors"]) | _tensors(truth.get("differs", {}).get(file.name, {})))
        else:
            yield Target(self.checkpoint, _tensors(truth["tensors"]) | _tensors(truth.get("optimizer", {}), prefix="optimizer."))

    def _optimizer(self, entry: Truth) -> dict[str, Expected]:
        """Optimizer state by the names under which the layout keeps it."""
        if self.family == "deepspeed":
            states = entry.get("optimizer_tensors") or {}
            return _tensors({f"{n}.{k}": e for k, by_name in states.items() for n, e in by_name.items() if self._is_stored(n, e)})
        if self.truth["kind"] not in ("torch_dist", "zarr", "fsdp_dtensor"):
            return {}
        table = _tensors(entry.get("optimizer_tensors") or {})
        return {n: e for n, e in table.items() if "bucket_idx" not in n}  # the gaps of buckets are undefined in memory too

    @property
    def good_snapshots(self) -> list[str]:
        """The sound ones of a run in which others are damaged, or a tracker points nowhere."""
        named = self.truth.get("good_snapshots")
        touched = {Path(str(f.get("file", ""))).parts[0:1] for f in self.truth.get("expected_findings", [])}
        there = sorted(p.name for p in self.checkpoint.iterdir() if p.is_dir() and (p.name,) not in touched)
        return named if named is not None else there

    @property
    def bad_snapshots(self) -> list[str]:
        return sorted(p.name for p in self.checkpoint.iterdir() if p.is_dir() and p.name not in self.good_snapshots)

    def _is_stored(self, name: str, entry: Truth) -> bool:
        """Whether the checkpoint holds a tensor of the memory at all, and as it was there."""
        truth, kind = self.truth, entry.get("kind", "")
        if truth["kind"] == "legacy" and ".layers." in name:
            return False  # the truth has layers in one tensor, and the layout has them apart
        if truth.get("zero_stage") == 3 and truth.get("model_dtype") != "fp32" and kind in ("parameter", "tied_to"):
            return False  # ZeRO 3 keeps only the fp32 master of a trained parameter
        if "exclude_frozen_parameters=True" in truth.get("note", "") and kind == "frozen_parameter":
            return False
        if truth.get("vocab_note") and name.endswith("word_embeddings.weight"):
            return False  # universal files cut the padding of the vocabulary
        return not (truth.get("replica_mismatches") and "word_embeddings.norm" in name)  # one name, two values

    def damaged_target(self, checkpoint: Path) -> Path:
        """The path to hand to `validate`, in a copy of the checkpoint of a damaged case."""
        if self.truth.get("base_kind") in ("torch-save", "lightning"):
            return checkpoint / self.truth["file"]
        return checkpoint

    def missing(self, wanted: Mapping[str, Expected], lines: list[Truth]) -> list[str]:
        """Names that the lines of `hash --json` lack, or have with another value."""
        by_tail: dict[str, list[Truth]] = {}
        for line in lines:
            keys = line["name"].split(".")
            for start in range(len(keys)):
                by_tail.setdefault(".".join(keys[start:]), []).append(line)

        def is_there(name: str, expected: Expected) -> bool:
            # a wrapper's key may stand before the name as it was in memory, and the family's may be left out of it
            candidates = by_tail.get(name, []) + by_tail.get(name.partition(".")[2] or name, [])
            return any(expected.is_held_by(line) for line in candidates)

        def is_there_by_another_name(name: str) -> bool:
            group = next((g for g in self.aliases if name in g), [])
            return any(other in wanted and is_there(other, wanted[other]) for other in group if other != name)

        return [n for n, expected in wanted.items() if not is_there(n, expected) and not is_there_by_another_name(n)]


def cases(*families: str, damaged: bool | None = None) -> list[Case]:
    """The cases of some families, in order; all of them, or only the damaged or the sound ones."""
    found = [Case(family, d.name) for family in families for d in sorted((FIXTURES / family).iterdir()) if d.is_dir()]
    return [case for case in found if damaged is None or case.is_damaged == damaged]


def readable(*, damaged: bool) -> list[Case]:
    """The damaged or the sound cases of every layout that is written."""
    found = cases(*READABLE_FAMILIES, damaged=damaged)
    return [c for c in found if not any(fnmatchcase(f"{c.family}/{c.name}", p) for p in NOT_YET_READABLE)]


def hash_list(tensors: Mapping[str, Expected]) -> str:
    """The document that `hash --algorithm sha256 --json` would write of these tensors, for `validate --against`."""
    lines = [
        {"name": name, "dtype": expected.dtype, "shape": list(expected.shape), "digest": min(expected.digests)}
        for name, expected in sorted(tensors.items())
    ]
    return json.dumps({"schema": "ckpttools/hash/1", "algorithm": "sha256", "tensors": lines})


def _tensors(tree: Truth, prefix: str = "") -> dict[str, Expected]:
    """The tensors of a flat or singly nested table, by dotted name."""
    found = {}
    for name, entry in tree.items():
        if _is_tensor(entry):
            found[prefix + name] = _expected(entry)
        elif isinstance(entry, dict):
            found |= {f"{prefix}{name}.{inner}": _expected(e) for inner, e in entry.items() if _is_tensor(e)}
    return found


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, dict) and {"sha256", "dtype"} <= set(entry)


def _expected(entry: Truth) -> Expected:
    return Expected(entry["dtype"], tuple(entry["shape"]), frozenset({entry["sha256"], *entry.get("differs_by_rank", [])}))


def _step(checkpoint: Path, step: str) -> Path:
    """Where a step lies: below `checkpoint/`, as torchtitan has it, or directly."""
    return next(p for p in (checkpoint / "checkpoint" / step, checkpoint / step) if p.is_dir())
