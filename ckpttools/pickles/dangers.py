"""The rules by which a name that the table does not know is called unsafe: loading it elsewhere runs code.

A list of bad names is never complete, so the standard library is judged the other way round: of its functions only
those in the table pass. In other packages, whole modules and tell-tale names are unsafe. `getattr` passes, because
enums and nested classes are pickled with it; what it reaches is judged as a longer name (see `names`).
"""

from __future__ import annotations

import sys

from ckpttools.pickles.python2 import modern

_STANDARD_LIBRARY = frozenset(sys.stdlib_module_names) | {
    *("distutils", "imp", "asynchat", "asyncore", "smtpd", "binhex", "formatter", "parser", "symbol", "macpath"),
    *("cgi", "cgitb", "telnetlib", "pipes", "crypt", "nntplib", "imghdr", "lib2to3", "uu", "xdrlib", "aifc", "chunk"),
    *("popen2", "md5", "sha", "user", "new", "compiler", "dl", "os2", "rexec", "Bastion", "sets", "string"),
    *("_pydatetime", "_aix_support", "compression", "annotationlib"),
}
"""Of every Python that this package runs on, and of Python 2, so that the judgement does not depend on the one here."""

_MODULE_LIST = """
os posix nt posixpath ntpath subprocess _posixsubprocess sys shutil socket _socket socketserver ssl select selectors
runpy importlib _frozen_importlib _frozen_importlib_external imp pkgutil zipimport modulefinder
ctypes _ctypes pty tty fcntl mmap resource termios syslog
code codeop types marshal pickle _pickle shelve dbm sqlite3
pdb bdb trace timeit cProfile profile pstats doctest unittest test pydoc inspect gc linecache cmd
multiprocessing _multiprocessing threading _thread asyncio concurrent queue sched signal atexit
tempfile glob fileinput filecmp io _io codecs pathlib fnmatch tarfile zipfile gzip bz2 lzma zlib
urllib http ftplib smtplib poplib imaplib telnetlib nntplib xmlrpc webbrowser wsgiref cgi cgitb mailbox
distutils ensurepip venv site sysconfig pip idlelib lib2to3 turtle turtledemo tkinter antigravity
ast dis symtable py_compile compileall platform faulthandler tracemalloc logging wave aifc sunau
setuptools pkg_resources IPython ipykernel cffi pexpect paramiko fabric execnet
cloudpickle dill joblib yaml jinja2 mako requests urllib3 httpx aiohttp fsspec smart_open
numpy.testing numpy.f2py numpy.distutils numpy.ctypeslib numpy.lib pandas.io pandas.core.computation
torch.hub torch.jit torch.package torch.fx torch.serialization torch.compiler torch.ops torch.classes torch.library
torch._dynamo torch._inductor torch._ops torch._classes torch._jit_internal torch.testing
torch.onnx torch.export torch.multiprocessing torch.profiler torch.autograd.profiler
torch.distributed.run torch.distributed.launch torch.distributed.elastic torch.distributed.rpc torch.distributed.launcher
torch.utils.bottleneck torch.utils.collect_env torch.utils.cpp_extension torch.utils.model_zoo torch.utils.hipify
torch.utils.jit torch.utils._config_module torch.utils.benchmark torch.utils.data.datapipes torch.utils.viz
torch.utils.tensorboard torch.cuda._memory_viz triton
sympy.parsing sympy.utilities sympy.core.sympify keras.models keras.src.saving tensorflow.io tensorflow.python
"""
_MODULES = frozenset(_MODULE_LIST.split())
"""Modules and packages; what the table knows in them passes."""

_REACHED = frozenset(
    {
        *("os", "sys", "posix", "nt", "subprocess", "builtins", "shutil", "socket", "importlib", "runpy", "pickle"),
        *("marshal", "ctypes", "pty", "commands", "popen2"),
    }
)
"""Modules that other modules hold as attributes; nothing else has such a name."""

_NAME_LIST = """
eval exec execfile compile system popen Popen popen2 popen3 popen4 spawn spawnl spawnv spawnve fork forkpty execl execv
execve run call check_call check_output getoutput getstatusoutput run_path run_module runctx runcode runsource runstring
import_module load_module find_class resolve_name locate load_library load_inline load_from_bytes _load_from_bytes
load loads open urlopen urlretrieve download unpickle read_pickle load_model from_pretrained from_file from_url
fromfile tofile memmap save savez savetxt dump dumps write_text write_bytes unlink rmtree remove rename chmod
attrgetter methodcaller breakpoint apply input
"""
_NAMES = frozenset(_NAME_LIST.split())
"""Functions that run code, start programs, or touch files, whatever the module; classes and data have other names."""


def is_dangerous(module: str, name: str) -> bool:
    """Whether loading a pickle that refers to `module.name` may run code, when the table does not know it. Pure."""
    module, name = modern(module, name)
    rest, parts = module.partition(".")[2], name.split(".")
    if any(_is_dunder(part) for part in (*rest.split("."), *parts)):
        return True
    if any(part in _REACHED for part in parts) or parts[-1] in _NAMES:
        return True
    packages = {module[:end] for end in range(len(module) + 1) if module[end : end + 1] in (".", "")}
    if packages & _MODULES:
        return True
    return module.partition(".")[0] in _STANDARD_LIBRARY and not _is_class(parts[-1])


def _is_dunder(part: str) -> bool:
    """`__globals__` and the like lead from any object to all code; TorchScript's `___torch_mangle_0` is no such name."""
    return part.startswith("__") and part.endswith("__")


def _is_class(name: str) -> bool:
    """By the naming that the standard library keeps; the classes with other names are in the table, or builtins."""
    return name.lstrip("_")[:1].isupper()
