"""Hugging Face safetensors: one file, numbered shards with an index, variants, adapters; read and written.

In here: which files of a directory are a model (`sniff`), and how output files are laid out (`arrange`). How a header
is read is in `containers.safetensors_file`, the index and the file names in `containers.shard_index`. Shards of DCP's
Hugging Face writer belong to `dcp_hf`.

Source: huggingface/safetensors, README.md and safetensors/src/tensor.rs, 0.8.0.
Source: huggingface/huggingface_hub, src/huggingface_hub/serialization/_base.py (`split_state_dict_into_shards_factory`), 1.0.
Source: huggingface/transformers, src/transformers/modeling_utils.py (`save_pretrained`), 4.57 and 5.24.
Source: huggingface/peft, src/peft/peft_model.py (`save_pretrained`), 0.18.
Source: huggingface/accelerate, src/accelerate/checkpointing.py (`model_1.safetensors` for a second model), 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.containers.safetensors_file import MAX_HEADER_BYTES, canonical_order, render_header, stored_form
from ckpttools.containers.safetensors_set import SafetensorsSet, read_set
from ckpttools.containers.shard_index import (
    MODEL_STEMS,
    ShardName,
    ShardSet,
    check_numbers,
    is_model_stem,
    missing_numbers,
    parse_rank_shard,
    parse_shard_name,
    render_index,
    shard_sets,
)
from ckpttools.errors import ConversionError
from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.model import ArrangedFile, Arrangement, Commit, Literal, Slot, TensorSpec
from ckpttools.storage.source import Listing, Source

_SUFFIX = ".safetensors"
_STATE_STEMS = ("optimizer", "scheduler", "scaler")
_MAX_NAMED = 5


def arrange(
    specs: Sequence[TensorSpec],
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    single_file_name: str = "model.safetensors",
) -> Arrangement:
    """The files that hold `specs`: one, or numbered shards and an index when they exceed `max_shard_bytes`. Pure.

    Which tensors share a shard follows huggingface_hub: in the given order, a new shard where the next tensor would
    exceed the limit, and a tensor above the limit alone. Inside a file the order is the official writer's.

    Args:    max_shard_bytes: bytes of tensors, without the header; metadata: what each header states beside its format
    Raises:  ConversionError: when safetensors has no place for a tensor, or a name or a header breaks its rules.
    """
    _require_storable(specs)
    shards = _split(specs, max_shard_bytes)
    stated = {**(metadata or {}), "format": "pt"}
    if len(shards) == 1:
        return Arrangement("safetensors", (_arrange_file(single_file_name, shards[0], stated, is_commit_record=True),))
    stem = single_file_name.removesuffix(_SUFFIX)
    paths = [f"{stem}-{i:05d}-of-{len(shards):05d}{_SUFFIX}" for i in range(1, len(shards) + 1)]
    files = [_arrange_file(path, shard, stated) for path, shard in zip(paths, shards, strict=True)]
    weight_map = {spec.name: path for path, shard in zip(paths, shards, strict=True) for spec in shard}
    index = render_index(weight_map, sum(spec.length_bytes for spec in specs))
    record = ArrangedFile(f"{single_file_name}.index.json", len(index), literals=(Literal(0, index),), is_commit_record=True)
    return Arrangement("safetensors", (*files, record))


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int | None) -> list[list[TensorSpec]]:
    if max_shard_bytes is None:
        return [list(specs)]
    shards: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    current_bytes = 0
    for spec in specs:
        if spec.length_bytes > max_shard_bytes:
            shards.append([spec])
            continue
        if current and current_bytes + spec.length_bytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(spec)
        current_bytes += spec.length_bytes
    if current or not shards:
        shards.append(current)
    return shards


def _arrange_file(
    path: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str], *, is_commit_record: bool = False
) -> ArrangedFile:
    header = render_header(specs, metadata)
    if len(header) - 8 > MAX_HEADER_BYTES:
        raise ConversionError(
            "too many tensors for one safetensors file",
            where=path,
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{len(header) - 8} bytes for {len(specs)} tensors",
            hints=["ask for smaller files, so that each holds fewer tensors"],
        )
    slots, offset = [], len(header)
    for spec in canonical_order(specs):
        slots.append(Slot(spec.name, spec.box, offset, spec.length_bytes))
        offset += spec.length_bytes
    return ArrangedFile(path, offset, tuple(slots), (Literal(0, header),), is_commit_record=is_commit_record)


def _require_storable(specs: Sequence[TensorSpec]) -> None:
    unstorable = [spec for spec in specs if stored_form(spec) is None]
    if unstorable:
        shown = ", ".join(f"`{s.name}` ({s.dtype} {list(s.shape)})" for s in unstorable[:_MAX_NAMED])
        more = f" and {len(unstorable) - _MAX_NAMED} more" if len(unstorable) > _MAX_NAMED else ""
        raise ConversionError(
            f"safetensors cannot store {shown}{more}", hints=["write a torch file instead, or leave these tensors out"]
        )
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ConversionError("two tensors of one name", where=spec.name)
        if spec.name == "__metadata__" or "\0" in spec.name or not _is_text(spec.name):
            raise ConversionError("safetensors cannot store a tensor of this name", where=ascii(spec.name))
        seen.add(spec.name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Safetensors:
    """See the module."""

    name = "safetensors"
    looks_for = "*.safetensors, or *.safetensors.index.json with the files that it names"

    arrange = staticmethod(arrange)

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """A part per model in the root: the main one, and variants and second models as families of their own."""
        if len(listing) == 1:
            (only,) = listing
            if parse_shard_name(only.path) is None and only.is_regular and _is_header(peek(only.path)):
                return [Part(self.name, "model", (only.path,))]
        sets = shard_sets(f.path for f in listing.in_directory(""))
        if any(parse_rank_shard(f.path) for f in listing.in_directory("sharded")):
            sets = [s for s in sets if (s.stem, s.variant) != ("model", "")]  # what dcp_hf consolidated
        main = _main_set(sets)
        loose = [s for s in sets if s is not main and not s.index and not _is_known(s.stem)]
        rest = [s for s in sets if s is not main and s not in loose]
        if main is None and not loose:
            return [_part(s, "model" if len(rest) == 1 else _family(s, "")) for s in rest]
        stem = main.stem if main else ""
        if main is not None and not main.index:
            return [_part(main, "model"), *(_part(s, _family(s, stem)) for s in (*rest, *loose))]
        # an index may name any file (mtp.safetensors); without one, files of unknown names are one model (layers-22)
        known = main or ShardSet("model", "")
        whole = replace(known, files=known.files + tuple(f for s in loose for f in s.files))
        return [_part(whole, "model"), *(_part(s, _family(s, stem)) for s in rest)]

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The tensors of a part, each whole in one stretch of one file."""
        names = [parse_shard_name(f) or ShardName(f, f) for f in part.files if f != part.manifest]
        copies = [n.path for n in names if part.family != "model" and (n.variant or n.stem == "consolidated")]
        if listing.is_one_file:  # one shard by itself: what the others hold was not asked for
            found = read_set(source, listing, [n.path for n in names], family=part.family)
        elif part.manifest:
            found = read_set(source, listing, [n.path for n in names], index_file=part.manifest, family=part.family)
            unnamed = {f.path for f in found.files if f.role == "unreferenced"}
            # transformers loads a lone model.safetensors rather than what the index beside it names
            copies += [n.path for n in names if n.path in unnamed and n.count is None and is_model_stem(n.stem)]
        else:
            found = _read_numbered(source, listing, names, part.family)
        if copies:
            finding = Finding(
                "duplicate-weights", copies[0], "one copy of the model", f"{len(copies)} files of another beside it"
            )
            found = replace(found, findings=(*found.findings, finding))
        return Contents(
            tensors=found.tensors,
            files=found.files,
            findings=found.findings,
            written_by=found.written_by,
            commit=found.commit,
        )


