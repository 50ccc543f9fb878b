"""Holds the house of the design: who may import whom, which library lives behind which door, names, and sizes.

An AST walk over the package. Every rule is a function from a module to its violations, `file:line: what`; `RULES` lists
them, and `BAD` and `GOOD` hold each of them to a snippet that it must refuse and one that it must let pass. The tables
below are the architecture: a new module of a known block needs no line here, a new block does.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.fixture_cases import FIXTURES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ckpttools"

BLOCKS: tuple[tuple[str, ...], ...] = (
    ("errors", "dtypes", "units", "findings", "model", "geometry", "toml"),
    ("placement", "names"),
    ("storage",),
    ("pickles",),
    ("containers",),
    ("layouts.base", "layouts.checks", "layouts.families", "layouts.inner"),
    ("layouts.*",),
    ("layouts",),
    ("gather", "digest", "cast", "rounding", "average", "seals", "plan", "checksums"),
    ("execute",),
    ("operations", "snapshots"),
    ("cli",),
    ("__init__", "__main__"),
)
"""Top to bottom: a module may import what stands in the blocks above it and in its own, never what stands below.

`layouts.*` is each layout by itself: one never imports another. `layouts` is the registry, which imports them all.
"""

FOUNDATION = {
    "errors": set(),
    "dtypes": set(),
    "units": set(),
    "findings": set(),
    "toml": {"errors"},
    "model": {"dtypes", "findings"},
    "geometry": {"model"},
}
"""In the first block only these imports exist; `errors` may name `findings` for the type checker."""

DOORS = {
    "click": {"cli"},
    "tqdm": {"cli"},
    "fsspec": {"storage"},
    "gcsfs": {"storage"},
    "s3fs": {"storage"},
    "blake3": {"digest"},
    "torch": {"cast"},
    "os": {"storage", "cli"},
    "pathlib": {"storage"},
    "shutil": {"storage"},
    "tempfile": {"storage"},
    "glob": {"storage"},
}
"""Libraries that live behind one door each."""

OS_IN_CLI = {"cpu_count", "sched_getaffinity", "environ"}
"""What of `os` a command may ask: how many threads there are, and the environment; nothing about files."""
OS_IN_RENDER = OS_IN_CLI | {"dup2", "open", "devnull", "O_WRONLY"}
"""`cli.render` may also put the null device in the place of a standard output that nobody reads any more."""

LAZY = {"numpy", "torch", "fsspec", "gcsfs", "s3fs", "zstandard", "blake3"}
"""Never imported where a module begins: `ckpttools --help` and `inspect` must not pay for them."""

CLOCK = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
"""Reading the time: only in `cli`, so that everything else is a function of its arguments."""

BANNED_WORDS = {"utils", "util", "helper", "helpers", "manager", "handler", "common", "core", "factory", "misc"}
BANNED_PREFIXES = ("get_", "do_", "process_", "handle_")
NAMES_OF_OTHERS = {"get_command"}
"""Methods that override those of a library's class: click's way to find a command."""
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
BROAD_EXCEPT = {"cli"}
"""The one place that turns an unexpected exception into a message."""


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    target: str
    """`errors`, `layouts.base`, ... for our own; the top-level package for others."""
    line: int
    is_ours: bool
    is_at_top: bool
    is_for_types: bool


@dataclass(frozen=True)
class Module:
    """A module of the package, parsed."""

    name: str
    """`cli`, `layouts.dcp.manifest`; `__init__` for the package itself."""
    file: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.file)

    @property
    def first(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self))

    def says(self, line: int, what: str) -> str:
        return f"{self.file}:{line}: {what}"


def load(path: Path) -> Module:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    return Module(name, str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


MODULES = [load(path) for path in sorted(PACKAGE.rglob("*.py"))]
NAMES = {module.name for module in MODULES}


def _imports(module: Module) -> Iterator[Import]:
    for node, is_at_top, is_for_types in _import_nodes(module.tree, True, False):
        targets: list[tuple[str, bool]] = []
        if isinstance(node, ast.Import):
            targets = [_resolve(alias.name, None) for alias in node.names]
        elif node.level == 0:
            targets = [_resolve(node.module or "", alias.name) for alias in node.names]
        for target, is_ours in dict.fromkeys(targets):
            yield Import(target, node.lineno, is_ours, is_at_top, is_for_types)


def _import_nodes(node: ast.AST, is_at_top: bool, is_for_types: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, is_at_top, is_for_types
        in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _import_nodes(child, is_at_top and not in_function, is_for_types or for_types)


def _resolve(base: str, name: str | None) -> tuple[str, bool]:
    """Which module `from base import name` (or `import base`) imports, and whether it is one of ours."""
    if base.partition(".")[0] != "ckpttools":
        return base.partition(".")[0], False
    inside = base.partition(".")[2]
    deeper = f"{inside}.{name}".lstrip(".")
    if name is not None and deeper in NAMES:
        return deeper, True
    return inside or "__init__", True


def layout_of(name: str) -> str:
    """`layouts.dcp` of `layouts.dcp.manifest`."""
    return ".".join(name.split(".")[:2])


def block_of(name: str) -> int | None:
    """Where in `BLOCKS` a module stands."""
    for candidate in (name, layout_of(name)):
        for i, block in enumerate(BLOCKS):
            if candidate in block:
                return i
    if name.startswith("layouts."):
        return next(i for i, block in enumerate(BLOCKS) if "layouts.*" in block)
    first = name.partition(".")[0]
    return next((i for i, block in enumerate(BLOCKS) if first in block), None)


def rule_import_direction(module: Module) -> Iterator[str]:
    here = block_of(module.name)
    if here is None:
        yield module.says(1, f"`{module.name}` belongs to no block; enter it in BLOCKS where it may be imported from")
        return
    for found in module.imports:
        if not found.is_ours or found.target in ("__init__", module.name):
            continue
        there = block_of(found.target)
        if there is not None and there > here:
            yield module.says(found.line, f"`{module.name}` imports `{found.target}`, which stands below it")
        elif "layouts.*" in BLOCKS[here] and there == here and layout_of(found.target) != layout_of(module.name):
            yield module.says(found.line, f"layout `{module.name}` imports layout `{found.target}`")


def rule_imports_are_absolute(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield module.says(node.lineno, f"relative import of `{node.module or '.'}`; write ckpttools.{node.module or ''}")


def rule_foundation(module: Module) -> Iterator[str]:
    allowed = FOUNDATION.get(module.name)
    for found in module.imports if allowed is not None else ():
        is_named_by_errors = (module.name, found.target, found.is_for_types) == ("errors", "findings", True)
        if found.is_ours and found.target not in allowed and not is_named_by_errors:
            yield module.says(
                found.line, f"`{module.name}` imports `{found.target}`; it may import {sorted(allowed) or 'nothing'}"
            )


def rule_only_the_version_from_the_package(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ckpttools" and module.name not in ("__init__", "__main__"):
            others = [a.name for a in node.names if a.name != "__version__" and a.name not in NAMES]
            if others:
                yield module.says(node.lineno, f"imports {others[0]} from the public API; import it from its module")


def rule_doors(module: Module) -> Iterator[str]:
    for found in module.imports:
        doors = DOORS.get(found.target)
        if not found.is_ours and doors is not None and module.first not in doors:
            yield module.says(found.line, f"imports `{found.target}`, which lives in {' and '.join(sorted(doors))} only")


def rule_nothing_heavy_at_the_top(module: Module) -> Iterator[str]:
    for found in module.imports:
        if not found.is_ours and found.target in LAZY and found.is_at_top and not found.is_for_types:
            yield module.says(found.line, f"imports `{found.target}` when the module is loaded; import it where it is used")


def rule_files_are_opened_in_storage(module: Module) -> Iterator[str]:
    if module.first == "storage":
        return
    allowed = OS_IN_RENDER if module.name == "cli.render" else OS_IN_CLI
    own_open = any(isinstance(n, (ast.FunctionDef, ast.alias)) and _bound_name(n) == "open" for n in ast.walk(module.tree))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open" and not own_open:
            yield module.says(node.lineno, "calls open(); files are opened in storage only")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name == "io.open" or (node.value.id == "os" and node.attr not in allowed):
                yield module.says(node.lineno, f"uses {name}; files are opened in storage only")


def _bound_name(node: ast.FunctionDef | ast.alias) -> str:
    return node.name if isinstance(node, ast.FunctionDef) else node.asname or node.name


def rule_clock_is_read_in_cli(module: Module) -> Iterator[str]:
    if module.first == "cli":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            for alias in node.names:
                if alias.name in CLOCK["time"]:
                    yield module.says(node.lineno, f"imports time.{alias.name}; the clock is read in cli only")
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if node.attr in CLOCK.get(owner, ()):
                yield module.says(node.lineno, f"uses {owner}.{node.attr}; the clock is read in cli only")


def rule_names(module: Module) -> Iterator[str]:
    for word in module.name.replace("_", ".").split("."):
        if word in BANNED_WORDS:
            yield module.says(1, f"module named `{word}`; name it after the noun that lives there")
    for node in ast.walk(module.tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name not in NAMES_OF_OTHERS
        if is_function and node.name.lstrip("_").startswith(BANNED_PREFIXES):
            yield module.says(
                node.lineno, f"function named `{node.name}`; use parse_, read_, plan_, check_, require_, render_ or write_"
            )
        if isinstance(node, ast.ClassDef):
            last = re.findall(r"[A-Z][a-z]*", node.name)[-1:] or [""]
            if last[0].lower() in BANNED_WORDS:
                yield module.says(node.lineno, f"class named `{node.name}`")


def rule_no_print(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield module.says(node.lineno, "calls print(); cli.render writes to streams")


def rule_no_assert(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert):
            yield module.says(node.lineno, "assert: python -O drops it, and users see no message")


def rule_no_broad_except(module: Module) -> Iterator[str]:
    """A handler that cleans up and ends in a bare `raise` swallows nothing, and Ctrl-C needs cleaning up after too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and module.name not in BROAD_EXCEPT:
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                continue
            caught = "" if node.type is None else ast.unparse(node.type)
            if not caught or re.search(r"\b(Base)?Exception\b", caught):
                yield module.says(node.lineno, f"except {caught or 'anything'}: name what can happen")


