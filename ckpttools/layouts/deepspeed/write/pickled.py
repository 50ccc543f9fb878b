"""A value for a torch file, with the storages of its tensors as they are added: whole ones, flat ones, records of torch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpttools.containers.torch_archive import FlatStorage, Storage, arrange_archive, tensor_record
from ckpttools.dtypes import DType
from ckpttools.geometry import contiguous_runs, flat_range_to_boxes
from ckpttools.model import ArrangedFile, TensorSpec
from ckpttools.pickles.records import Global, Object
from ckpttools.placement.held import HeldTensor

Placed = tuple[int, HeldTensor]
"""A box of a tensor as a tensor of its own, and the element of a flat vector at which it begins."""


@dataclass(slots=True)
class Pickled:
    """A value for a torch file and the storages of its tensors, as they are added."""

    storages: dict[str, Storage] = field(default_factory=dict)

    def whole(self, tensor: TensorSpec | HeldTensor) -> Object:
        """A tensor as it is."""
        return self._add(tensor.spec if isinstance(tensor, HeldTensor) else tensor, tensor)

    def empty(self, name: str, dtype: DType) -> Object:
        """The placeholder of a parameter in ZeRO 3."""
        return self._add(TensorSpec(name, dtype, (0,)), b"")

    def flat(self, dtype: DType, numel: int, boxes: Iterable[Placed]) -> Object:
        """A vector of boxes, with zeros between them."""
        spec = TensorSpec("", dtype, (numel,))
        return self._add(spec, FlatStorage(spec, tuple(boxes)))

    def file(self, path: str, value: object) -> ArrangedFile:
        """The archive."""
        return arrange_archive(path, value, self.storages)

    def _add(self, spec: TensorSpec, storage: Storage) -> Object:
        key = str(len(self.storages))
        self.storages[key] = storage
        return tensor_record(spec, key)


def flat_boxes(tensor: HeldTensor, start: int, stop: int, at: int) -> list[Placed]:
    """The elements [start, stop) of a rank's tensor, as far as it has them, from element `at` of a vector on.

    Where nothing is held (rows that pad a vocabulary) there is no box.
    """
    spec = tensor.spec
    found = []
    first = min(start, spec.volume)
    for box in flat_range_to_boxes(spec.shape, first, max(first, min(stop, spec.volume))):
        share = tensor.within(box)
        if sum(part.box.volume for part in share.local.parts) == box.volume:
            found.append((at, share))
        else:
            runs = (run for part in share.local.parts for run in contiguous_runs(part.local, box.sizes))
            found += [(at + place, share.within(run)) for run, place in runs if run.volume]
        at += box.volume
    return found


def size_record(shape: tuple[int, ...]) -> Object:
    """A `torch.Size`."""
    return Object(Global("torch", "Size"), (shape,))


def ordered(pairs: Mapping[str, object]) -> Object:
    """A `collections.OrderedDict`."""
    found = Object(Global("collections", "OrderedDict"), ())
    found.pairs = list(pairs.items())
    return found
