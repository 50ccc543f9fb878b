"""Values as JSON can hold them, for the documents that commands print: short, bounded, and for reading only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpttools.pickles.numpy_records import read_array, read_scalar, values_of
from ckpttools.pickles.records import Global, Object, Persistent
from ckpttools.pickles.views import attributes, class_of, kind_of, mapping_items, path_key, sequence_items

_MAX_NODES = 10_000
_MAX_DEPTH = 32
_MAX_BYTES = 32
_MAX_ELEMENTS = 64
_ELLIPSIS = "..."


def plain(value: object, *, max_nodes: int = _MAX_NODES) -> object:
    """A rendition of `value` in None, bool, int, float, str, list and dict with text keys. Pure.

    What would not fit becomes `...`: what lies deeper than 32 levels or beyond `max_nodes` parts, and the end of long
    byte strings. Objects show their class and what was put into them.
    """
    return _Rendition(max_nodes).of(value, 0)


@dataclass
class _Rendition:
    nodes_left: int

    def of(self, value: object, depth: int) -> object:
        self.nodes_left -= 1
        if depth > _MAX_DEPTH or self.nodes_left < 0:
            return _ELLIPSIS
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)  # JSON has no NaN
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": len(value), "hex": value[:_MAX_BYTES].hex() + (_ELLIPSIS if len(value) > _MAX_BYTES else "")}
        if isinstance(value, (complex, Global)):
            return str(value)
        if isinstance(value, Persistent):
            return {"persistent_id": self.of(value.pid, depth + 1)}
        return self._known_object(value, depth) if isinstance(value, Object) else self._container(value, depth)

    def _container(self, value: object, depth: int) -> object:
        pairs = mapping_items(value)
        if pairs is not None:
            return self._mapping(pairs, depth)
        items = sequence_items(value)
        return type(value).__name__ if items is None else self._list(items, depth)

    def _list(self, items: list[object], depth: int) -> list[object]:
        shown: list[object] = []
        for item in items:
            if self.nodes_left <= 0:
                return [*shown, _ELLIPSIS]
            shown.append(self.of(item, depth + 1))
        return shown

    def _mapping(self, pairs: list[tuple[object, object]], depth: int) -> object:
        """With text keys; as a list of pairs where two keys have the same text (0 and "0")."""
        texts = [str(path_key(key)) for key, _ in pairs]
        if len(set(texts)) != len(texts):
            return self._list([(key, child) for key, child in pairs], depth)
        shown: dict[str, object] = {}
        for text, (_key, child) in zip(texts, pairs, strict=True):
            if self.nodes_left <= 0:
                return {**shown, _ELLIPSIS: _ELLIPSIS}
            shown[text] = self.of(child, depth + 1)
        return shown

    def _known_object(self, value: Object, depth: int) -> object:
        cls = class_of(value)
        name = "" if cls is None else cls.name
        scalar = read_scalar(value)
        if scalar is not None:
            return self.of(scalar, depth)
        if name in ("OrderedDict", "defaultdict", "Counter", "Size", "deque"):
            return self._container(value, depth)
        if name.endswith("Path") and all(isinstance(part, str) for part in value.args):
            return _joined([str(part) for part in value.args])
        array = read_array(value)
        if array is not None:
            shown: dict[str, object] = {"class": "numpy.ndarray", "dtype": array.dtype.name, "shape": list(array.shape)}
            if math.prod(array.shape) <= _MAX_ELEMENTS and not array.is_fortran:
                shown["values"] = self._list(list(values_of(array.dtype, array.data)), depth)
            return shown
        return self._object(value, depth)

    def _object(self, value: Object, depth: int) -> dict[str, object]:
        shown: dict[str, object] = {"class": kind_of(value)}
        if value.args:
            shown["arguments"] = self._list(list(value.args), depth)
        if value.kwargs:
            shown["keywords"] = self._mapping(list(value.kwargs.items()), depth)
        members = attributes(value)
        if members is not None:
            shown["attributes"] = self._mapping([(k, v) for k, v in members.items()], depth)
        if value.items:
            shown["items"] = self._list(list(value.items), depth)
        if value.pairs:
            shown["pairs"] = self._mapping(list(value.pairs), depth)
        return shown


def _joined(parts: list[str]) -> str:
    """A path from its parts, the first of which may be the root."""
    return parts[0] + "/".join(parts[1:]) if parts and parts[0].endswith(("/", "\\")) else "/".join(parts)
