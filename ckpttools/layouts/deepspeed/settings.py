"""What is no tensor of a parameter: the client's state, the optimizer's settings, the scheduler; objects, kept as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

from ckpttools.containers.torch_entries import RankFile
from ckpttools.containers.trees import TreeLimitError, leaves
from ckpttools.findings import WARNING, Finding
from ckpttools.layouts.deepspeed.book import Book
from ckpttools.layouts.deepspeed.names import stem_of
from ckpttools.layouts.deepspeed.partitions import states_of
from ckpttools.layouts.deepspeed.ranks import ModelFile, OptimizerFile, Ranks
from ckpttools.layouts.deepspeed.states import Files, count, items, numbered, table
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER, SCHEDULER
from ckpttools.model import ObjectEntry, Path, TensorEntry, TensorSpec, render_path
from ckpttools.pickles.views import kind_of, outline

_LAYOUT_KEYS = frozenset({"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"})
"""What says how tensors are stored; it is read, and is no state."""
_WHOLE_KEYS = frozenset(
    {"buffer_names", "shared_params", "ds_config", "args", "universal_checkpoint_info", "checkpoint_parallel_dimensions"}
)
_FLAT_KEYS = frozenset(
    {
        "base_optimizer_state",
        "optimizer_state_dict",
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "param_slice_mappings",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "zero_stage",
        "ds_zero_partition_groups",
    }
)


def read_client_state(book: Book, files: Files, ranks: Ranks) -> list[TensorEntry]:
    """The rest of each model file: of the first rank under `extra_state`, of the others where it differs or is a tensor."""
    tensors: list[TensorEntry] = []
    first = ranks.first
    seen: dict[Path, str] = {}
    for key in sorted(ranks.models, key=lambda k: (k[1], k[0])):
        model = ranks.models[key]
        own: Path = () if model is first else (stem_of(model.path),)
        for name, record in model.top.items():
            if name in _LAYOUT_KEYS or record is None:
                continue
            if name == "shared_params" and (own or not table(record)):  # of the whole model: one file says it
                continue
            family = SCHEDULER if name == "lr_scheduler" else EXTRA_STATE
            start: Path = () if family == SCHEDULER else (name,)
            tensors += _read_value(book, files, model.file, (family,), own, start, record, seen)
    return tensors


def client_trees(ranks: Ranks) -> dict[Path, object]:
    """The first rank's values, by which a writer knows what is a list."""
    top = ranks.first.top if ranks.first else {}
    return {(EXTRA_STATE, k): v for k, v in top.items() if k not in _LAYOUT_KEYS and k not in _WHOLE_KEYS and k != "lr_scheduler"}


def _read_value(
    book: Book, files: Files, file: RankFile, family: Path, own: Path, start: Path, record: object, seen: dict[Path, str]
) -> list[TensorEntry]:
    """The leaves of one value; objects equal to the first rank's are not listed again."""
    found: list[TensorEntry] = []
    is_whole = bool(start) and start[0] in _WHOLE_KEYS
    try:
        below = [((), record)] if is_whole else [(leaf.path, leaf.record) for leaf in leaves(record)]
    except TreeLimitError as e:
        files.findings.append(Finding("pickle-limit", file.path, "a tree of entries", str(e)))
        return []
    for path, value in below:
        place: Path = (*family, *own, *start, *path)
        common: Path = (*family, *start, *path)
        stored = files.locate(file, value, f"`{render_path((*start, *path))}`")
        if stored is not None:
            spec = TensorSpec(render_path(place), stored.dtype, stored.shape)
            from ckpttools.layouts.deepspeed.parts import whole_piece

            piece = whole_piece(stored.shape, stored.extent, file.rank)
            found.append(TensorEntry(spec, place, (piece,), family=str(family[0])))
            continue
        text = outline(value, max_parts=1000, max_chars=200)
        if not own or seen.get(common) != text:
            book.add_object(place, kind_of(value), value, str(family[0]))
        if not own:
            seen[common] = text
    return found


def read_optimizer_settings(book: Book, top: Mapping[str, object]) -> None:
    """What an optimizer keeps beside its tensors: loss scale, clipping, hyperparameters."""
    for name, record in top.items():
        if name not in _FLAT_KEYS and record is not None:
            _add(book, ("optimizer", name), record)
    inner = table(top.get("base_optimizer_state")) or table(top.get("optimizer_state_dict"))
    if inner.get("param_groups") is not None:
        _add(book, ("optimizer", "param_groups"), inner["param_groups"])


def _add(book: Book, path: Path, record: object) -> None:
    book.objects.setdefault(path, ObjectEntry(render_path(path), path, kind_of(record), record, family=OPTIMIZER))


def check_steps(files: Files, ranks: Ranks) -> None:
    """Whether all ranks are of one step: what the model files state, and the counters in the optimizer's files."""
    stated = {m.path: m.step for m in ranks.models.values() if m.step is not None}
    _compare_steps(files, stated, "model files", {})
    counted = {f.path: steps for f in ranks.optimizers.values() if (steps := _steps(files, f))}
    first = ranks.first
    skipped = count(first.top.get("skipped_steps")) or 0 if first else 0
    likely = {first.step - skipped: 1} if first and first.step is not None else {}
    done = {path: max(steps.values()) for path, steps in counted.items()}
    _compare_steps(files, done, "optimizer files", likely)
    files.findings += _other_step(first, skipped, done) if first else []


def _other_step(first: ModelFile, skipped: int, done: Mapping[str, float]) -> list[Finding]:
    """A warning where the optimizer counts other steps than the model file, by more than one.

    The unfused half-precision optimizer takes a step while it is set up. No error: training may have begun with weights
    alone, and the optimizer's count with it.
    """
    if first.step is None or any(min(abs(first.step - s), abs(first.step - skipped - s)) <= 1 for s in done.values()):
        return []
    return [
        Finding("step-mismatch", first.path, f"step {step}, as in {path}", f"step {first.step}", severity=WARNING)
        for path, step in islice(done.items(), 1)
    ]


def _steps(files: Files, file: OptimizerFile) -> dict[int, float]:
    """The step of each parameter group, as the inner optimizer counts it."""
    base = table(file.top.get("base_optimizer_state")) or table(file.top.get("optimizer_state_dict"))
    numbers = list(numbered(base.get("state"))) if base else list(range(len(items(file.top.get("base_optimizer_state")))))
    found: dict[int, float] = {}
    for g in numbers:
        own = states_of(file, g) or table(numbered(base.get("state")).get(g))
        record = own.get("step")
        stored = files.locate(file.file, record, f"`step` of group {g}") if record is not None else None
        number = files.read_number(stored) if stored is not None else record
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            found[g] = number
    return found


def _compare_steps(files: Files, steps: Mapping[str, float | None], what: str, likely: Mapping[int, int]) -> None:
    """A finding for each file that is of another step than most are."""
    if len(set(steps.values())) < 2:
        return
    votes = Counter(steps.values())
    usual = max(votes, key=lambda s: (votes[s], s in likely, -list(votes).index(s)))
    agreeing = next(path for path, step in steps.items() if step == usual)
    for path, step in steps.items():
        if step != usual:
            expected = f"step {usual}, as {votes[usual]} of {len(steps)} {what} have (such as {agreeing})"
            files.findings.append(Finding("step-mismatch", path, expected, f"step {step}"))
