"""THE table of globals: which names have a meaning here, and which run code when other tools load the file.

Reading a pickle never depends on the judgement: a name is two strings, whatever it is. `unsafe` names make a finding, so
that a user knows not to load the file elsewhere; all that is neither known nor unsafe is an opaque object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpttools.dtypes import BY_NAME
from ckpttools.pickles.records import Global


def _encode(args: tuple[object, ...]) -> bytes | None:
    """`_codecs.encode(text, "latin1")`: how protocol 2 writes bytes."""
    text, *encoding = args
    if not isinstance(text, str) or (encoding and encoding[0] not in ("latin1", "latin-1")):
        return None
    return text.encode("latin1")


def _set(args: tuple[object, ...]) -> set[object] | None:
    return set(args[0]) if args and isinstance(args[0], (list, tuple, set, frozenset)) else None if args else set()


def _frozenset(args: tuple[object, ...]) -> frozenset[object] | None:
    made = _set(args)
    return None if made is None else frozenset(made)


def _complex(args: tuple[object, ...]) -> complex | None:
    real, imaginary = args if len(args) == 2 else (None, None)
    return complex(real, imaginary) if isinstance(real, (int, float)) and isinstance(imaginary, (int, float)) else None


def _bytearray(args: tuple[object, ...]) -> bytearray | None:
    if not args:
        return bytearray()
    if isinstance(args[0], (bytes, bytearray)):
        return bytearray(args[0])
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return bytearray(args[0].encode("latin1"))
    return None


_BUILTINS = ("builtins", "__builtin__")

PLAIN_CALLS: Mapping[tuple[str, str], Callable[[tuple[object, ...]], object | None]] = {
    ("_codecs", "encode"): _encode,
    **{(module, "set"): _set for module in _BUILTINS},
    **{(module, "frozenset"): _frozenset for module in _BUILTINS},
    **{(module, "complex"): _complex for module in _BUILTINS},
    **{(module, "bytearray"): _bytearray for module in _BUILTINS},
}
"""Calls whose result is a plain value: code of ours makes it (None when the arguments are not as expected)."""

_HARMLESS_BUILTINS = frozenset(
    ["set", "frozenset", "complex", "bytearray", "slice", "range", "xrange", "object", "list", "dict", "tuple", "int", "long", "float", "str", "unicode", "bytes", "bool", "type", "getattr", "Ellipsis", "NotImplemented", "NoneType", "Exception", "ValueError", "KeyError", "property", "staticmethod", "classmethod", "super", "zip", "enumerate", "map", "filter", "reversed", "print"]
) - {"map", "filter", "print", "type", "super"}
"""Types, and `getattr`, with which enums and nested classes are pickled; it is dangerous only on what is unsafe itself."""

_UNSAFE_MODULES = frozenset(
    ["os", "posix", "nt", "posixpath", "ntpath", "subprocess", "sys", "shutil", "runpy", "socket", "ssl", "importlib", "imp", "pkgutil", "pty", "ctypes", "_ctypes", "code", "codeop", "webbrowser", "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing", "threading", "_thread", "asyncio", "concurrent", "tempfile", "glob", "fileinput", "distutils", "setuptools", "pip", "ensurepip", "venv", "timeit", "pdb", "bdb", "trace", "cProfile", "profile", "doctest", "unittest", "commands", "popen2", "platform", "signal", "mmap", "fcntl", "resource", "syslog", "http", "urllib", "urllib2", "ftplib", "smtplib", "telnetlib", "xmlrpc", "requests", "aiohttp", "paramiko", "inspect", "gc", "builtins.open", "linecache", "zipimport", "site", "io", "_io", "nturl2path", "tkinter", "turtle", "antigravity", "torch.hub", "torch.utils.cpp_extension", "torch.jit", "torch._inductor", "torch._dynamo.repro", "torch.utils.model_zoo", "numpy.testing", "numpy.f2py", "numpy.distutils", "numpy.lib.npyio", "IPython", "idlelib", "lib2to3", "pydoc"]
)
_SAFE_IN_UNSAFE = frozenset(
    {
        ("io", "BytesIO"),
        ("io", "StringIO"),
        ("_io", "BytesIO"),
        ("_io", "StringIO"),
        ("signal", "Signals"),
        ("signal", "Handlers"),
        ("inspect", "Signature"),
        ("inspect", "Parameter"),
        ("inspect", "_ParameterKind"),
        ("inspect", "_empty"),
        ("threading", "Lock"),
        ("threading", "RLock"),
        ("_thread", "RLock"),
        ("_thread", "allocate_lock"),
        ("pathlib", "Path"),
    }
)
_UNSAFE_NAMES = frozenset(
    {
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch", "compile"),
        ("torch._C", "_jit_try_infer_type"),
        ("types", "FunctionType"),
        ("types", "CodeType"),
        ("types", "LambdaType"),
        ("types", "MethodType"),
        ("types", "ModuleType"),
        ("operator", "attrgetter"),
        ("operator", "methodcaller"),
        ("_operator", "attrgetter"),
        ("_operator", "methodcaller"),
        ("functools", "partial"),
        ("functools", "reduce"),
        ("_functools", "partial"),
        ("_functools", "reduce"),
        ("numpy", "load"),
        ("numpy", "loadtxt"),
        ("numpy", "fromfile"),
        ("pandas", "read_pickle"),
        ("copyreg", "__newobj__"),
        ("yaml", "load"),
        ("yaml", "unsafe_load"),
        ("logging.config", "listen"),
        ("pathlib", "Path.write_text"),
    }
) - {("copyreg", "__newobj__"), ("functools", "partial"), ("_functools", "partial")}
"""`functools.partial` alone calls nothing, and learning-rate schedules are pickled with it: what it wraps is judged."""

_KNOWN = {
    "torch._utils": None,
    "torch._tensor": None,
    "torch.tensor": None,
    "torch.storage": None,
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size", "device", "Tensor", *BY_NAME}),
    "torch.nn.parameter": None,
    "torch.distributed.tensor": None,
    "torch.distributed._tensor": None,
    "torch.distributed.device_mesh": None,
    "torch.distributed._mesh_layout": None,
    "torch.distributed._shard": None,
    "torch.distributed.remote_device": None,
    "torch.distributed.checkpoint": None,
    "collections": None,
    "argparse": None,
    "datetime": None,
    "pathlib": None,
    "pathlib._local": None,
    "numpy": frozenset({"dtype", "ndarray"}),
    "numpy.core.multiarray": None,
    "numpy._core.multiarray": None,
    "_codecs": None,
    "copyreg": None,
    "copy_reg": None,
}
"""Module (or package) -> its names that are understood; None for all of them."""


def judge(name: Global) -> str:
    """`known`, `opaque` or `unsafe`. Pure."""
    module, attribute = name.module, name.name
    if module in _BUILTINS:
        return "known" if attribute in _HARMLESS_BUILTINS else "unsafe"
    if (module, attribute) in _SAFE_IN_UNSAFE:
        return "known"
    packages = [module[:i] for i, c in enumerate(module + ".") if c == "."]
    if (
        (module, attribute) in _UNSAFE_NAMES
        or any(p in _UNSAFE_MODULES for p in packages)
        or ("." in attribute
        and "__" in attribute)
    ):
        return "unsafe"
    for package in packages:
        names = _KNOWN.get(package, frozenset())
        if names is None or attribute in names or (package == "torch" and attribute.endswith(("Storage", "_affine", "_strided"))):
            return "known"
    return "opaque"
