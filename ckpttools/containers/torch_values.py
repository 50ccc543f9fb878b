"""What the rebuild calls in a torch pickle mean: dense tensors as views of storages, and the kinds that are more.

Each function reads an inert record; nothing is called. A record that does not have the arguments that torch gives it is
`Malformed`, which callers turn into a finding.

Source: pytorch/pytorch, torch/_utils.py and torch/_tensor.py (`__reduce_ex__`), v2.13.0; older module paths accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.dtypes import BY_STORAGE_CLASS, DType, parse_dtype
from ckpttools.pickles.records import Global, Object, Persistent
from ckpttools.pickles.views import attributes, mapping_items, outline, sequence_items

MAX_DIMENSION = 2**63 - 1
MAX_RANK = 64


class MalformedError(Exception):
    """A record that is named as a tensor and does not have what a tensor has."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A reference to a storage of the same file."""

    key: str
    dtype: DType | None
    """Of a typed storage; None for UntypedStorage, which counts bytes."""
    numel: int
    """Elements (bytes when untyped)."""
    view_offset: int = 0
    """Elements from the start of the stored storage; pre-1.6 files have views of storages."""


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A dense tensor: a strided view of a storage."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements."""
    storage: StorageRef
    storage_offset: int
    """Elements."""
    is_conjugated: bool = False
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class MetaValue:
    """A tensor without data."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompositeValue:
    """A tensor that is not one dense array: sparse, quantized, nested, or a subclass around other tensors."""

    kind: str
    """For people: `sparse_coo float32 [4, 6]`."""
    parts: Mapping[str, object] = field(default_factory=dict)
    """Records of the tensors in it, by the name that torch has for each."""


@dataclass(frozen=True, slots=True)
class WrapperValue:
    """A wrapper subclass (DTensor): its class, its global shape, and the state with the local tensor."""

    class_name: str
    dtype: DType
    shape: tuple[int, ...]
    state: dict[str, object]
    """Its attributes; under "" the state itself where that is no dict."""


Value = TensorValue | MetaValue | CompositeValue | WrapperValue


def read_value(record: object) -> Value | None:
    """The tensor that a record stands for; None when it stands for something else.

    Raises: MalformedError: when it is named as a tensor and does not read as one.
    """
    if not isinstance(record, Object) or not isinstance(record.callable, Global):
        return None
    reader = _READERS.get(record.callable.name)
    if reader is None or not record.callable.module.startswith("torch"):
        return None
    try:
        return reader(record.args)
    except RecursionError:
        raise MalformedError(f"{record.callable.name} around itself, too deep") from None
    except (IndexError, TypeError, ValueError, KeyError, AttributeError) as e:
        raise MalformedError(f"{record.callable.name} with unexpected arguments: {e}") from e


def _storage(record: object) -> StorageRef:
    """A storage from its persistent id, or from a TypedStorage object around an untyped one."""
    if not isinstance(record, Persistent) or not isinstance(record.pid, tuple):
        raise TypeError(f"no storage but {type(record).__name__}")
    kind, cls, key, _location, numel = record.pid[:5]
    if kind not in ("storage", b"storage") or not isinstance(cls, Global):
        raise TypeError(f"a persistent id of kind {kind!r}")
    dtype = BY_STORAGE_CLASS.get(cls.name)
    if dtype is None and cls.name != "UntypedStorage":
        raise ValueError(f"unknown storage class {cls.name}")
    view = record.pid[5] if len(record.pid) > 5 else None
    return StorageRef(str(key), dtype, _count(numel), _count(view[1]) if view else 0)


def _count(value: object) -> int:
    """A non-negative integer that fits 63 bits; bool is none."""
    if type(value) is not int or not 0 <= value <= MAX_DIMENSION:
        raise ValueError(f"{value!r} is not a count")
    return value


def _counts(value: object) -> tuple[int, ...]:
    items = sequence_items(value)
    if items is None or len(items) > MAX_RANK:
        raise TypeError(f"no shape but {outline(value)}")
    return tuple(_count(n) for n in items)


def _dtype(record: object) -> DType:
    if not isinstance(record, Global) or record.module != "torch":
        raise TypeError(f"no dtype but {outline(record)}")
    return parse_dtype(record.name)


def _view(storage: object, offset: object, size: object, stride: object, metadata: object, dtype: DType | None) -> TensorValue:
    ref = _storage(storage)
    dtype = dtype or ref.dtype
    if dtype is None:
        raise ValueError("an untyped storage and no dtype")
    shape, strides = _counts(size), _counts(stride)
    if len(shape) != len(strides):
        raise ValueError(f"{len(shape)} sizes and {len(strides)} strides")
    bits = dict(mapping_items(metadata) or []) if metadata is not None else {}
    return TensorValue(
        dtype, shape, strides, ref, _count(offset) + ref.view_offset, bits.get("conj") is True, bits.get("neg") is True
    )


def _argument(args: Sequence[object], position: int) -> object:
    return args[position] if len(args) > position else None


def _tensor_v2(args: Sequence[object]) -> TensorValue:
    return _view(args[0], args[1], args[2], args[3], _argument(args, 6), None)


def _tensor_v3(args: Sequence[object]) -> TensorValue:
    return _view(args[0], args[1], args[2], args[3], _argument(args, 7), _dtype(args[6]))


def _inner(args: Sequence[object]) -> Value:
    """A Parameter is the tensor in it."""
    value = read_value(args[0])
    if value is None:
        raise TypeError(f"no tensor but {type(args[0]).__name__}")
    return value


def _from_type(args: Sequence[object]) -> Value:
    """The outer call of tensor subclasses and of tensors with attributes: (function, type, arguments, state)."""
    function, _type, inner, state = args[:4]
    value = read_value(Object(function, tuple(sequence_items(inner) or ())))
    if value is None:
        raise TypeError(f"unknown rebuild function {function}")
    if isinstance(value, WrapperValue):
        members = attributes(Object(function, (), state=state))
        named = {str(k): v for k, v in members.items()} if members is not None else {"": state}
        return WrapperValue(value.class_name, value.dtype, value.shape, named)
    return value


def _wrapper(args: Sequence[object]) -> WrapperValue:
    cls, dtype, size = args[:3]
    name = cls.name if isinstance(cls, Global) else str(cls)
    return WrapperValue(name, _dtype(dtype), _counts(size), {})


def _meta(args: Sequence[object]) -> MetaValue:
    return MetaValue(_dtype(args[0]), _counts(args[1]))


def _describe(kind: str, dtype: str, shape: Sequence[int]) -> str:
    return f"{kind} {dtype} {list(shape)}"


def _sparse(args: Sequence[object]) -> CompositeValue:
    layout, data = args[:2]
    layout_name = layout.args[0] if isinstance(layout, Object) and layout.args else layout
    kind = str(layout_name).rpartition(".")[2]
    data = sequence_items(data) or []
    names = {
        "sparse_coo": ("indices", "values"),
        "sparse_csr": ("crow_indices", "col_indices", "values"),
        "sparse_bsr": ("crow_indices", "col_indices", "values"),
        "sparse_csc": ("ccol_indices", "row_indices", "values"),
        "sparse_bsc": ("ccol_indices", "row_indices", "values"),
    }[kind]
    parts = dict(zip(names, data, strict=False))
    values = read_value(parts["values"])
    dtype = values.dtype.name if isinstance(values, TensorValue) else "unknown"
    coalesced = " uncoalesced" if kind == "sparse_coo" and len(data) > 3 and data[3] is False else ""
    return CompositeValue(_describe(kind, dtype, _counts(data[len(names)])) + coalesced, parts)


def _quantized(args: Sequence[object]) -> CompositeValue:
    storage, offset, size, stride, parameters = args[:5]
    scheme, *numbers = sequence_items(parameters) or []
    scheme_name = scheme.name if isinstance(scheme, Global) else str(scheme)
    view = _view(storage, offset, size, stride, None, None)
    integers = {"qint8": "int8", "quint8": "uint8", "qint32": "int32", "quint4x2": "uint8", "quint2x4": "uint8"}
    plain = TensorValue(parse_dtype(integers[view.dtype.name]), view.shape, view.strides, view.storage, view.storage_offset)
    named = dict(zip(("scales", "zero_points"), numbers, strict=False))
    parts: dict[str, object] = {"int_repr": plain}
    parts |= {n: v for n, v in named.items() if isinstance(v, Object)}
    settings = ", ".join(f"{n.rstrip('s')} {v!r}" for n, v in named.items() if not isinstance(v, Object))
    kind = _describe(f"quantized {scheme_name}", view.dtype.name, view.shape)
    return CompositeValue(f"{kind} {settings}".rstrip(), parts)


def _nested(args: Sequence[object]) -> CompositeValue:
    parts = dict(zip(("buffer", "sizes", "strides", "storage_offsets"), args, strict=False))
    buffer = read_value(parts["buffer"])
    dtype = buffer.dtype.name if isinstance(buffer, TensorValue) else "unknown"
    return CompositeValue(f"nested {dtype}", {n: v for n, v in parts.items() if isinstance(v, Object)})


def _njt(args: Sequence[object]) -> CompositeValue:
    inner = {str(k): v for k, v in mapping_items(args[0]) or [] if isinstance(v, Object)}
    return CompositeValue("nested jagged", inner)


def _from_numpy(args: Sequence[object]) -> CompositeValue:
    return CompositeValue("device tensor kept as a numpy array", {})


_READERS = {
    "_rebuild_tensor": _tensor_v2,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _inner,
    "_rebuild_parameter_with_state": _inner,
    "_rebuild_device_tensor_from_cpu_tensor": _inner,
    "_rebuild_from_type": _from_type,
    "_rebuild_from_type_v2": _from_type,
    "_rebuild_wrapper_subclass": _wrapper,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_qtensor": _quantized,
    "_rebuild_nested_tensor": _nested,
    "_rebuild_njt": _njt,
    "_rebuild_device_tensor_from_numpy": _from_numpy,
    "_rebuild_xla_tensor": _from_numpy,
}


def read_tensor(record: object) -> TensorValue:
    """The dense tensor of a record that must be one. Raises MalformedError when it is not."""
    value = record if isinstance(record, TensorValue) else read_value(record)
    if not isinstance(value, TensorValue):
        raise MalformedError(f"no dense tensor but {type(record).__name__}")
    return value
