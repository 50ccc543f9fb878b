"""Which tensors a conversion takes, under which names they come out, and which of tied ones is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckpttools.errors import ConversionError, UsageError
from ckpttools.layouts.families import MODEL
from ckpttools.model import Checkpoint, ObjectEntry, TensorEntry


@dataclass(frozen=True, slots=True)
class Renaming:
    """How names change: a prefix is stripped, then each (regex, replacement) is applied in order."""

    strip_prefixes: tuple[str, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()

    def apply(self, name: str) -> str:
        """The new name. Pure."""
        for prefix in self.strip_prefixes:
            name = name.removeprefix(prefix)
        for pattern, replacement in self.rules:
            name = re.sub(pattern, replacement, name)
        return name

    @classmethod
    def parse(cls, strip_prefixes: Sequence[str], rules: Sequence[str]) -> Renaming:
        """From `REGEX=REPLACEMENT` texts. Raises UsageError where one does not parse."""
        parsed = []
        for rule in rules:
            pattern, equals, replacement = rule.partition("=")
            try:
                groups = re.compile(pattern).groups
                re.sub(pattern, replacement, "")
            except (re.error, IndexError) as e:
                hint = "write it like '^model\\.=transformer.'"
                raise UsageError(f"not a renaming: `{rule}`", found=str(e), hints=[hint]) from e
            if not equals or groups > 99:
                raise UsageError(f"not a renaming: `{rule}`", expected="REGEX=REPLACEMENT")
            parsed.append((pattern, replacement))
        return cls(tuple(strip_prefixes), tuple(parsed))


@dataclass(frozen=True)
class Selection:
    """What a conversion takes."""

    tensors: dict[str, TensorEntry]
    """By output name, in the source's order; of tied tensors the one that is written."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Output name that is not written -> the output name whose tensor it is."""
    objects: tuple[ObjectEntry, ...] = ()
    left: tuple[str, ...] = ()
    """Names of tensors that were not taken."""
    widened: frozenset[str] = frozenset()
    """Output names of tensors that come out as float32, because masters were asked for and they have none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tensors a user asked for, and under which names. Globs match names as `inspect` shows them."""

    include: tuple[str, ...] = ()
    """Take what matches, of every family; with none, `is_weights_only` decides."""
    exclude: tuple[str, ...] = ()
    is_weights_only: bool | None = None
    """The model's tensors alone, without objects; None for what the target format does by itself."""
    renaming: Renaming = Renaming()
    is_expanding_tied: bool = False
    """Write tied tensors under each of their names."""
    weights: str = "model"
    """Which weights, where there are two kinds: `model`, in the dtype that training used, or `fp32`, the masters that the
    optimizer keeps of them; what has none (frozen weights, buffers) is widened, which is exact."""


def select(checkpoint: Checkpoint, choice: Choice, *, is_weights_only_by_default: bool) -> Selection:
    """Choose and rename. Pure.

    Raises: ConversionError: when nothing is left, two tensors get one name, or a chosen one is part of a tensor that is
        not dense.
    """
    is_weights_only = is_weights_only_by_default if choice.is_weights_only is None else choice.is_weights_only
    chosen: list[TensorEntry] = []
    left: list[TensorEntry] = []
    for entry in checkpoint.tensors:
        (chosen if _is_chosen(entry, choice, is_weights_only) else left).append(entry)
    if not chosen:
        hints = ["ckpttools inspect --tensors lists them"]
        if is_weights_only and left and not any(t.family == MODEL for t in left):
            families = ", ".join(sorted({t.family for t in left})[:8])
            hints = [f"none of them is the model's: {families}; name the directory of one, or pass --everything"]
        raise ConversionError("no tensor is selected", found=f"{len(left)} tensors", hints=hints)
    parts = [t for t in chosen if t.part_of]
    if parts:
        names = sorted({t.name.rpartition("::")[0] for t in parts})
        raise ConversionError(
            f"not a dense tensor: {parts[0].name.rpartition('::')[0]}: {parts[0].part_of}",
            found=f"{len(names)} such tensors",
            hints=[" ".join(f"--exclude '{n}*'" for n in names[:8])],
        )
    kept_of = {} if choice.is_expanding_tied else _tied(checkpoint, {t.name for t in chosen})
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    taken: dict[str, str] = {}
    for entry in chosen:
        name = choice.renaming.apply(entry.name)
        if not name and entry.name:
            raise ConversionError(f"a renaming leaves nothing of a name: {entry.name}")
        if name in taken:
            raise ConversionError(f"two tensors get one name: {name}", found=f"{taken[name]} and {entry.name}")
        taken[name] = entry.name
        if entry.name in kept_of:
            aliases[name] = choice.renaming.apply(kept_of[entry.name])
        else:
            tensors[name] = entry
    widened: frozenset[str] = frozenset()
    if choice.weights == "fp32":
        tensors = _masters(checkpoint, tensors)
        widened = frozenset(n for n, t in tensors.items() if t.family == MODEL and t.spec.dtype.name in ("bfloat16", "float16"))
    objects = tuple(o for o in checkpoint.objects if not is_weights_only and not _matches(o.name, choice.exclude))
    return Selection(tensors, aliases, objects, tuple(t.name for t in left), widened)


def arguments_of(checkpoint: Checkpoint, choice: Choice) -> tuple[ObjectEntry, ...]:
    """The arguments of the training run, which say of what kind the model is, and the version that says how its rows are ordered,
    unless they are excluded. Pure."""
    places = [(*common, name) for common in ((), ("common",)) for name in ("args", "checkpoint_version")]
    return tuple(o for o in checkpoint.objects if o.path in places and not _matches(o.name, choice.exclude))


def _masters(checkpoint: Checkpoint, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Each weight's master in its place, where it has one. Raises ConversionError when no weight has."""
    found = {name: checkpoint.by_name.get(t.rounded_from, t) for name, t in tensors.items()}
    weights = [t for t in tensors.values() if t.family == MODEL]
    if not any(t.rounded_from or t.spec.dtype.name == "float32" for t in weights):
        raise ConversionError("no fp32 weights are stored", found=f"{len(weights)} weights of other dtypes")
    return found


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _is_chosen(entry: TensorEntry, choice: Choice, is_weights_only: bool) -> bool:
    if _matches(entry.name, choice.exclude):
        return False
    if choice.include:
        return _matches(entry.name, choice.include)
    return entry.family == MODEL or not is_weights_only


def _tied(checkpoint: Checkpoint, names: set[str]) -> dict[str, str]:
    """Name that need not be written -> the name of the same tensor that is."""
    order = {t.name: i for i, t in enumerate(checkpoint.tensors)}
    kept_of: dict[str, str] = {}
    for group in checkpoint.aliases:
        members = [n for n in group if n in names]
        if len(members) > 1:
            kept = min(members, key=lambda n: _preference(n, order))
            kept_of |= {n: kept for n in members if n != kept}
    return kept_of


def _preference(name: str, order: Mapping[str, int]) -> tuple[int, int]:
    """Loaders tie an output layer to an embedding, so of the two the embedding must be there; else the first one."""
    last = name.lower()
    if last.startswith("shared.") or ".shared." in last:
        return 0, order[name]
    return 1 if re.search(r"embed|wte|embd", last) else 2, order[name]
