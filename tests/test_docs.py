"""Holds the documentation to the code: what the code has is documented, and what the documentation shows is true.

Pages that can be made from the code are; the transcripts of the others run. JSON documents are compared with the tables of
`docs/reference/json.md`, field by field, in both directions.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

import ckpttools as ckpttools_package
from ckpttools.cli import COMMANDS, main
from ckpttools.errors import EXIT_CODE_MEANINGS, ExitCode
from ckpttools.findings import TABLE
from ckpttools.layouts import REGISTRY
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

DOCS = Path(__file__).parent.parent / "docs"
LAYOUT_HEADINGS = [
    "Recognise",
    "Files",
    "Names",
    "Versions",
    "What is proved",
    "What cannot be proved",
    "Sources",
]

Run = Callable[..., Answer]


def load(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generate = load("generate")
transcripts = load("transcripts")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def command_of(name: str) -> click.Command:
    return dict(generate.commands())[name]


def section(text: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


# pages made from the code


def test_generated_pages_are_current() -> None:
    assert [] == generate.outdated(), "run `python docs/generate.py`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_reference(name: str) -> None:
    text = section(read("reference/cli.md"), name)
    options = [o for option in generate.options_of(command_of(name)) for o in (*option.opts, *option.secondary_opts)]
    assert [] == [o for o in options if f"`{o}`" not in text]


@pytest.mark.parametrize("code", [c.code for c in TABLE])
def test_every_finding_is_in_the_reference(code: str) -> None:
    assert f"`{code}`" in read("reference/findings.md")


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_status_is_in_the_reference(code: ExitCode) -> None:
    assert f"| {code.value} | `{code.name}` | {EXIT_CODE_MEANINGS[code]} |" in read("reference/exit-codes.md")


def test_generate_refuses_what_it_does_not_know() -> None:
    assert generate.run(["--cheque"]) == 2


# help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse(name: str) -> None:
    command = command_of(name)
    lines = generate.example_lines(command)
    assert 2 <= len(lines) <= 4
    for line in lines:
        words = line.partition(" > ")[0].split()
        assert words[:2] == ["ckpttools", name]
        command.make_context(name, words[2:])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_its_examples(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert "Examples:" in result.output
    assert [] == [e for e in generate.example_lines(command_of(name)) if e not in result.output]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    assert [] == [o.opts for o in command_of(name).params if isinstance(o, click.Option) and not o.help]


# hand-written pages


@pytest.mark.parametrize("name", [layout.name for layout in REGISTRY])
def test_every_layout_has_a_page_with_the_same_headings(name: str) -> None:
    text = read(f"reference/layouts/{name}.md")
    assert text.startswith(f"# {name}\n")
    assert LAYOUT_HEADINGS == re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [] == [h for h in LAYOUT_HEADINGS if not section(text, h).strip()]


def test_every_layout_page_is_of_a_layout() -> None:
    assert {layout.name for layout in REGISTRY} == {p.stem for p in (DOCS / "reference/layouts").glob("*.md")}


@pytest.mark.parametrize("page", sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", read(page))
    relative = [t for t in targets if "://" not in t]
    assert [] == [t for t in relative if not (DOCS / page).parent.joinpath(t).exists()]


@pytest.mark.parametrize("page", sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")))
def test_only_findings_of_the_table_are_named_as_findings(page: str) -> None:
    named = re.findall(r"^(?:error|warning|note): ([a-z-]+): ", read(page), re.MULTILINE)
    assert set() == set(named) - {c.code for c in TABLE}


@pytest.mark.parametrize("page", sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")))
def test_command_lines_in_the_text_parse(page: str) -> None:
    """Every line of a shell block that starts with `ckpttools` names a command and options that exist."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```$", read(page), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = re.split(r" [|>] ", line.strip())[0].split()
            if words[:1] == ["ckpttools"]:
                name = words[1]
                known = {o for p in command_of(name).params for o in (*p.opts, *p.secondary_opts)}
                assert [] == [w for w in words[2:] if w.startswith("-") and w not in known], line


# transcripts


