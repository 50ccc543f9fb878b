"""How Hugging Face names the files of a model, and the index that says which tensor is in which of them.

File names: `model.safetensors`, `model-00001-of-00003.safetensors`, with a variant in the middle
(`model.fp16-00001-of-00003.safetensors`), and DCP's shards of one rank (`shard-00002-model-00001-of-00003.safetensors`).
The same grammar serves `.bin`. Index: `model.safetensors.index.json`. Nothing here opens a data file. Read `shard_sets`
and `read_index` first.

Source: huggingface/huggingface_hub, src/huggingface_hub/serialization/_base.py and _torch.py, 1.0.
Source: huggingface/transformers, src/transformers/modeling_utils.py (`_add_variant`, `save_pretrained`), 5.24.
Source: huggingface/diffusers, src/diffusers/utils/hub_utils.py (the older place of the variant), 0.35.
Source: pytorch/pytorch, torch/distributed/checkpoint/_hf_utils.py, 2.13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ckpttools.containers.jsons import JsonError, parse_json, shown
from ckpttools.containers.strangers import tell
from ckpttools.findings import NOTE, Finding
from ckpttools.storage.source import Listing, Source, read
from ckpttools.units import render_bytes

MAX_INDEX_BYTES = 256 * 1024**2
"""An index of a million tensors has 100 MB."""

MODEL_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model", "consolidated")
"""What the tools call the weights; where several are side by side, the first of these is the model."""

_MAX_LISTED = 20
_STEM = re.compile(rf"(?:{'|'.join(MODEL_STEMS)})(?:_[0-9]+)?")
_NUMBERED = re.compile(r"(?P<before>.+[-_])(?P<number>[0-9]{1,9})(?P<after>-of-(?P<count>[0-9]{1,9}))(?P<late>\.[^.]+)?")
_INDEX = re.compile(r"(?P<stem>.+)\.(?P<suffix>safetensors|bin)(?:\.(?P<early>[^.]+))?\.index(?:\.(?P<variant>[^.]+))?\.json")
_RANK_SHARD = re.compile(r"shard-([0-9]{1,9})-model-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class ShardName:
    """A data file's name, taken apart."""

    path: str
    stem: str
    """`model`, `adapter_model`; for names that nobody knows all that stands before the number or the suffix."""
    variant: str = ""
    """`fp16` in `model.fp16.safetensors`."""
    number: int | None = None
    count: int | None = None
    """3 in `-00001-of-00003`; None for a file that is not one of several."""
    before: str = ""
    """The path up to the number."""
    after: str = ""
    """The path after the number."""
    digits: int = 0

    def sibling(self, number: int) -> str:
        """The path of another shard of the same set."""
        return f"{self.before}{number:0{self.digits}d}{self.after}"


@dataclass(frozen=True)
class ShardSet:
    """The files of one directory that one stem and one variant join, and their index."""

    stem: str
    variant: str
    files: tuple[ShardName, ...] = ()
    index: str = ""
    """Path of its index; empty where there is none."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file, the index first."""
        return tuple(filter(None, (self.index, *(f.path for f in self.files))))

    @property
    def by_count(self) -> dict[tuple[int | None, str], tuple[ShardName, ...]]:
        """The files by how many they say they are, and how they spell it: each group is from one save."""
        groups: dict[tuple[int | None, str], list[ShardName]] = {}
        for name in self.files:
            groups.setdefault((name.count, name.before + name.after if name.count is not None else name.path), []).append(name)
        return {key: tuple(group) for key, group in groups.items()}


@dataclass(frozen=True, slots=True)
class RankShard:
    """The name of a file that one rank wrote with DCP's Hugging Face writer."""

    path: str
    rank: int
    model: int
    """Which of the `count` output files its tensors are for, from 1."""
    count: int


def parse_shard_name(path: str, suffix: str = ".safetensors") -> ShardName | None:
    """The parts of a data file's name; None when it does not end in `suffix`. Pure."""
    directory, slash, name = path.rpartition("/")
    if not name.endswith(suffix) or name == suffix:
        return None
    body = name[: -len(suffix)]
    numbered = _NUMBERED.fullmatch(body)
    if numbered is None:
        return ShardName(path, *_split_variant(body))
    stem, variant = _split_variant(numbered["before"][:-1])
    late = numbered["late"] or ""
    return ShardName(
        path,
        stem,
        variant or late[1:],
        int(numbered["number"]),
        int(numbered["count"]),
        directory + slash + numbered["before"],
        numbered["after"] + late + suffix,
        len(numbered["number"]),
    )


def _split_variant(body: str) -> tuple[str, str]:
    """`model.fp16` is a variant of `model`; of a stem that nobody knows, dots are part."""
    stem, _, variant = body.partition(".")
    return (stem, variant) if variant and is_model_stem(stem) else (body, "")


def is_model_stem(stem: str) -> bool:
    """Whether it is one of `MODEL_STEMS`, or a further model beside it (accelerate's `model_1`). Pure."""
    return _STEM.fullmatch(stem) is not None