LAYOUT = Safetensors()


def _is_header(start: bytes) -> bool:
    return len(start) > 8 and 2 <= int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES and start[8:9] == b"{"


def _main_set(sets: Sequence[ShardSet]) -> ShardSet | None:
    """The set that a user means by "the model": by stem, and without a variant unless there is just the one."""
    for stem in MODEL_STEMS:
        of_stem = [s for s in sets if s.stem == stem]
        plain = [s for s in of_stem if not s.variant]
        if plain or len(of_stem) == 1:
            return (plain or of_stem)[0]
    return None


def _is_known(stem: str) -> bool:
    base, _, number = stem.rpartition("_")
    return is_model_stem(stem) or stem in _STATE_STEMS or (base in _STATE_STEMS and number.isdigit())


def _part(shards: ShardSet, family: str) -> Part:
    return Part("safetensors", family, shards.paths, manifest=shards.index)


def _family(shards: ShardSet, main_stem: str) -> str:
    """What the names of a further set start with: `model.fp16` for a variant of the model, else what its files are called."""
    stem = "model" if shards.variant and shards.stem == main_stem else shards.stem
    return ".".join(filter(None, (stem, shards.variant)))


def _read_numbered(source: Source, listing: Listing, names: Sequence[ShardName], family: str) -> SafetensorsSet:
    """A set that no index describes: the one group of shards that is complete, or else all that there is."""
    groups = list(ShardSet("", "", tuple(names)).by_count.values())
    whole = [group for group in groups if group[0].count is not None and next(missing_numbers(group), None) is None]
    stale: list[str] = []
    if len(whole) == 1 and all(group[0].count is not None for group in groups):
        stale = [n.path for group in groups if group is not whole[0] for n in group]
        groups = whole
    found = read_set(source, listing, [n.path for group in groups for n in group], others=stale, family=family)
    missing = check_numbers(ShardSet("", "", tuple(n for group in groups for n in group)))
    findings = [*missing, *(Finding("unreferenced-file", path, "a file of the complete set", "of another one") for path in stale)]
    if not missing and groups[0][0].count is not None:
        findings.append(_no_index(groups[0][0]))
    elif not missing and len(names) > 1:
        expected = "an index, or numbers in the file names"
        findings.append(Finding("completeness-unproved", names[0].path, expected, f"{len(names)} files with neither"))
    commit = Commit(False, missing[0].where) if missing else found.commit
    return replace(found, findings=(*findings, *found.findings), commit=commit)


def _no_index(name: ShardName) -> Finding:
    """The index is written last; but the numbers say that all shards are there, and their headers prove them whole."""
    variant = f".{name.variant}" if name.variant else ""
    return Finding(
        "missing-index",
        f"{name.stem}{_SUFFIX}.index{variant}.json",
        "an index beside the shards",
        f"none; the numbers in the names say that all {name.count} shards are there",
    )
