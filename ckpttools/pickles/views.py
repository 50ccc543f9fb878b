from ckpttools.pickles.records import *


def mapping_items(v):
    if isinstance(v, dict):
        return list(v.items())
    if (
        isinstance(v, Object)
        and isinstance(v.callable, Global)
        and v.callable.module == "collections"
        and v.callable.name in ("OrderedDict", "defaultdict", "Counter")
    ):
        return list(v.pairs)
    return None


def sequence_items(v):
    if isinstance(v, (list, tuple)):
        return list(v)
    if isinstance(v, (set, frozenset)):
        return sorted(v, key=repr)
    if isinstance(v, Object) and isinstance(v.callable, Global) and v.callable.name == "Size":
        return list(v.args[0]) if v.args else []
    return None


def attributes(v):
    if not isinstance(v, Object):
        return None
    s = v.state
    if isinstance(s, dict):
        return s
    if isinstance(s, tuple) and len(s) == 2 and all(x is None or isinstance(x, dict) for x in s):
        return {**(s[0] or {}), **(s[1] or {})}
    return None


def kind_of(v):
    return type_name(v)


def plain(v):
    return v if isinstance(v, (int, str, float, bool, type(None))) else type_name(v)