def parse_index_name(path: str, suffix: str = ".safetensors") -> tuple[str, str] | None:
    """(stem, variant) of the set that an index file is for; None when it is no index of such files. Pure."""
    match = _INDEX.fullmatch(path.rpartition("/")[2])
    if match is None or "." + match["suffix"] != suffix:
        return None
    stem, variant = _split_variant(match["stem"])
    return stem, match["variant"] or match["early"] or variant  # early: diffusers 0.29


def parse_rank_shard(path: str) -> RankShard | None:
    """The rank and numbers in the name of a DCP shard; None for other files. Pure."""
    match = _RANK_SHARD.fullmatch(path.rpartition("/")[2])
    return RankShard(path, int(match[1]) - 1, int(match[2]), int(match[3])) if match else None


def shard_sets(paths: Iterable[str], suffix: str = ".safetensors") -> list[ShardSet]:
    """The sets that the files of one directory form, by stem and variant; the shards of ranks are not among them. Pure."""
    files: dict[tuple[str, str], list[ShardName]] = {}
    indexes: dict[tuple[str, str], str] = {}
    for path in sorted(paths):
        name, index = parse_shard_name(path, suffix), parse_index_name(path, suffix)
        if name is not None and parse_rank_shard(path) is None:
            files.setdefault((name.stem, name.variant), []).append(name)
        elif index is not None:
            indexes[index] = path
    keys = sorted({*files, *indexes})
    return [ShardSet(*key, tuple(files.get(key, ())), indexes.get(key, "")) for key in keys]


def missing_numbers(files: Sequence[ShardName]) -> Iterator[str]:
    """Paths of the shards that a group of `ShardSet.by_count` lacks, in order; lazily, the count may be a lie. Pure."""
    count = files[0].count if files else None
    if count is None:
        return
    present = {f.number for f in files}
    first = 0 if 0 in present and count not in present else 1  # a few writers count from 0
    for number in range(first, first + count):
        if number not in present:
            yield files[0].sibling(number)


def check_numbers(shards: ShardSet) -> list[Finding]:
    """A finding per shard that the numbers in the names of the others ask for; for sets without an index. Pure."""
    findings: list[Finding] = []
    for files in shards.by_count.values():
        missing = list(islice(missing_numbers(files), _MAX_LISTED + 1))
        expected, found = f"{files[0].count} files of one set", f"{len(files)} files"
        findings += [Finding("missing-file", path, expected, found) for path in missing[:_MAX_LISTED]]
        if len(missing) > _MAX_LISTED:
            found += "; more are missing than are listed here"
            findings.append(Finding("missing-file", files[0].path, expected, found))
    return findings


def is_plain_reference(reference: str) -> bool:
    """Whether a manifest's reference is a plain relative path downwards, on every operating system. Pure."""
    if not reference or "\\" in reference or "\0" in reference or re.match(r"[A-Za-z]:", reference):
        return False
    return all(part not in ("", ".", "..") for part in reference.split("/"))


@dataclass(frozen=True)
class ShardIndex:
    """What an index file says; references that leave its directory are not in it, only in the findings."""

    file: str
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> path from the root of the source."""
    total_size: int | float | None = None
    """Bytes of all tensors as stated; a few old writers count a bool as 1/8 byte and state fractions."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    refused: frozenset[str] = frozenset()
    """Tensors whose reference is none; the findings say why."""
    is_parsed: bool = True
    """False when it is no index at all: not JSON, or without a weight map."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files it names, in the order of their first tensors."""
        return tuple(dict.fromkeys(self.weight_map.values()))


def read_index(source: Source, listing: Listing, file: str) -> ShardIndex:
    """The index in a listed file. Raises StorageError when the storage breaks; what is wrong with it is in the findings."""
    length = listing.length_bytes(file)
    if not listing.files[file].is_regular:
        return ShardIndex(
            file, findings=(Finding("special-file", file, "a regular file", listing.files[file].kind),), is_parsed=False
        )
    if not 0 < length <= MAX_INDEX_BYTES:
        code = "bad-json" if length else "empty-file"
        finding = Finding(code, file, f"an index of 1 to {MAX_INDEX_BYTES} bytes", render_bytes(length))
        return ShardIndex(file, findings=(finding,), is_parsed=False)
    return parse_index(read(source, file, 0, length), file)