@pytest.mark.parametrize("page", transcripts.pages(), ids=lambda p: p.stem)
def test_transcripts_are_true(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [
        (shown.command, shown.lines, found.lines)
        for shown, found in zip(transcripts.steps_of(text), transcripts.run_page(text, tmp_path), strict=True)
        if not transcripts.is_as_shown(shown.lines, found.lines)
    ]
    assert [] == wrong, "run `python docs/transcripts.py` and look at what it changed"


@pytest.mark.parametrize("page", transcripts.pages(), ids=lambda p: p.stem)
def test_no_transcript_shows_a_fault_of_ours(page: Path) -> None:
    assert not re.search("internal error|Traceback", page.read_text(encoding="utf-8"))


def test_the_tutorial_uses_every_command() -> None:
    commands = {s.command.split()[1] for s in transcripts.steps_of(read("tutorial.md")) if s.command.startswith("ckpttools")}
    assert set(COMMANDS) == commands


@pytest.mark.parametrize(
    ("shown", "found", "expected"),
    [
        (["a", "...", "d"], ["a", "b", "c", "d"], True),
        (["a", "...", "d"], ["a", "d"], True),
        (["a", "...", "d"], ["a", "b"], False),
        (["a ... d"], ["a b c d"], True),
        (["a ... d"], ["a", "d"], False),
        (["a.b"], ["axb"], False),
        ([], [], True),
        ([], ["a"], False),
    ],
)
def test_dots_stand_for_what_is_left_out(shown: list[str], found: list[str], expected: bool) -> None:
    assert transcripts.is_as_shown(shown, found) == expected


# Python


def test_every_public_name_is_in_the_python_page() -> None:
    text = read("reference/python.md")
    assert [] == [name for name in ckpttools_package.__all__ if f"`{name}" not in text and f"\n## {name}\n" not in text]


@pytest.mark.parametrize("name", [n for n in ckpttools_package.__all__ if not n.endswith("Error")])
def test_every_argument_is_in_the_python_page(name: str) -> None:
    text = read("reference/python.md")
    part, shared = section(text, name), text.partition("\n## ")[0]
    if part:
        named = inspect.signature(getattr(ckpttools_package, name)).parameters
        assert [] == [p for p in named if f"`{p}`" not in part + shared and not re.search(rf"`{name}\([^`]*\b{p}\b", part)]


def test_examples_of_the_python_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = read("reference/python.md")
    for case in set(re.findall(r"fixtures/(\w+/\w+)", text)):
        shutil.copytree(FIXTURES / case, tmp_path / "fixtures" / case)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "python.md", "exec"), scope)  # its own text, which is what is tested


def test_public_names_stay_what_they_are_when_every_module_is_loaded() -> None:
    for module in pkgutil.walk_packages(ckpttools_package.__path__, "ckpttools."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert [] == [name for name in ckpttools_package.__all__ if isinstance(getattr(ckpttools_package, name), ModuleType)]


# JSON


def schema_fields(schema: str) -> dict[str, str]:
    """Field path -> type, as json.md has them; findings have a table of their own."""
    text = read("reference/json.md")
    fields = _rows(section(text, schema))
    if "findings" in fields:
        fields |= _rows(section(text, "Findings"))
    if "tensors[].replicas" in fields:
        prefix = "tensors[].pieces[]"
        fields |= {p.replace(prefix, "tensors[].replicas[]"): t for p, t in fields.items() if p.startswith(prefix)}
    return fields


def _rows(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]*?) \|", text, re.MULTILINE))


def mismatches(value: Any, fields: dict[str, str], path: str = "") -> Iterator[str]:
    """Fields of a document that are not in the table, and fields of the table that are not in the document."""
    if fields.get(path, "").startswith("any"):
        return
    if isinstance(value, list):
        for item in value:
            yield from mismatches(item, fields, f"{path}[]")
    elif isinstance(value, dict) and not fields.get(path, "").startswith("map"):
        prefix = f"{path}." if path else ""
        direct = {f[len(prefix) :] for f in fields if f.startswith(prefix) and re.fullmatch(r"\w+", f[len(prefix) :])}
        yield from (f"{prefix}{key} is not in the table" for key in value.keys() - direct)
        required = {key for key in direct if "optional" not in fields[prefix + key]}
        yield from (f"{prefix}{key} is not in the document" for key in required - value.keys())
        for key, inner in value.items():
            yield from _type_mismatch(inner, fields.get(prefix + key, ""), prefix + key)
            yield from mismatches(inner, fields, prefix + key)


_TYPES = {
    "text": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "list": list,
    "map": dict,
    "object": dict,
    "null": type(None),
}


def _type_mismatch(value: Any, stated: str, path: str) -> Iterator[str]:
    if stated.startswith("any"):
        return
    kinds = [_TYPES[word] for word in re.split(r" or ", stated.partition(" of ")[0].partition(",")[0]) if word]
    if kinds and type(value) not in kinds:
        yield f"{path} is {type(value).__name__}, not {stated}"


INSPECTED = [
    "torch/dcp_fsdp2_w2/ckpt",
    "torch/dcp_zstd_ext_w2/ckpt",
    "torch/save_zip_exotic/ckpt",
    "torch/save_zip_shared_views/ckpt",
    "torch/perrank_dtensor_hsdp_2x2/ckpt",
    "torch/hf_gpt2_tied_single/ckpt",
    "torch/dmg_shard_missing/ckpt",
    "megatron/legacy_tp2_mcore/ckpt/iter_0000100",
]