def rule_sizes(module: Module) -> Iterator[str]:
    lines = module.source.count("\n")
    if lines > MAX_FILE_LINES:
        yield module.says(lines, f"{lines} lines; at most {MAX_FILE_LINES}")
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            says_why = re.search(r"# noqa: C901  # \w+", module.source.splitlines()[node.lineno - 1])
            if length > MAX_FUNCTION_LINES and not says_why:
                yield module.says(node.lineno, f"`{node.name}` has {length} lines; at most {MAX_FUNCTION_LINES}")


def rule_type_ignores_say_why(module: Module) -> Iterator[str]:
    tokens = tokenize.generate_tokens(io.StringIO(module.source).readline)
    for comment in (token for token in tokens if token.type == tokenize.COMMENT):
        says_why = re.search(r"type:\s*ignore\[[\w, -]+\]\W+\w+", comment.string)
        if re.search(r"type:\s*ignore", comment.string) and not says_why:
            yield module.says(comment.start[0], "type: ignore without a code and a reason")


RULES: list[Callable[[Module], Iterator[str]]] = [rule for name, rule in list(globals().items()) if name.startswith("rule_")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule):
    violations = [line for module in MODULES for line in rule(module)]
    assert violations == [], "\n" + "\n".join(violations)


def test_no_import_leads_back_to_where_it_came_from():
    edges = {m.name: {i.target for i in m.imports if i.is_ours and not i.is_for_types and i.target != m.name} for m in MODULES}
    edges["__init__"] = set()  # whose imports are lazy, and whose version anyone may read
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, "a circle of imports: " + " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(edges.get(name, ())):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])


