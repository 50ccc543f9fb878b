"""What is known of a model beside its tensors: a config that a user names, the one that lies beside the source, or the
arguments of the training run, which Megatron keeps in its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttools.errors import UsageError
from ckpttools.layouts import Snapshot
from ckpttools.pickles.views import attributes, mapping_items, sequence_items
from ckpttools.storage.source import open_source, read

CONFIGS = ("config.json", "params.json", "huggingface/config.json")
MAX_TEXT_BYTES = 16 << 20


@dataclass(frozen=True)
class ModelSettings:
    """Settings, and where they stand."""

    values: Mapping[str, object] = field(default_factory=dict)
    where: str = ""
    is_named: bool = False
    """Whether a user named the file; one beside the source may be another model's."""


def read_settings(snapshot: Snapshot, wanted: str | None) -> ModelSettings:
    """The settings of a snapshot's model; none where nothing states them. Raises UsageError for a named file that is no JSON."""
    if wanted is not None:
        return ModelSettings(parse_settings(read_text(wanted), wanted), wanted, is_named=True)
    for path in CONFIGS:
        if path in snapshot.listing and snapshot.listing.length_bytes(path) <= MAX_TEXT_BYTES:
            data = read(snapshot.source, path, 0, snapshot.listing.length_bytes(path))
            try:
                return ModelSettings(parse_settings(data.decode("utf-8", "replace"), path), path)
            except UsageError:
                return ModelSettings()
    for entry in snapshot.checkpoint.objects:
        if entry.path[-1:] == ("args",):
            return ModelSettings(attributes(entry.record) or {}, entry.name)
        if entry.name.startswith("common_state/"):
            items = sequence_items(entry.record)
            top = dict(mapping_items(items[0] if items else entry.record) or [])
            return ModelSettings(attributes(top.get("args")) or {}, entry.name)
    return ModelSettings()


def parse_settings(text: str, where: str) -> Mapping[str, object]:
    """A JSON object. Pure. Raises UsageError for anything else."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"not a model's config: {where}", expected="a JSON document", found=str(e)) from e
    if not isinstance(config, dict):
        raise UsageError(f"not a model's config: {where}", expected="a JSON object", found=type(config).__name__)
    return config


def read_text(location: str) -> str:
    """A text file that a user names. Raises UsageError, NotFoundError, StorageError."""
    source, file = open_source(location)
    length = source.listing().length_bytes(file) if file else 0
    if not file or length > MAX_TEXT_BYTES:
        raise UsageError(f"not a text file: {location}", found=f"{length} bytes" if file else "a directory")
    return read(source, file, 0, length).decode("utf-8", "replace")
