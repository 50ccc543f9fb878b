"""What retention needs to know of each snapshot: bytes, metrics, pins, and whether the newest really are valid."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckpttools.errors import CkpttoolsError, NotRecognisedError, UsageError
from ckpttools.operations.validate import validate
from ckpttools.snapshots.candidate import Snapshot
from ckpttools.snapshots.local_files import files_by_rank
from ckpttools.snapshots.names import FILE_SUFFIXES, parse_metrics
from ckpttools.snapshots.policy import COMMITTED, DAMAGED, FOREIGN, UNFINISHED, Decision, SnapshotFacts
from ckpttools.snapshots.runs import Run

PIN = ".keep"
"""A file of this name in a snapshot, or `NAME.keep` beside it, keeps it."""
_METRIC_FILES = ("metrics.json", "eval_results.json", "all_results.json")
_MAX_UNREADABLE = 8
_COPIES_DIFFER = ("digest-mismatch", "dtype-mismatch", "shape-mismatch", "missing-tensor", "extra-tensor")


def read_facts(run: Run, *, pins: Collection[str] = (), has_metrics: bool = False, jobs: int = 1) -> list[SnapshotFacts]:
    """The facts of every snapshot of a run, in its order. Raises StorageError. UsageError: a pin names nothing."""
    names = (
        {s.path for s in run.snapshots}
        | {s.path.rpartition("/")[2] for s in run.snapshots}
        | {str(s.step) for s in run.snapshots}
    )
    for pin in pins:
        if pin.rstrip("/") not in names:
            raise UsageError(f"--pin names no snapshot: {pin}", hints=["name it as the table does, or by its step"])
    wanted = {p.rstrip("/") for p in pins}
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda s: _facts(run, s, wanted, has_metrics), run.snapshots))


def _facts(run: Run, snapshot: Snapshot, pins: Collection[str], has_metrics: bool) -> SnapshotFacts:
    tree, path = run.tree, snapshot.path
    is_known = snapshot.state != FOREIGN
    measure = tree.measure(*snapshot.paths) if is_known else None
    state = snapshot.state
    if measure and state == COMMITTED and any(n.endswith((*FILE_SUFFIXES, ".distcp")) for n in measure.empty):
        state = DAMAGED
    pinned = tree.is_file(f"{path}/{PIN}") or tree.is_file(path + PIN)
    return SnapshotFacts(
        path,
        snapshot.step,
        snapshot.time_s,
        measure.length_bytes if measure else 0,
        measure.inodes if measure else 0,
        state,
        read_metrics(run, snapshot) if has_metrics and is_known else {},
        pinned or bool({path, path.rpartition("/")[2], str(snapshot.step)}.intersection(pins)),
        run.claims_on(path),
        snapshot.is_outside,
        bool(snapshot.parts),
    )


def read_metrics(run: Run, snapshot: Snapshot) -> dict[str, float]:
    """Metrics of a snapshot: from its name, then a JSON of numbers, then what HF Trainer logged at its step."""
    found = parse_metrics(snapshot.path.rpartition("/")[2])
    for name in _METRIC_FILES:
        if run.tree.is_file(f"{snapshot.path}/{name}"):
            found |= _numbers(_parse(run.tree.read_text(f"{snapshot.path}/{name}")))
    if run.tree.is_file(f"{snapshot.path}/trainer_state.json"):
        state = _parse(run.tree.read_text(f"{snapshot.path}/trainer_state.json"))
        history = state.get("log_history")
        for entry in history if isinstance(history, list) else ():
            if isinstance(entry, dict) and entry.get("step") == state.get("global_step"):
                found |= _numbers(entry)
    return found


def _parse(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _numbers(values: dict[str, object]) -> dict[str, float]:
    numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {k: float(v) for k, v in numbers.items() if abs(v) < 1e300 or not math.isfinite(v)}


class Prover:
    """Validates snapshots, each once, so that what counts as good is good."""

    def __init__(self, run: Run, *, depth: str = "structure", jobs: int = 1) -> None:
        self._run = run
        self._depth = depth
        self._jobs = jobs
        self._known: dict[str, str] = {}
        self.why: dict[str, str] = {}
        """Path -> what is wrong with those that did not pass."""

    def state(self, path: str) -> str:
        """The state of a snapshot after opening it."""
        if path not in self._known:
            self._known[path], why = self._validate(path)
            if why:
                self.why[path] = why
        return self._known[path]

    def is_proved(self, path: str) -> bool:
        """Whether it was opened already."""
        return path in self._known

    @property
    def unreadable(self) -> int:
        """How many no layout could read."""
        return sum(state == FOREIGN for state in self._known.values())

    def _validate(self, path: str) -> tuple[str, str]:
        found = next((s for s in self._run.snapshots if s.path == path and s.parts), None)
        if found is None:
            return validate_places([self._run.place_of(path)], depth=self._depth, jobs=self._jobs)
        copies = {r: list(map(self._run.place_of, files)) for r, files in files_by_rank(found.parts).items()}
        return validate_ranks(copies, depth=self._depth, jobs=self._jobs)


def validate_places(places: Sequence[str], *, depth: str, jobs: int, against: str | None = None) -> tuple[str, str]:
    """State of the snapshot that lies in these places together, and what speaks against it."""
    try:
        found = validate(places[0], roots=places[1:], depth=depth, jobs=jobs, against=against)
    except NotRecognisedError as e:
        return FOREIGN, e.message
    except CkpttoolsError as e:
        return DAMAGED, f"{e.message}: {e.where}" if e.where else e.message
    errors = [f for f in found.findings if f.is_error]
    why = f"{errors[0].code}: {errors[0].where}" if errors else ""
    return {"ok": COMMITTED, "incomplete": UNFINISHED}.get(found.verdict, DAMAGED), why


def validate_ranks(copies: Mapping[int, Sequence[str]], *, depth: str, jobs: int) -> tuple[str, str]:
    """State of a snapshot that is a file per rank: each rank needs one good copy, and good copies must agree.

    Args: copies: the places of each rank's file.
    """
    for rank in sorted(copies):
        good: list[str] = []
        why = ""
        for place in copies[rank]:
            state, wrong = validate_places([place], depth=depth, jobs=jobs, against=good[0] if good and depth == "full" else None)
            if state == COMMITTED:
                good.append(place)
            elif good and wrong.startswith(_COPIES_DIFFER):
                return DAMAGED, f"the copies of rank {rank} differ: {wrong}"
            why = why or f"{wrong}: {place}"
        if not good:
            return DAMAGED, why
    return COMMITTED, ""


def prove(
    facts: Sequence[SnapshotFacts],
    prover: Prover,
    plan: Callable[[Sequence[SnapshotFacts]], Sequence[Decision]],
    *,
    is_all: bool,
) -> list[SnapshotFacts]:
    """The facts, with the newest committed snapshot proved to be valid; with `is_all`, every one that a rule would keep.

    One that does not pass does not count any more, and the one before it takes its place; one that no layout reads is
    not recognised, so it is neither counted nor deleted.
    """
    found = list(facts)
    while True:
        found = _prove_newest(found, prover)
        kept = [d.snapshot for d in plan(found) if d.keep and d.snapshot.state == COMMITTED] if is_all else []
        doubtful = {s.path for s in kept if not prover.is_proved(s.path)}
        if not doubtful:
            return found
        found = [replace(s, state=prover.state(s.path)) if s.path in doubtful else s for s in found]


def _prove_newest(facts: Sequence[SnapshotFacts], prover: Prover) -> list[SnapshotFacts]:
    """Open the newest by step and by time, going back until one passes."""
    committed = [s for s in facts if s.state == COMMITTED]
    states: dict[str, str] = {}
    for ordered in (sorted(committed, key=lambda s: s.order), sorted(committed, key=lambda s: s.time_order)):
        for snapshot in reversed(ordered):
            states[snapshot.path] = prover.state(snapshot.path)
            if states[snapshot.path] == COMMITTED:
                break
            if prover.unreadable > _MAX_UNREADABLE:  # a layout that is not read: none of them is recognised
                states |= {s.path: FOREIGN for s in committed if not prover.is_proved(s.path)}
                break
    return [replace(s, state=states.get(s.path, s.state)) if s.state == COMMITTED else s for s in facts]