BAD = [
    (rule_import_direction, "geometry", "from ckpttools.cli import main\n"),
    (rule_import_direction, "storage.source", "def f():\n    from ckpttools import layouts\n"),
    (rule_import_direction, "layouts.hf_bin", "from ckpttools.layouts.dcp import read\n"),
    (rule_import_direction, "layouts.base", "from ckpttools.layouts import dcp\n"),
    (rule_import_direction, "containers.zips", "from ckpttools.layouts.base import Part\n"),
    (rule_import_direction, "toolbox", "x = 1\n"),
    (rule_imports_are_absolute, "layouts.dcp", "from .manifest import parse_manifest\n"),
    (rule_foundation, "errors", "from ckpttools.findings import Finding\n"),
    (rule_foundation, "dtypes", "from ckpttools.units import parse_bytes\n"),
    (rule_only_the_version_from_the_package, "execute", "from ckpttools import Checkpoint\n"),
    (rule_doors, "operations.validate", "import click\n"),
    (rule_doors, "gather", "def f():\n    import fsspec.core\n"),
    (rule_doors, "seals", "from blake3 import blake3\n"),
    (rule_doors, "plan", "from os.path import join\n"),
    (rule_doors, "plan", "from pathlib import Path\n"),
    (rule_nothing_heavy_at_the_top, "gather", "import numpy as np\n"),
    (rule_nothing_heavy_at_the_top, "storage.source", "try:\n    import fsspec\nexcept ImportError:\n    fsspec = None\n"),
    (rule_files_are_opened_in_storage, "seals", "data = open('x').read()\n"),
    (rule_files_are_opened_in_storage, "cli.hash", "import os\nx = os.path.exists('x')\n"),
    (rule_files_are_opened_in_storage, "seals", "import io\nx = io.open('x')\n"),
    (rule_clock_is_read_in_cli, "seals", "import time\nnow = time.time()\n"),
    (rule_clock_is_read_in_cli, "snapshots.retention", "from time import monotonic\n"),
    (rule_clock_is_read_in_cli, "seals", "import datetime\nnow = datetime.datetime.now()\n"),
    (rule_names, "containers.zip_utils", "x = 1\n"),
    (rule_names, "seals", "def get_seal():\n    pass\n"),
    (rule_names, "seals", "class C:\n    def _do_it(self):\n        pass\n"),
    (rule_names, "seals", "class SealManager:\n    pass\n"),
    (rule_no_print, "seals", "print('x')\n"),
    (rule_no_assert, "seals", "assert True\n"),
    (rule_no_broad_except, "seals", "try:\n    pass\nexcept Exception:\n    pass\n"),
    (rule_no_broad_except, "seals", "try:\n    pass\nexcept (ValueError, BaseException):\n    pass\n"),
    (rule_no_broad_except, "cli.hash", "try:\n    pass\nexcept:\n    pass\n"),
    (rule_sizes, "seals", "x = 1\n" * 601),
    (rule_sizes, "seals", "def f():\n" + "    x = 1\n" * 60),
    (rule_type_ignores_say_why, "seals", "x: int = ''  # type: ignore\n"),
    (rule_type_ignores_say_why, "seals", "x: int = ''  # type: ignore[assignment]\n"),
]