def parse_index(data: bytes, file: str) -> ShardIndex:
    """The index in a JSON text. Pure."""

    def unusable(where: str, expected: str, found: str) -> ShardIndex:
        return ShardIndex(file, findings=(Finding("bad-json", where, expected, found),), is_parsed=False)

    try:
        value = parse_json(data)
    except JsonError as e:
        stranger = tell(data)
        if stranger:
            finding = Finding("bad-json", file, "an index", stranger.what, stranger.remedy)
            return ShardIndex(file, findings=(finding,), is_parsed=False)
        return unusable(file if e.position is None else f"{file} at byte {e.position}", "JSON with unique keys", e.message)
    if not isinstance(value, dict) or not isinstance(value.get("weight_map"), dict):
        return unusable(file, "an object with a weight_map", "another value" if isinstance(value, dict) else type(value).__name__)
    directory = file.rpartition("/")[0]
    prefix = f"{directory}/" if directory else ""
    findings: list[Finding] = []
    weight_map: dict[str, str] = {}
    for tensor, reference in value["weight_map"].items():
        if not isinstance(reference, str):
            findings.append(Finding("bad-json", f"{shown(tensor)} in {file}", "a file name", shown(json.dumps(reference))))
        elif not is_plain_reference(reference):
            expected = "a file in the directory of the index"
            findings.append(Finding("reference-outside", f"{shown(tensor)} in {file}", expected, f"`{shown(reference)}`"))
        else:
            weight_map[tensor] = prefix + reference
    stated = value.get("metadata")
    metadata: dict[str, object] = stated if isinstance(stated, dict) else {}
    total = metadata.get("total_size")
    total_size = total if isinstance(total, (int, float)) and not isinstance(total, bool) else None
    refused = frozenset(value["weight_map"]).difference(weight_map)
    return ShardIndex(file, weight_map, total_size, metadata, tuple(findings), refused)


def check_references(index: ShardIndex, listing: Listing, candidates: Sequence[str]) -> list[Finding]:
    """Files that the index names and that are not there, and candidates for the same set that it does not name. Pure."""
    tensors: dict[str, list[str]] = {}
    for tensor, file in index.weight_map.items():
        tensors.setdefault(file, []).append(tensor)
    beside = [path for path in candidates if path != index.file]
    if tensors and beside and not any(file in listing for file in tensors):
        return [_of_another_set(index, beside)]
    findings = [
        Finding(
            "missing-file",
            file,
            f"a file with `{shown(names[0])}`" + (f" and {len(names) - 1} more tensors" if len(names) > 1 else ""),
            f"named in {index.file}, not there",
        )
        for file, names in tensors.items()
        if file not in listing
    ]
    unnamed = [path for path in beside if path not in tensors]
    return findings + [Finding("unreferenced-file", path, f"a file that {index.file} names", "not named") for path in unnamed]


def _of_another_set(index: ShardIndex, beside: Sequence[str]) -> Finding:
    """An index none of whose files is there while others are: it came along when the weights were saved anew."""
    return Finding(
        "index-mismatch",
        index.file,
        f"an index of the files beside it, such as {beside[0]}",
        f"it names {len(index.files)} files, such as `{shown(index.files[0])}`, of which none is there",
        "it is of another save: move it away, and the files are read without it, or write it again from their headers",
    )


def check_index(
    index: ShardIndex, tensors_by_file: Mapping[str, Collection[str]], *, total_bytes: Collection[int] = ()
) -> list[Finding]:
    """Where the index and the files disagree about which tensor is where, and about the total size. Pure.

    Args:
        tensors_by_file: names of the tensors in each file that was read; what an unread file has is not judged
        total_bytes: totals that a right writer may have stated: tied tensors of a `.bin` count once or each; none: no check
    """
    findings = check_unique(tensors_by_file)
    holders: dict[str, str] = {}
    for file, names in tensors_by_file.items():
        holders.update(dict.fromkeys(names, file))
    for tensor, file in index.weight_map.items():
        names_there = tensors_by_file.get(file)
        if names_there is None or tensor not in names_there:
            holder = holders.get(tensor)
            if holder is not None or names_there is not None:
                found = f"in {holder}" if holder else "in none of the files"
                findings.append(Finding("index-mismatch", f"{shown(tensor)} in {index.file}", f"in {file}", found))
    findings += [
        Finding("not-in-index", f"{shown(tensor)} in {file}", f"an entry in {index.file}", "none")
        for tensor, file in holders.items()
        if tensor not in index.weight_map and tensor not in index.refused
    ]
    return findings + _check_total(index, total_bytes)


def _check_total(index: ShardIndex, total_bytes: Collection[int]) -> list[Finding]:
    stated = index.total_size
    if stated is None or not total_bytes or stated in total_bytes:
        return []
    expected = " or ".join(f"{n} bytes" for n in sorted(set(total_bytes)))
    is_whole = stated == int(stated)
    # a writer that counts a bool as 1/8 byte states fractions, and nothing is wrong with its tensors
    return [
        Finding(
            "total-size-mismatch", f"total_size in {index.file}", expected, f"{stated} bytes", severity="" if is_whole else NOTE
        )
    ]


def check_unique(tensors_by_file: Mapping[str, Collection[str]]) -> list[Finding]:
    """A finding per tensor that more than one file of a set has. Pure."""
    owner: dict[str, str] = {}
    findings = []
    for file, names in tensors_by_file.items():
        for name in names:
            first = owner.setdefault(name, file)
            if first != file:
                findings.append(Finding("duplicate-name", f"{shown(name)} in {file}", "in one file", f"in {first}, too"))
    return findings


def render_index(weight_map: Mapping[str, str], total_size: int, metadata: Mapping[str, str] | None = None) -> bytes:
    """The index as Hugging Face's writers write it. Pure.

    Args: metadata: what the index shall state beside the total size
    """
    value = {"metadata": {**(metadata or {}), "total_size": total_size}, "weight_map": dict(weight_map)}
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
