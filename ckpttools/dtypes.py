"""THE table of dtypes: every reader, writer, document and test derives what it knows of dtypes from here.

Names are torch's without the prefix. `float4_e2m1fn_x2` counts packed pairs, as torch does: one element is one
byte. The sub-byte rows that torch has no tensor for (`float6_*`, an unpaired `float4_e2m1fn`) can be read and
hashed whole, and never be cut.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    """torch's spelling without `torch.`"""
    bits: int
    """Width of one element in bits."""
    kind: str
    """`float`, `complex`, `int`, `uint`, `bool` or `quantized`."""
    safetensors: str = ""
    """The code in a safetensors header; empty where the format has none."""
    storage_class: str = ""
    """The class torch pickles for a typed storage of it, e.g. `FloatStorage`; empty where only UntypedStorage serves."""

    @property
    def is_floating(self) -> bool:
        """Whether `--dtype` casts it."""
        return self.kind == "float"

    @property
    def item_bytes(self) -> int:
        """Width of one element in bytes. Raises ValueError for a sub-byte dtype, which has none."""
        if self.bits % 8:
            raise ValueError(f"{self.name} elements are {self.bits} bits wide")
        return self.bits // 8

    @property
    def is_sub_byte(self) -> bool:
        """Whether several elements share a byte, so that a tensor of it cannot be cut anywhere."""
        return self.bits % 8 != 0

    @property
    def component_bytes(self) -> int:
        """Width of what a big-endian file swaps: the component of a complex number, else the element."""
        return max(1, self.bits // 8 // (2 if self.kind == "complex" else 1))

    def length_bytes(self, volume: int) -> int:
        """Bytes of `volume` elements, rounded up to whole bytes."""
        return (volume * self.bits + 7) // 8

    def __str__(self) -> str:
        return self.name


TABLE: tuple[DType, ...] = (
    DType("float64", 64, "float", "F64", "DoubleStorage"),
    DType("float32", 32, "float", "F32", "FloatStorage"),
    DType("float16", 16, "float", "F16", "HalfStorage"),
    DType("bfloat16", 16, "float", "BF16", "BFloat16Storage"),
    DType("float8_e4m3fn", 8, "float", "F8_E4M3"),
    DType("float8_e5m2", 8, "float", "F8_E5M2"),
    DType("float8_e4m3fnuz", 8, "float", "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 8, "float", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 8, "float", "F8_E8M0"),
    DType("float4_e2m1fn_x2", 8, "float", "F4"),
    DType("float4_e2m1fn", 4, "float"),
    DType("float6_e2m3fn", 6, "float", "F6_E2M3"),
    DType("float6_e3m2fn", 6, "float", "F6_E3M2"),
    DType("complex32", 32, "complex"),
    DType("complex64", 64, "complex", "C64", "ComplexFloatStorage"),
    DType("complex128", 128, "complex", "", "ComplexDoubleStorage"),
    DType("int64", 64, "int", "I64", "LongStorage"),
    DType("int32", 32, "int", "I32", "IntStorage"),
    DType("int16", 16, "int", "I16", "ShortStorage"),
    DType("int8", 8, "int", "I8", "CharStorage"),
    DType("uint64", 64, "uint", "U64"),
    DType("uint32", 32, "uint", "U32"),
    DType("uint16", 16, "uint", "U16"),
    DType("uint8", 8, "uint", "U8", "ByteStorage"),
    DType("bool", 8, "bool", "BOOL", "BoolStorage"),
    DType("qint8", 8, "quantized", "", "QInt8Storage"),
    DType("quint8", 8, "quantized", "", "QUInt8Storage"),
    DType("qint32", 32, "quantized", "", "QInt32Storage"),
    DType("quint4x2", 8, "quantized", "", "QUInt4x2Storage"),
    DType("quint2x4", 8, "quantized", "", "QUInt2x4Storage"),
    DType("bits8", 8, "uint"),
    DType("bits16", 16, "uint"),
    DType("bits1x8", 8, "uint"),
    DType("bits2x4", 8, "uint"),
    DType("bits4x2", 8, "uint"),
    *(DType(f"{sign}int{bits}", 8, "uint" if sign else "int") for sign in ("u", "") for bits in range(1, 8)),
)

BY_NAME: dict[str, DType] = {d.name: d for d in TABLE}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in TABLE if d.safetensors}
BY_STORAGE_CLASS: dict[str, DType] = {d.storage_class: d for d in TABLE if d.storage_class}

_ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "chalf": "complex32",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}


def parse_dtype(text: str) -> DType:
    """The dtype that `text` names, with or without `torch.`, or by an alias of torch (`half`, `long`). Pure.

    Raises: ValueError: when the table has no such dtype.
    """
    name = text.removeprefix("torch.")
    found = BY_NAME.get(_ALIASES.get(name, name))
    if found is None:
        raise ValueError(f"unknown dtype: `{text}`")
    return found