GOOD = [
    (rule_import_direction, "cli.hash", "from ckpttools.geometry import cover\nfrom ckpttools import layouts\n"),
    (rule_import_direction, "layouts", "from ckpttools.layouts import dcp, safetensors\n"),
    (
        rule_import_direction,
        "layouts.dcp.manifest",
        "from ckpttools.layouts.base import Part\nfrom ckpttools.layouts import families\n",
    ),
    (rule_import_direction, "layouts.dcp", "from ckpttools.layouts.dcp.manifest import parse_manifest\n"),
    (rule_foundation, "errors", "if TYPE_CHECKING:\n    from ckpttools.findings import Finding\n"),
    (rule_only_the_version_from_the_package, "seals", "from ckpttools import __version__\n"),
    (rule_doors, "cast", "def f():\n    import torch\n"),
    (rule_doors, "cli.hash", "import os\nimport click\n"),
    (rule_nothing_heavy_at_the_top, "gather", "def f():\n    import numpy as np\n"),
    (rule_nothing_heavy_at_the_top, "gather", "if TYPE_CHECKING:\n    import numpy as np\n"),
    (rule_files_are_opened_in_storage, "layouts", "def open(location):\n    pass\n\n\nopen('x')\n"),
    (rule_files_are_opened_in_storage, "cli.hash", "import os\nx = os.cpu_count()\n"),
    (rule_clock_is_read_in_cli, "cli.status", "import time\nnow = time.time()\n"),
    (rule_clock_is_read_in_cli, "storage.source", "import time\ntime.sleep(1)\nmodified = entry.time\n"),
    (rule_names, "plan", "def budget_of():\n    pass\n\n\nclass Corepoint:\n    pass\n"),
    (rule_no_broad_except, "execute", "try:\n    pass\nexcept BaseException:\n    undo()\n    raise\n"),
    (rule_no_broad_except, "cli", "try:\n    pass\nexcept Exception:\n    pass\n"),
    (rule_type_ignores_say_why, "seals", "x: int = ''  # type: ignore[assignment]  # the stub is wrong\n"),
]


