"""What else in a run directory says which snapshot to use: tracker files and links. Claims to test, never to follow blindly.

Trackers are written when rank 0 thinks that the save is done (DLRover: before the other ranks are), survive the snapshot that
they name, and are copied without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.findings import Finding
from ckpttools.snapshots.policy import COMMITTED
from ckpttools.storage.tree import Tree

MEGATRON, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""Megatron's tracker has an iteration, or this word for a converted model that was not trained on yet; so is its directory."""
TRACKERS = (
    "latest",
    "latest.txt",
    "latest_universal",
    "latest-universal",
    MEGATRON,
    "dlrover_latest.txt",
    "latest_ckpt_global_step.txt",
    "last_checkpoint",
)
"""DeepSpeed (and its universal checkpoints), Megatron (and verl), DLRover, SkyRL, detectron2 and mmengine."""
LAST = "last.ckpt"
"""Lightning's copy of the newest, where it is no link."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A tracker or a link, and what it names."""

    tracker: str
    """Its path in the run directory."""
    says: str
    """The tag, the iteration or the target, as written."""
    path: str = ""
    """The snapshot that is meant, relative to the run directory; empty when there is none."""
    is_met: bool = False
    """Whether that snapshot is there and committed."""

    def finding(self, state: str) -> Finding:
        """What is wrong with a claim that is not met."""
        expected = f"`{self.says}`, as it says" if self.says else "the name of a snapshot"
        return Finding("tracker-dangling", self.tracker, expected, state or "no such snapshot")


def describe_dangling(finding: Finding) -> str:
    """A claim that is not met, in one line. Pure."""
    return f"{finding.where} names {finding.expected.partition(',')[0]}: {finding.found}"


def find_claims(tree: Tree, nests: Sequence[str], states: Mapping[str, str], steps: Mapping[str, int]) -> list[Claim]:
    """Every tracker and link in a run directory. Raises StorageError.

    Args: states: of the snapshots by path. steps: theirs by path.
    """
    claims = read_tracker_claims(tree, nests, states, steps)
    for link in tree.links:
        target = tree.linked(link)
        if target in states and target != link:
            claims.append(_claim(link, target, target, states))
        elif tree.status(link) is None:
            claims.append(Claim(link, tree.links[link].rpartition("/")[2]))
    return claims


def read_tracker_claims(tree: Tree, nests: Sequence[str], states: Mapping[str, str], steps: Mapping[str, int]) -> list[Claim]:
    """The trackers among them, as they are now. Raises StorageError."""
    claims: list[Claim] = []
    for nest in nests:
        prefix = f"{nest}/" if nest else ""
        for path in (prefix + name for name in TRACKERS if tree.is_directory(nest)):
            found = tree.status(path) if path not in tree.links else None
            if found is not None and found.is_regular:
                says = tree.read_text(path).strip()
                claims.append(_claim(path, says, _named(prefix, says, states, steps), states))
        if tree.is_file(prefix + LAST) and prefix + LAST not in tree.links:
            found = tree.status(prefix + LAST)
            claims.append(Claim(prefix + LAST, LAST, is_met=found is not None and found.length_bytes > 0))
    return claims


def read_tracker(tree: Tree, path: str) -> str:
    """What a tracker says; empty for one that is not there. Raises StorageError."""
    found = tree.status(path) if path not in tree.links else None
    return tree.read_text(path).strip() if found is not None and found.is_regular else ""


def _claim(tracker: str, says: str, path: str, states: Mapping[str, str]) -> Claim:
    return Claim(tracker, says, path, states.get(path) == COMMITTED)


def _named(prefix: str, says: str, states: Mapping[str, str], steps: Mapping[str, int]) -> str:
    """The snapshot that a tracker's text names: a tag or path, or an iteration; empty when there is none."""
    tag = says.rstrip("/").rpartition("/")[2]
    if prefix + tag in states:
        return prefix + tag
    if tag.isascii() and tag.isdigit() and len(tag) < 19:
        there = [p for p, step in steps.items() if step == int(tag) and p.rpartition("/")[0] == prefix.rstrip("/")]
        return next((p for p in there if states[p] == COMMITTED), there[0] if there else "")
    return ""
