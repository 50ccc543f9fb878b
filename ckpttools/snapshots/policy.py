"""What `prune` is asked to keep, and what it knows of each snapshot. Plain values; `retention.decide` puts them together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

COMMITTED, UNFINISHED, DAMAGED, FOREIGN = "committed", "unfinished", "damaged", "foreign"
STATES = (COMMITTED, UNFINISHED, DAMAGED, FOREIGN)
ALL = -1
"""A count without end, as `-1` is in restic."""


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the best snapshots by a metric."""

    metric: str
    is_max: bool
    count: int

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.is_max else 'min'}:{self.count}"


@dataclass(frozen=True)
class Policy:
    """The rules. Those that keep are a union; the limits then delete further, oldest first."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    within_s: int | None = None
    """Keep what is less than this older than the newest snapshot (not than now: a run that stands still loses nothing)."""
    every_steps: int | None = None
    steps: frozenset[int] = frozenset()
    best: tuple[Best, ...] = ()
    max_bytes: int | None = None
    min_free_bytes: int | None = None
    min_free_inodes: int | None = None
    grace_s: int = 6 * 3600
    """Younger ones that are not committed are never deleted: they may be being written."""
    max_delete_fraction: float = 0.9

    @property
    def has_rule(self) -> bool:
        """Whether any rule says what to keep; a limit alone does not."""
        counts = (self.last, self.hourly, self.daily, self.weekly, self.monthly, self.yearly)
        return any(counts) or self.within_s is not None or bool(self.every_steps or self.steps or self.best)


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """What is known of one snapshot."""

    path: str
    """Relative to the run directory."""
    step: int | None
    time_s: float | None
    """When it was committed (for one that is not: when it was last written to), seconds since the epoch; None if untold."""
    length_bytes: int = 0
    inodes: int = 1
    state: str = COMMITTED
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_pinned: bool = False
    claims: tuple[str, ...] = ()
    """Trackers and symbolic links that point to it."""
    is_outside: bool = False
    """Whether it lies, through a link, outside the real path of the run directory."""
    is_share: bool = False
    """Whether it is a node's share of a snapshot; whether the other nodes have theirs is not known here."""

    @property
    def order(self) -> tuple[float, float, str]:
        """Sorts by step, then by time."""
        return (-math.inf if self.step is None else self.step, -math.inf if self.time_s is None else self.time_s, self.path)

    @property
    def time_order(self) -> tuple[float, float, str]:
        """Sorts by time, then by step."""
        step, time_s, path = self.order
        return time_s, step, path


@dataclass(frozen=True, slots=True)
class Room:
    """What the file system of a run has left; None where it does not tell."""

    free_bytes: int | None = None
    free_inodes: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one snapshot, and every reason for it."""

    snapshot: SnapshotFacts
    keep: bool
    reasons: tuple[str, ...]
