"""Single torch files: a state dict, a whole training checkpoint, a pickled module, TorchScript, a plain pickle.

Source: pytorch/pytorch, torch/serialization.py, v2.13.0; transformers and accelerate for the names beside a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttools.containers.torch_archive import arrange_archive, nest, tensor_record
from ckpttools.containers.torch_entries import Entries, open_rank_file, read_entries
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.layouts.families import family_of_stem
from ckpttools.model import Arrangement, FileEntry, ObjectEntry, Path, TensorSpec
from ckpttools.pickles.records import Object
from ckpttools.pickles.views import mapping_items
from ckpttools.storage.source import ListedFile, Listing, Source

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PYTORCH1")
_WRITERS = (("pytorch-lightning_version", "Lightning"), ("ds_version", "DeepSpeed"))


class Torch:
    """What torch.save wrote into one file."""

    name = "torch"
    looks_for = "files ending in .pt, .pth, .bin, .ckpt or .pkl (or starting as a zip archive or a pickle)"

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """Every torch file in the root; the family is told by the name, and a single file is the model."""
        files = [f for f in listing.in_directory("") if _is_candidate(f, is_alone=len(listing) == 1, peek=peek)]
        if len(listing) == 1 and files:
            return [Part(self.name, "model", (files[0].path,))]
        return [Part(self.name, family_of_stem(_stem(f.path)), (f.path,)) for f in files]

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """One nested value, its tensors and its objects."""
        (path,) = part.files
        entries = read_entries([open_rank_file(source, path, listing.length_bytes(path))])
        is_model = part.family == "model"
        return Contents(
            tensors=tuple(entries.tensors),
            objects=tuple(entries.objects),
            files=(FileEntry(path, listing.length_bytes(path), "data" if is_model else "objects", part.family),),
            findings=tuple(entries.findings),
            mesh=entries.mesh,
            step=_step(entries),
            written_by=_written_by(entries),
            checksums=tuple(entries.checksums),
            trees=entries.trees,
        )


LAYOUT = Torch()


def _is_candidate(file: ListedFile, *, is_alone: bool, peek: Peek) -> bool:
    if not file.is_regular:
        return False
    if file.path.endswith(_SUFFIXES):
        return True
    return is_alone and peek(file.path).startswith(_MAGICS)


def _stem(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[0]


def _top_level(entries: Entries) -> dict[object, object]:
    return {k: v for tree in entries.trees.values() for k, v in mapping_items(tree) or [] if isinstance(k, str)}


def _step(entries: Entries) -> int | None:
    """The step that a training checkpoint states at its top level."""
    top = _top_level(entries)
    for key in ("global_step", "step", "iteration", "global_steps"):
        value = top.get(key)
        if type(value) is int and value >= 0:
            return value
    return None


def _written_by(entries: Entries) -> str:
    top = _top_level(entries)
    return next((f"{tool} {top[key]}" for key, tool in _WRITERS if isinstance(top.get(key), str)), "torch.save")


def arrange(
    specs: Sequence[TensorSpec],
    *,
    paths: Mapping[str, Path],
    objects: Sequence[ObjectEntry] = (),
    sequences: Mapping[Path, str],
    mappings: Mapping[Path, Object] | None = None,
    order: Mapping[Path, int] | None = None,
    aliases: Mapping[str, str] | None = None,
    file_name: str = "model.pt",
) -> Arrangement:
    """One torch file with the tensors and objects nested as their paths say.

    Args:
        paths: output name -> keys that lead to the tensor.
        sequences: path of each branch that is a `list` or a `tuple`.
        mappings: path of each branch that is no plain dict: an object of its class, without what it maps.
        order: path of an entry -> its place among all; entries without one come last.
        aliases: further name -> the name whose storage it shares.

    Raises: ConversionError: for a dtype that torch has no dense tensor of, or a path that leads through a tensor.
    """
    keys = {spec.name: str(i) for i, spec in enumerate(specs)}
    records = {spec.name: tensor_record(spec, keys[spec.name]) for spec in specs}
    entries: list[tuple[Path, object]] = [(paths[name], record) for name, record in records.items()]
    entries += [(paths[name], records[kept]) for name, kept in (aliases or {}).items()]
    entries += [(obj.path, obj.record) for obj in objects]
    places = order or {}
    entries.sort(key=lambda entry: places.get(entry[0], len(places)))
    value = nest(entries, sequences, mappings)
    file = arrange_archive(file_name, value, {keys[spec.name]: spec for spec in specs})
    return Arrangement(LAYOUT.name, (file,))
