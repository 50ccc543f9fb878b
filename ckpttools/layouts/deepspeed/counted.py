"""With ZeRO off: what the optimizers count and the files do not have, which proves that a weight or a layer is not there.

Neither a state dict nor a pipeline lists what belongs to it, and a pipeline has no file of a layer that is a mere function. But
every position of an optimizer is a parameter, and its moments have that parameter's shape. What the optimizers have more of than
the files (frozen parameters are the other way round, and stages hold copies of tied modules) is lost.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/pipe/module.py (`save_state_dict`), v0.19.8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod

from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.names import layer_sibling
from ckpttools.layouts.deepspeed.states import Files, Stored
from ckpttools.layouts.deepspeed.unflattened import Params, Unflattened

_SHAPED = ("exp_avg", "momentum_buffer")
"""States that have their parameter's shape in every optimizer that keeps them; factored and blocked ones have not."""
_MAX_NAMED = 8
_SAMPLE_BYTES = 256
_MAX_LAYERS = 1 << 10

Amount = Counter[tuple[int, ...]]
"""Parameters by shape; or under () how many there are, or how many elements, where nothing tells their shapes."""


class Measure:
    """Counts parameters in the unit in which all of these optimizers can be counted."""

    def __init__(self, files: Files, optimizers: Sequence[Unflattened]) -> None:
        self._files = files
        self._states = [_shaped(files, o) for o in optimizers]
        self._optimizers = optimizers
        self.is_flat = any(o.flats for o in optimizers)
        self.has_shapes = not self.is_flat and all(
            sum(map(len, o.groups)) == len(s) for o, s in zip(optimizers, self._states, strict=True)
        )

    @property
    def unit(self) -> str:
        """What an amount counts, for a text."""
        return "elements" if self.is_flat else "parameters"

    def of_params(self, params: Params) -> Amount:
        """How much these parameters are. Pure."""
        if self.has_shapes:
            return Counter(shape for _, shape in params)
        return _number(sum(prod(shape) for _, shape in params) if self.is_flat else len(params))

    def of_optimizers(self) -> list[Amount]:
        """How much each optimizer has, the copies that are found on an earlier one included."""
        found = []
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            if self.is_flat:
                flats = [self._files.locate(optimizer.file, r, "fp32 weights") for r in optimizer.flats]
                found.append(_number(sum(flat.numel for flat in flats if flat)))
            elif self.has_shapes:
                found.append(Counter(s.shape for s in states.values()))
            else:
                found.append(_number(sum(map(len, optimizer.groups))))
        return found

    def copies(self, wanted: Amount) -> Amount:
        """How many of these shapes an optimizer has with values of an earlier one, as of tied modules. Raises StorageError."""
        found, earlier = Amount(), set[tuple[tuple[int, ...], bytes]]()
        for states in self._states if self.has_shapes else ():
            own = [(s.shape, _ends(self._files, s)) for s in states.values() if s.shape in wanted]
            found.update(shape for shape, data in own if (shape, data) in earlier)
            earlier.update((shape, data) for shape, data in own if data)
        return found


def _number(n: int) -> Amount:
    return Amount({(): n})


def _ends(files: Files, stored: Stored) -> bytes:
    """The first and last bytes of a tensor; none where it is not stored as it is."""
    extent, total = stored.extent, stored.numel * stored.dtype.item_bytes
    if extent.strides is not None or extent.transforms or extent.encoding is not None:
        return b""
    data = bytearray(2 * min(total, _SAMPLE_BYTES))
    half = len(data) // 2
    files.source.read_into(extent.file, extent.offset, memoryview(data)[:half])
    files.source.read_into(extent.file, extent.offset + total - half, memoryview(data)[half:])
    return bytes(data)


def _shaped(files: Files, optimizer: Unflattened) -> dict[int, Stored]:
    """What has the shape of the parameter at each position; positions without such are left out."""
    found = {}
    for position in (p for group in optimizer.groups for p in group):
        state = optimizer.state.get(position, {})
        records = [optimizer.masters.get(position), *(state.get(key) for key in _SHAPED)]
        stored = (files.locate(optimizer.file, r, f"state of {position}") for r in records if r is not None)
        first = next((s for s in stored if s is not None), None)
        if first is not None:
            found[position] = first
    return found


