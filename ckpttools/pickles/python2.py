"""Names as Python 2 had them, which protocols 0 to 2 still write, and what Python 3 calls them. A few rows of CPython's
`_compat_pickle`: those that a checkpoint or an attack may refer to.
"""

from __future__ import annotations

_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "exceptions": "builtins",
    "commands": "subprocess",
    "cPickle": "pickle",
    "thread": "_thread",
    "Queue": "queue",
    "StringIO": "io",
    "cStringIO": "io",
    "httplib": "http.client",
    "urllib2": "urllib.request",
    "xmlrpclib": "xmlrpc.client",
    "anydbm": "dbm",
}
_NAMES = {
    ("builtins", "xrange"): "range",
    ("builtins", "unicode"): "str",
    ("builtins", "long"): "int",
    ("builtins", "unichr"): "chr",
}


def modern(module: str, name: str) -> tuple[str, str]:
    """Module and name as Python 3 has them. Pure."""
    module = _MODULES.get(module, module)
    return module, _NAMES.get((module, name), name)
