"""ckpttools: inspect, validate, hash and convert model checkpoints, offline and without the training stack.

The public API, loaded when used: `open` gives the `Checkpoint` that a location means, and there is one function per
command that reads or converts a checkpoint. Everything else may change. `docs/reference/python.md` has an example of each.

    import ckpttools

    checkpoint = ckpttools.open("checkpoint/step-1000")
    for tensor in checkpoint.tensors:
        print(tensor.name, tensor.spec.dtype, tensor.spec.shape)
    assert ckpttools.validate("checkpoint/step-1000").verdict == "ok"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckpttools.errors import CkpttoolsError, FindingsError
    from ckpttools.findings import Finding
    from ckpttools.layouts import open_checkpoint as open
    from ckpttools.model import Checkpoint, Mesh, TensorEntry
    from ckpttools.operations.conversion import Manner
    from ckpttools.operations.convert import consolidate
    from ckpttools.operations.diff import diff
    from ckpttools.operations.measure import Tolerance
    from ckpttools.operations.naming import Naming
    from ckpttools.operations.place import Placing
    from ckpttools.operations.reshard import reshard
    from ckpttools.operations.sealing import hash_tensors, seal
    from ckpttools.operations.select import Choice, Renaming
    from ckpttools.operations.targets import Details
    from ckpttools.operations.validate import validate

_HOMES = {
    "open": "ckpttools.layouts",
    "validate": "ckpttools.operations.validate",
    "hash_tensors": "ckpttools.operations.sealing",
    "seal": "ckpttools.operations.sealing",
    "diff": "ckpttools.operations.diff",
    "consolidate": "ckpttools.operations.convert",
    "reshard": "ckpttools.operations.reshard",
    "Checkpoint": "ckpttools.model",
    "TensorEntry": "ckpttools.model",
    "Mesh": "ckpttools.model",
    "Choice": "ckpttools.operations.select",
    "Naming": "ckpttools.operations.naming",
    "Renaming": "ckpttools.operations.select",
    "Tolerance": "ckpttools.operations.measure",
    "Placing": "ckpttools.operations.place",
    "Details": "ckpttools.operations.targets",
    "Manner": "ckpttools.operations.conversion",
    "Finding": "ckpttools.findings",
    "CkpttoolsError": "ckpttools.errors",
    "FindingsError": "ckpttools.errors",
}

__all__ = [
    "Checkpoint",
    "Choice",
    "CkpttoolsError",
    "Details",
    "Finding",
    "FindingsError",
    "Manner",
    "Mesh",
    "Naming",
    "Placing",
    "Renaming",
    "TensorEntry",
    "Tolerance",
    "consolidate",
    "diff",
    "hash_tensors",
    "open",
    "reshard",
    "seal",
    "validate",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), "open_checkpoint" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