def snippet_id(value: object) -> str | None:
    return value.__name__ if callable(value) else None


class TestRules:
    @pytest.mark.parametrize(("rule", "name", "source"), BAD, ids=snippet_id)
    def test_rule_refuses_what_it_is_there_to_refuse(self, rule, name, source):
        violations = list(rule(Module(name, "ckpttools/x.py", source)))
        assert violations
        assert all(re.match(r"ckpttools/x\.py:\d+: \S", line) for line in violations)

    @pytest.mark.parametrize(("rule", "name", "source"), GOOD, ids=snippet_id)
    def test_rule_lets_pass_what_is_meant(self, rule, name, source):
        assert list(rule(Module(name, "ckpttools/x.py", source))) == []

    def test_every_rule_is_tried_on_a_bad_snippet(self):
        assert {rule for rule, _, _ in BAD} == set(RULES)


PROBE = """
import json, sys
sys.argv = ["ckpttools", *json.loads(sys.argv[1])]
status = 0
try:
    from ckpttools.cli import main
    main()
except SystemExit as stop:
    status = stop.code or 0
print(json.dumps([status, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


def modules_loaded_by(*args: str) -> set[str]:
    """The top-level packages that a new process has loaded when a command line has run."""
    done = subprocess.run([sys.executable, "-c", PROBE, json.dumps(args)], capture_output=True, text=True, cwd=ROOT, check=False)
    status, loaded = json.loads(done.stderr.splitlines()[-1])
    assert status == 0, done.stderr
    return set(loaded)


class TestWhatIsLoaded:
    def test_help_loads_none_of_numpy_torch_fsspec(self):
        assert modules_loaded_by("--help") & LAZY == set()

    def test_inspect_of_local_files_loads_neither_torch_nor_fsspec(self):
        snapshot = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"
        assert modules_loaded_by("inspect", str(snapshot)) & {"torch", "fsspec", "transformers"} == set()

    @pytest.mark.parametrize("command", ["hash", "validate"])
    def test_reading_every_byte_of_local_files_loads_neither_torch_nor_fsspec(self, command):
        snapshot = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"
        assert modules_loaded_by(command, str(snapshot)) & {"torch", "fsspec", "transformers"} == set()