def single_file(path: str) -> Path:
    """The case's directory, or its one file where a directory would not say which is meant."""
    found = FIXTURES / path
    files = sorted(p for p in found.iterdir() if p.suffix == ".pt")
    return files[0] if files and not (found / "model.pt").exists() and "perrank" not in path else found


@pytest.mark.parametrize("path", INSPECTED)
def test_inspect_prints_the_documented_fields(ckpttools: Run, path: str) -> None:
    document = ckpttools("inspect", single_file(path), "--json", "--tensors", "--rules").document
    assert [] == list(mismatches(document, schema_fields(document["schema"])))


def test_inspect_lists_tensors_only_when_asked(ckpttools: Run) -> None:
    document = ckpttools("inspect", FIXTURES / "torch/dcp_fsdp2_w2/ckpt", "--json").document
    assert [] == list(mismatches(document, schema_fields("ckpttools/inspect/1")))
    assert "tensors" not in document


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_hash_prints_the_documented_fields(ckpttools: Run, algorithm: str) -> None:
    document = ckpttools("hash", FIXTURES / "torch/dcp_fsdp2_w2/ckpt", "--json", "--algorithm", algorithm).document
    assert [] == list(mismatches(document, schema_fields("ckpttools/hash/1")))


@pytest.mark.parametrize("path", ["torch/dcp_fsdp2_w2/ckpt", "torch/dmg_distcp_bitflip_tensor/ckpt"])
@pytest.mark.parametrize("depth", ["commit", "full"])
def test_validate_prints_the_documented_fields(ckpttools: Run, path: str, depth: str) -> None:
    document = ckpttools("validate", FIXTURES / path, "--json", "--depth", depth).document
    assert [] == list(mismatches(document, schema_fields("ckpttools/validate/1")))


def test_reshard_prints_the_documented_fields(ckpttools: Run, tmp_path: Path) -> None:
    source = FIXTURES / "torch/dcp_tp2/ckpt"
    for options in (["--dry-run"], []):
        document = ckpttools("reshard", source, tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=2", "--json", *options).document
        assert [] == list(mismatches(document, schema_fields("ckpttools/reshard/1")))


@pytest.mark.parametrize("words", [(), ("--all", "--rtol", "1e-3")])
@pytest.mark.parametrize(
    "other", ["torch/dcp_fsdp2_w2/ckpt", "torch/dcp_fsdp2_w4_uneven/ckpt", "torch/dmg_distcp_bitflip_tensor/ckpt"]
)
def test_diff_prints_the_documented_fields(ckpttools: Run, other: str, words: tuple[str, ...]) -> None:
    document = ckpttools("diff", FIXTURES / "torch/dcp_fsdp2_w2/ckpt", FIXTURES / other, "--json", *words).document
    assert [] == list(mismatches(document, schema_fields("ckpttools/diff/1")))


def test_consolidate_prints_the_documented_fields(ckpttools: Run, tmp_path: Path) -> None:
    source, target = FIXTURES / "torch/dcp_fsdp2_w2/ckpt", tmp_path / "out"
    for options in (["--dry-run"], ["--dry-run", "--dtype", "bfloat16"], ["--dtype", "bfloat16"]):
        document = ckpttools("consolidate", source, target, "--json", *options).document
        assert [] == list(mismatches(document, schema_fields("ckpttools/consolidate/1")))
        assert document["is_written"] == ("--dry-run" not in options)


def test_a_seal_has_the_documented_fields(ckpttools: Run, tmp_path: Path) -> None:
    output = tmp_path / "seal.json"
    ckpttools("seal", FIXTURES / "torch/dcp_fsdp2_w2/ckpt", "--output", output)
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [] == list(mismatches(document, schema_fields("ckpttools/seal/1")))


def test_the_seal_of_a_conversion_has_the_documented_fields(ckpttools: Run, tmp_path: Path) -> None:
    ckpttools("consolidate", FIXTURES / "torch/hf_gpt2_tied_single/ckpt", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "ckpttools-seal.json").read_text(encoding="utf-8"))
    assert [] == list(mismatches(document, schema_fields("ckpttools/seal/1")))


def test_every_documented_field_of_inspect_is_seen_in_some_fixture(ckpttools: Run) -> None:
    """An optional field that nothing prints is a documentation of something that is not there."""
    seen: set[str] = set()
    for path in INSPECTED:
        seen.update(_paths(ckpttools("inspect", single_file(path), "--json", "--tensors", "--rules").document))
    steps = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"
    seen.update(_paths(ckpttools("inspect", steps, "--root", FIXTURES / "torch" / "dcp_tp2" / "ckpt", "--json").document))
    missing = {f for f in schema_fields("ckpttools/inspect/1") if "replicas[]" not in f} - seen
    assert set() == missing


def _paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, inner in value.items():
            inside = f"{path}.{key}" if path else key
            yield inside
            yield from _paths(inner, inside)