def find_lost(files: Files, optimizer: Unflattened, params: Params, where: str) -> Finding | None:
    """An error where an optimizer has more parameters, or more of a shape, than the weights beside it."""
    measure = Measure(files, [optimizer])
    (counted,), there = measure.of_optimizers(), measure.of_params(params)
    lost = counted - there
    if not lost:
        return None
    expected = f"{counted.total()} {measure.unit}, as the optimizer of {optimizer.path} counts"
    return Finding("uncovered", f"weights in {where}", expected, f"{there.total()}{_shapes(measure, lost)}")


def _shapes(measure: Measure, lost: Amount) -> str:
    """The shapes that are lost, for a text."""
    if not measure.has_shapes:
        return ""
    found = [f"{n} of shape {list(shape)}" for shape, n in sorted(lost.items())[:_MAX_NAMED]]
    return f"; {', '.join(found)} {'is' if lost.total() == 1 else 'are'} not there"


def find_lost_layers(measure: Measure, layers: Mapping[int, Params], sample: str) -> list[Finding]:
    """Errors where the stages of a pipeline have more parameters than its layers: the files of these, where it can be told which.

    Args: layers: the parameters of each layer that is there. sample: path of any layer. Raises StorageError.
    """
    stages = measure.of_optimizers()
    counted = sum(stages, Amount())
    sizes = {n: measure.of_params(params) for n, params in layers.items()}
    there = sum(sizes.values(), Amount())
    trained = counted - measure.copies(counted - there)
    first = next((size for size in sizes.values() if size.total()), Amount())
    can_tie = not measure.has_shapes and list(sizes.values()).count(first) == 1  # an embedding, which no other layer is like
    ties = [_times(first, n) for n in range(len(stages) if can_tie else 1)]
    lost = trained - there - ties[-1]
    exact = next((e for tied in ties if (e := _explain(sizes, trained, there + tied))), [])
    if not lost and not exact:
        return []
    expected = f"a layer's file: the optimizers count {counted.total()} {measure.unit}"
    gaps = [str(n) for n in islice(chain.from_iterable(_gaps(layers)), _MAX_NAMED)]
    found = f"{there.total()} in the files of {len(layers)} layers{_shapes(measure, lost)}"
    found += f"; no file of layer {', '.join(gaps)}" if gaps else ""
    if exact:
        return [Finding("missing-file", layer_sibling(sample, n, 0), expected, found) for n in exact]
    found += f"; none after layer {max(layers, default=-1)}: one of these is lost, or a part of a file"
    directory, slash, _ = sample.rpartition("/")
    return [Finding("missing-file", f"{directory}{slash}layer_*-model_states.pt", expected, found)]


def _times(amount: Amount, n: int) -> Amount:
    return Counter({shape: number * n for shape, number in amount.items()})


def _explain(sizes: Mapping[int, Amount], counted: Amount, there: Amount) -> list[int]:
    """The layers without a file that are just what is counted and not there, being like their neighbours; else none. Pure."""
    sides = [(run, sizes.get(run.start - 1, Amount()), sizes.get(run.stop, Amount())) for run in _gaps(sizes)]
    likes = [[(run, before) for run, before, after in sides if before == after]]  # functions mostly lie where the kind changes
    if len(sides) == 1:
        likes += [[(run, after) for run, _, after in sides], [(run, before) for run, before, _ in sides]]
    for runs in likes:
        found = list(islice(chain.from_iterable(run for run, _ in runs), _MAX_LAYERS))
        whole = sum((_times(like, len(run)) for run, like in runs), Amount())
        if whole.total() and there + whole == counted and len(found) < _MAX_LAYERS:
            return found
    return []


def _gaps(layers: Mapping[int, object]) -> Iterator[range]:
    """The numbers between those that are there, in runs. Pure."""
    before = -1
    for n in sorted(layers):
        if n > before + 1:
            yield range(before + 1, n)
        before = n
