"""The seal: the record that this tool writes beside a snapshot; every file, every tensor, every digest, and its own.

A seal is a JSON document without a clock in it: sealing the same snapshot twice gives the same bytes. It is untrusted
input when read: `parse_seal` checks its own digest and every field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckpttools.digest import ALGORITHMS, DIGEST_HEX_LENGTH, TensorDigest, fingerprint, new_hasher
from ckpttools.model import Box

SCHEMA = "ckpttools/seal/1"
HASH_SCHEMA = "ckpttools/hash/1"
_RUN_CHARACTERS = 1 << 20
_PIECE, _BOX = {"file", "offset", "length", "box", "digest"}, {"offsets", "sizes"}
"""Members of a piece and of its box."""


class SealError(Exception):
    """A document that is not a seal or a hash list. `is_broken`: it is one, and was changed after it was written."""

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


@dataclass(frozen=True, slots=True)
class SealedPiece:
    """A stored piece and its digest."""

    file: str
    offset: int
    length: int
    box: Box
    digest: str


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of the snapshot. `digest` is of the whole file where it holds no tensors, else empty."""

    path: str
    length_bytes: int
    digest: str = ""


@dataclass(frozen=True)
class Seal:
    """What a seal records, or a hash list (which has neither files nor pieces)."""

    algorithm: str
    tensors: tuple[TensorDigest, ...]
    pieces: Mapping[str, tuple[SealedPiece, ...]] = field(default_factory=dict)
    """By tensor name."""
    files: tuple[SealedFile, ...] = ()
    layout: str = ""
    step: int | None = None
    aliases: tuple[tuple[str, ...], ...] = ()
    """Groups of names that were one tensor in the source; where a container keeps one of them, the others are here."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """For a converted snapshot: where it came from and what was changed when asked to."""

    @property
    def fingerprint(self) -> str:
        """Of the tensors it lists."""
        return fingerprint(self.tensors, self.algorithm)


def render_seal(seal: Seal) -> Iterator[bytes]:
    """The document of a seal, a stretch after the other: JSON with a line per row, its own digest last. Pure.

    Equal seals give equal bytes. Whatever is in a seal of a million pieces is never there as a whole.
    """
    whole = _document(seal) | {"seal_digest": _own_digest(_document(seal))}
    return _stretches(chain(_texts(whole, is_compact=False), ["\n"]))


def _document(seal: Seal) -> dict[str, object]:
    """The members of a seal; long lists are iterators."""
    return {
        "schema": SCHEMA,
        "layout": seal.layout,
        "step": seal.step,
        "algorithm": seal.algorithm,
        "fingerprint": seal.fingerprint,
        "files": ({"path": f.path, "bytes": f.length_bytes} | ({"digest": f.digest} if f.digest else {}) for f in seal.files),
        "tensors": (
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": t.shape,
                "digest": t.digest,
                "pieces": map(_row, seal.pieces.get(t.name, ())),
            }
            for t in seal.tensors
        ),
        "aliases": seal.aliases,
        "origin": dict(seal.origin),
    }


def _row(piece: SealedPiece) -> dict[str, object]:
    box = {"offsets": piece.box.offsets, "sizes": piece.box.sizes}
    return {"file": piece.file, "offset": piece.offset, "length": piece.length, "box": box, "digest": piece.digest}


_READABLE = json.JSONEncoder()
_COMPACT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_row)


def _texts(value: object, *, is_compact: bool, indent: str = "\n") -> Iterator[str]:
    """JSON of a value in which iterators stand for lists: compact with sorted keys, or with a line for each row of these."""
    if isinstance(value, Iterator):
        yield "["
        for number, row in enumerate(value):
            yield ("," if number else "") + ("" if is_compact else indent)
            yield from _texts(row, is_compact=is_compact, indent=indent + " ")
        yield "]"
    elif isinstance(value, dict) and any(isinstance(member, Iterator) for member in value.values()):
        for number, key in enumerate(sorted(value) if is_compact else value):
            yield (("," if is_compact else ", ") if number else "{") + json.dumps(key) + (":" if is_compact else ": ")
            yield from _texts(value[key], is_compact=is_compact, indent=indent)
        yield "}"
    else:
        yield (_COMPACT if is_compact else _READABLE).encode(value)


def _stretches(texts: Iterable[str]) -> Iterator[bytes]:
    """Texts in runs that are worth a write."""
    run: list[str] = []
    characters = 0
    for text in texts:
        run.append(text)
        characters += len(text)
        if characters >= _RUN_CHARACTERS:
            yield "".join(run).encode()
            run, characters = [], 0
    yield "".join(run).encode()


def _own_digest(document: Mapping[str, object]) -> str:
    """BLAKE3 of the document without its own digest, as compact JSON with sorted keys."""
    rest = {k: iter(v) if isinstance(v, list) else v for k, v in document.items() if k != "seal_digest"}
    hasher = new_hasher()
    for stretch in _stretches(_texts(rest, is_compact=True)):
        hasher.update(stretch)
    return hasher.hexdigest()


def parse_seal(data: bytes) -> Seal:
    """The seal or hash list in a document: JSON of `seal`, JSON of `hash --json`, or the lines of `hash`. Pure.

    Raises: SealError: when it is none of them, or a seal without its own digest.
    """
    if not data.lstrip().startswith(b"{"):
        return _parse_lines(data)
    try:
        document = json.loads(data, object_hook=_row_read)
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema not in (SCHEMA, HASH_SCHEMA):
            raise SealError(f"schema {schema!r} is neither `{SCHEMA}` nor `{HASH_SCHEMA}`")
        if schema == SCHEMA and document.get("seal_digest") != _own_digest(document):
            raise SealError("the seal does not have its own digest", is_broken=True)
        return _read_document(document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise SealError(f"not a seal or a hash list: {e}") from e


def _read_document(document: Mapping[str, object]) -> Seal:
    tensors = [_tensor(t["name"], t["dtype"], t["shape"], t["digest"]) for t in _rows(document["tensors"])]
    pieces = {str(t["name"]): tuple(map(_piece, _items(t["pieces"]))) for t in _rows(document["tensors"]) if "pieces" in t}
    files = [SealedFile(str(f["path"]), _count(f["bytes"]), str(f.get("digest", ""))) for f in _rows(document.get("files", []))]
    aliases = document.get("aliases", [])
    if not isinstance(aliases, list):
        raise TypeError("`aliases` is no list")
    origin = document.get("origin", {})
    step = document.get("step")
    return Seal(
        _algorithm(document.get("algorithm", "blake3")),
        tuple(tensors),
        pieces,
        tuple(files),
        str(document.get("layout", "")),
        step if isinstance(step, int) else None,
        tuple(tuple(map(str, group)) for group in aliases),
        origin if isinstance(origin, dict) else {},
    )


def _algorithm(name: object) -> str:
    if name not in ALGORITHMS:
        raise ValueError(f"`{name!s:.80}` is not one of {', '.join(ALGORITHMS)}")
    return str(name)


def _row_read(row: dict[str, object]) -> object:
    """A row of a piece as the piece at once, a quarter of its memory, where that is all it says; other rows as they are."""
    box = row.get("box")
    if row.keys() != _PIECE or not isinstance(box, dict) or box.keys() != _BOX:
        return row
    try:
        piece = _piece(row)
    except (TypeError, ValueError):
        return row
    return piece if (piece.file, piece.digest) == (row["file"], row["digest"]) else row


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("rows are missing")
    return value


def _rows(value: object) -> list[dict[str, object]]:
    rows = [row for row in _items(value) if isinstance(row, dict)]
    if len(rows) != len(_items(value)):
        raise TypeError("rows are missing")
    return rows


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{value!r} is no shape")
    return tuple(_count(n) for n in value)


def _tensor(name: object, dtype: object, shape: object, digest: object) -> TensorDigest:
    if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(digest, str)):
        raise TypeError("a tensor's name, dtype or digest is no text")
    if len(digest) != DIGEST_HEX_LENGTH or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"`{digest[:80]}` is not {DIGEST_HEX_LENGTH} hexadecimal digits")
    return TensorDigest(name, dtype, _counts(shape), digest)


def _piece(row: object) -> SealedPiece:
    if isinstance(row, SealedPiece):
        return row
    if not isinstance(row, dict):
        raise TypeError("rows are missing")
    box = row["box"]
    if not isinstance(box, dict):
        raise TypeError("a piece without a box")
    where = Box(_counts(box["offsets"]), _counts(box["sizes"]))
    return SealedPiece(str(row["file"]), _count(row["offset"]), _count(row["length"]), where, str(row["digest"]))


def _parse_lines(data: bytes) -> Seal:
    """`digest  dtype  [shape]  name` per line; `# algorithm: ...` and other comments; the fingerprint's line is skipped."""
    algorithm, tensors = "blake3", []
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as e:
        raise SealError(f"not text: {e}") from e
    for number, raw in enumerate(text.split("\n"), 1):
        if raw.startswith("# algorithm:"):
            algorithm = raw.partition(":")[2].strip()
            if algorithm not in ALGORITHMS:
                raise SealError(f"line {number}: `{algorithm[:80]}` is not one of {', '.join(ALGORITHMS)}")
        if not raw.strip() or raw.startswith("#"):
            continue
        parts = raw.split("  ", 3)
        if len(parts) == 2 and parts[1] == "fingerprint":
            continue
        if len(parts) != 4 or not (parts[2].startswith("[") and parts[2].endswith("]")):
            raise SealError(f"line {number} is not `digest  dtype  [shape]  name`")
        try:
            shape = [int(n) for n in parts[2][1:-1].split(",") if n]
            is_escaped = parts[0].startswith("\\")
            name = _unescaped(parts[3]) if is_escaped else parts[3]
            tensors.append(_tensor(name, parts[1], shape, parts[0][is_escaped:]))
        except (ValueError, TypeError) as e:
            raise SealError(f"line {number}: {e}") from e
    if not tensors:
        raise SealError("no line `digest  dtype  [shape]  name`")
    return Seal(algorithm, tuple(tensors))


def _unescaped(name: str) -> str:
    """A name as `TensorDigest.listed_line` escaped it."""
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "r": "\r"}.get(m.group(1), m.group(1)), name)
