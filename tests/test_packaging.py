"""What a plain clone promises: the two commands of the README, the dependencies, the licence, the files that must be there."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import ckpttools
from tests.fixture_cases import FIXTURES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = ROOT / ".ci" / "run"


def marked_commands(mark: str) -> list[str]:
    """The fenced blocks that stand directly after a comment."""
    return re.findall(rf"^<!-- {mark} -->\n```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def requirements(extra: str = "") -> set[str]:
    """Names of the distributions that the package, or one extra of it, requires."""
    found = set()
    for line in metadata.requires("ckpttools") or []:
        requirement, _, marker = line.partition(";")
        named = re.search(r"extra == ['\"](\w+)['\"]", marker)
        if (named.group(1) if named else "") == extra:
            found.add(re.split(r"[\s<>=!~\[;(]", requirement.strip())[0])
    return found


class TestDependencies:
    def test_core_needs_six_packages_and_nothing_else(self):
        assert requirements() - {"tomli"} == {"click", "numpy", "safetensors", "tqdm", "fsspec", "blake3"}

    def test_toml_is_read_by_python_itself_from_3_11_on(self):
        lines = [line for line in metadata.requires("ckpttools") or [] if line.startswith("tomli")]
        assert [line.replace('"', "'").partition(";")[2].strip() for line in lines] == ["python_version < '3.11'"]

    def test_extras_are_those_documented(self):
        assert set(metadata.metadata("ckpttools").get_all("Provides-Extra")) == {"torch", "gcs", "s3", "zstd", "all", "test"}

    @pytest.mark.parametrize(("extra", "package"), [("torch", "torch"), ("gcs", "gcsfs"), ("s3", "s3fs"), ("zstd", "zstandard")])
    def test_extra_adds_one_package(self, extra, package):
        assert requirements(extra) == {package}

    def test_torch_is_pinned_because_the_newest_brings_cuda_along(self):
        pins = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
        assert pins == ["2.13.0"]

    def test_metadata_has_the_version_of_the_package(self):
        assert metadata.version("ckpttools") == ckpttools.__version__


class TestReadme:
    @pytest.mark.parametrize("mark", ["try", "test"])
    def test_has_one_command_to_paste(self, mark):
        assert len(marked_commands(mark)) == 1

    @pytest.mark.parametrize("mark", ["try", "test"])
    def test_command_is_read_by_the_shell_as_one_line(self, mark):
        (command,) = marked_commands(mark)
        assert all(line.endswith("&&") for line in command.strip().splitlines()[:-1])
        assert subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode == 0

    def test_commands_print_what_it_shows(self):
        check = [sys.executable, "docs/transcripts.py", "--check", "README.md"]
        done = subprocess.run(check, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, f"run `python docs/transcripts.py README.md` and look at what it changed\n{done.stdout}"

    def test_what_it_shows_are_the_commands_to_paste(self):
        (command,) = marked_commands("try")
        pasted = [line.removeprefix(".venv/bin/").removesuffix(" &&") for line in command.splitlines() if "/ckpttools " in line]
        assert pasted == re.findall(r"^\$ (.*)$", README, re.MULTILINE)

    def test_tests_are_installed_with_the_pinned_versions(self):
        (command,) = marked_commands("test")
        assert "-c constraints.txt" in command

    @pytest.mark.parametrize("mark", ["try", "test"])
    def test_ci_reads_the_same_command_word_for_word(self, mark):
        script = re.search(r"^readme_command\(\) \{\n.*?^\}\n", CI.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        read = subprocess.run(
            ["bash", "-c", f"{script.group()}readme_command {mark}"], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert [read.stdout] == marked_commands(mark)

    def test_links_lead_to_files(self):
        targets = re.findall(r"\]\(([^)#:]+)\)", README)
        assert [t for t in targets if not (ROOT / t).exists()] == []


class TestFiles:
    def test_licence_is_the_full_apache_2(self):
        text = (ROOT / "LICENSE").read_text(encoding="utf-8")
        assert "Version 2.0, January 2004" in text
        assert "END OF TERMS AND CONDITIONS" in text

    def test_package_is_marked_as_typed(self):
        assert (Path(ckpttools.__file__).parent / "py.typed").exists()

    def test_rules_are_packaged(self):
        from importlib.resources import files

        from ckpttools.placement.rule_files import BUILT_IN, OTHERS

        listed = {entry.name for entry in files("ckpttools.placement").joinpath("builtin").iterdir()}
        assert listed == {f"{name}.toml" for name in BUILT_IN + OTHERS}
        assert '"placement/builtin/*.toml"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    def test_maps_of_names_are_packaged(self):
        from importlib.resources import files

        from ckpttools.names.maps import BUILT_IN

        listed = {entry.name for entry in files("ckpttools.names").joinpath("builtin").iterdir()}
        assert listed == {f"{name}.toml" for name in BUILT_IN}
        assert '"names/builtin/*.toml"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    def test_ci_script_can_be_run(self):
        assert CI.stat().st_mode & 0o111

    def test_fixtures_stay_small_enough_to_clone(self):
        assert sum(p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file()) < 100_000_000

    def test_fixtures_of_every_family_have_an_index(self):
        assert [d.name for d in FIXTURES.iterdir() if d.is_dir() and not (d / "INDEX.md").exists()] == []
