"""Placeholder."""

import struct

from ckpttools.pickles.records import *
from ckpttools.pickles.records import NO_STATE


def write_pickle(value, *, protocol=2):
    out = bytearray(b"\x80\x02")
    memo = {}
    keep = []

    def put(v):
        memo[id(v)] = len(memo)
        keep.append(v)
        out.extend(b"r" + struct.pack("<I", memo[id(v)]))

    def s(v):
        if isinstance(v, (list, dict, Object, Persistent, tuple)) and id(v) in memo and v != ():
            out.extend(b"j" + struct.pack("<I", memo[id(v)]))
            return
        if v is None:
            out.extend(b"N")
        elif v is True:
            out.extend(b"\x88")
        elif v is False:
            out.extend(b"\x89")
        elif isinstance(v, int):
            b = v.to_bytes((v.bit_length() // 8) + 1, "little", signed=True)
            if -(2**31) <= v < 2**31:
                out.extend(b"J" + struct.pack("<i", v))
            else:
                out.extend(b"\x8a" + bytes([len(b)]) + b)
        elif isinstance(v, float):
            out.extend(b"G" + struct.pack(">d", v))
        elif isinstance(v, str):
            b = v.encode("utf-8", "surrogatepass")
            out.extend(b"X" + struct.pack("<I", len(b)) + b)
        elif isinstance(v, Global):
            out.extend(f"c{v.module}\n{v.name}\n".encode())
        elif isinstance(v, bytes):
            s(Global("_codecs", "encode"))
            s((v.decode("latin1"), "latin1"))
            out.extend(b"R")
        elif isinstance(v, tuple):
            out.extend(b"(")
            [s(x) for x in v]
            out.extend(b"t")
        elif isinstance(v, list):
            out.extend(b"]")
            put(v)
            out.extend(b"(")
            [s(x) for x in v]
            out.extend(b"e")
        elif isinstance(v, dict):
            out.extend(b"}")
            put(v)
            out.extend(b"(")
            [s(x) for kv in v.items() for x in kv]
            out.extend(b"u")
        elif isinstance(v, Persistent):
            s(v.pid)
            out.extend(b"Q")
        elif isinstance(v, Object):
            s(v.callable)
            s(v.args)
            out.extend(b"R" if v.how == "reduce" else b"\x81")
            put(v)
            if v.items:
                out.extend(b"(")
                [s(x) for x in v.items]
                out.extend(b"e")
            if v.pairs:
                out.extend(b"(")
                [s(x) for kv in v.pairs for x in kv]
                out.extend(b"u")
            if v.state is not NO_STATE:
                s(v.state)
                out.extend(b"b")
        else:
            raise TypeError(type(v))

    s(value)
    out.extend(b".")
    return bytes(out)
