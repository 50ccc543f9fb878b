"""Containers of safetensors from raw bytes: any dtype that the format has, without a library that knows it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckpttools.dtypes import DType


def container(tensors: Mapping[str, tuple[DType, tuple[int, ...], bytes]]) -> bytes:
    """The bytes of a file that holds tensors, in their order."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        sizes = [*shape[:-1], shape[-1] * 2] if dtype.name == "float4_e2m1fn_x2" else list(shape)  # it counts single elements
        header[name] = {"dtype": dtype.safetensors, "shape": sizes, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
