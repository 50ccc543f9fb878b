"""Every fixture, through the command line: sound ones have the tensors of their truth, damaged ones are told as damaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ckpttools.findings import CODES
from tests.fixture_cases import FIXTURES, Case, Expected, Target, cases, hash_list, readable

ALL_FAMILIES = sorted(d.name for d in FIXTURES.iterdir() if d.is_dir())
SOUND = [(case, target) for case in readable(damaged=False) for target in case.targets()]
DAMAGED = readable(damaged=True)


def of_verdict(*verdicts: str):
    return pytest.mark.parametrize("case", [c for c in DAMAGED if c.verdict in verdicts], ids=lambda c: c.name)


def sound_id(value: Case | Target) -> str:
    return value.name if isinstance(value, Case) else value.path.name


sound = pytest.mark.parametrize(("case", "target"), SOUND, ids=sound_id)


@pytest.mark.parametrize("case", cases(*ALL_FAMILIES), ids=lambda c: f"{c.family}-{c.name}")
def test_files_are_the_bytes_that_the_tool_wrote(case: Case):
    recorded = {f["path"]: (f["size"], f["sha256"]) for f in case.truth["files_after_save"]}
    found = {path: (case.directory / path).read_bytes() for path in recorded}
    assert recorded == {path: (len(data), hashlib.sha256(data).hexdigest()) for path, data in found.items()}


class TestSound:
    @sound
    def test_every_tensor_of_the_truth_is_there_with_its_digest(self, ckpttools, case: Case, target: Target):
        answer = ckpttools("hash", target.path, "--algorithm", "sha256", "--json")
        assert (answer.exit_code, case.missing(target.tensors, answer.document["tensors"])) == (0, [])

    @sound
    def test_it_validates(self, ckpttools, case: Case, target: Target):
        answer = ckpttools("validate", target.path, "--json")
        assert (answer.exit_code, answer.document["verdict"]) == (0, "ok"), answer.said

    @sound
    def test_it_validates_against_its_own_hash_list(self, ckpttools, tmp_path, case: Case, target: Target):
        ours = ckpttools("hash", target.path, "--algorithm", "sha256", "--json")
        (tmp_path / "hashes.json").write_text(ours.stdout)
        answer = ckpttools("validate", target.path, "--against", tmp_path / "hashes.json", "--json")
        assert (answer.exit_code, answer.document["verdict"]) == (0, "ok"), answer.said


class TestDamaged:
    @of_verdict("refused")
    def test_it_is_refused_and_what_matters_is_named(self, ckpttools, copy_of, monkeypatch, tmp_path, case: Case):
        monkeypatch.chdir(tmp_path)
        answer = ckpttools("validate", case.damaged_target(copy_of(case.checkpoint)), "--json")
        assert answer.exit_code in (1, 3)
        assert [word for word in case.must_mention if word not in answer.said] == []
        assert answer.document["verdict"] in ("damaged", "incomplete")

    @of_verdict("refused", "remarked")
    def test_it_is_found_by_codes_of_the_table_with_a_place_and_a_remedy(self, ckpttools, copy_of, case: Case):
        findings = ckpttools("validate", case.damaged_target(copy_of(case.checkpoint)), "--json").document["findings"]
        assert findings
        assert {f["code"] for f in findings} <= set(CODES)
        assert [f for f in findings if not (f["where"] and f["remedy"] and f["severity"])] == []

    @of_verdict("refused", "remarked")
    def test_exit_status_says_whether_it_is_damage_or_absence(self, ckpttools, copy_of, case: Case):
        answer = ckpttools("validate", case.damaged_target(copy_of(case.checkpoint)), "--json")
        errors = [f["code"] for f in answer.document["findings"] if f["severity"] == "error"]
        only_absence = all(CODES[code].is_incompleteness for code in errors)
        assert answer.exit_code == (0 if not errors else 3 if only_absence else 1)

    @of_verdict("ok")
    def test_damage_that_changes_no_tensor_is_told_as_sound(self, ckpttools, copy_of, case: Case):
        assert ckpttools("validate", case.damaged_target(copy_of(case.checkpoint)), "--json").exit_code == 0

    @of_verdict("ok")
    def test_tensors_that_the_damage_spared_have_their_digests(self, ckpttools, copy_of, case: Case):
        answer = ckpttools("hash", case.damaged_target(copy_of(case.checkpoint)), "--algorithm", "sha256", "--json")
        assert (answer.exit_code, case.missing(case.undamaged_tensors, answer.document["tensors"])) == (0, [])

    @of_verdict("differs")
    def test_damage_that_only_values_show_is_found_against_the_truth(self, ckpttools, copy_of, tmp_path, case: Case):
        (tmp_path / "hashes.json").write_text(hash_list(case.undamaged_tensors))
        target = case.damaged_target(copy_of(case.checkpoint))
        answer = ckpttools("validate", target, "--against", tmp_path / "hashes.json", "--json")
        assert (answer.exit_code, answer.document["verdict"]) == (1, "different")

    @pytest.mark.parametrize("command", ["inspect", "hash", "validate"])
    @pytest.mark.parametrize("case", [c for c in DAMAGED if c.payload], ids=lambda c: c.name)
    def test_no_command_runs_the_payload(self, ckpttools, copy_of, monkeypatch, tmp_path, case: Case, command: str):
        monkeypatch.chdir(tmp_path)
        ckpttools(command, case.damaged_target(copy_of(case.checkpoint)))
        assert list(tmp_path.rglob(case.payload)) == []

    @pytest.mark.parametrize("command", ["inspect", "hash", "validate"])
    @pytest.mark.parametrize("case", DAMAGED, ids=lambda c: c.name)
    def test_no_command_changes_a_damaged_snapshot(self, ckpttools, copy_of, case: Case, command: str):
        target = case.damaged_target(copy_of(case.checkpoint))
        root = target if target.is_dir() else target.parent
        before = contents(root)
        ckpttools(command, target)
        assert before == contents(root)


class TestDamagedRuns:
    """Run directories in which some snapshots are damaged, or a tracker points nowhere."""

    @of_verdict("run")
    def test_sound_snapshots_validate(self, ckpttools, case: Case):
        for name in case.good_snapshots:
            assert ckpttools("validate", case.checkpoint / name, "--json").exit_code == 0, name

    @of_verdict("run")
    def test_damaged_snapshots_are_refused_and_the_file_is_named(self, ckpttools, case: Case):
        files = [Path(f["file"]) for f in case.truth["expected_findings"]]
        for name in case.bad_snapshots:
            answer = ckpttools("validate", case.checkpoint / name, "--json")
            assert answer.exit_code in (1, 3)
            assert [f for f in files if f.parts[0] == name and f.name not in answer.said] == []

    @of_verdict("run")
    def test_latest_names_the_newest_sound_one(self, ckpttools, case: Case):
        answer = ckpttools("latest", case.checkpoint, "--depth", "full")
        if "newest_valid" not in case.truth:
            assert (case.good_snapshots, answer.exit_code) == ([], 3)
        else:
            assert (answer.exit_code, Path(answer.stdout.strip()).name) == (0, case.truth["newest_valid"])

    @of_verdict("run")
    def test_status_tells_a_tracker_that_points_nowhere(self, ckpttools, case: Case):
        values = [f["value"] for f in case.truth["expected_findings"] if "value" in f]
        answer = ckpttools("status", case.checkpoint, "--json")
        assert [v for v in values if v not in answer.said or answer.exit_code != 1] == []


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


LINE = {"name": "model.w", "dtype": "float32", "shape": [2], "digest": "aa"}
EXPECTED = Expected("float32", (2,), frozenset({"aa"}))


class TestTruthReader:
    """The truth reader itself: it must be able to say no."""

    def test_tensor_below_a_wrapper_is_found(self):
        assert Case("torch", "dcp_fsdp2_w2").missing({"w": EXPECTED}, [LINE]) == []

    @pytest.mark.parametrize("change", [{"digest": "ab"}, {"dtype": "int32"}, {"shape": [1, 2]}, {"name": "model.v"}], ids=str)
    def test_tensor_with_another_digest_dtype_shape_or_name_is_missing(self, change):
        assert Case("torch", "dcp_fsdp2_w2").missing({"w": EXPECTED}, [LINE | change]) == ["w"]

    def test_one_name_of_a_tied_pair_is_enough(self):
        wanted = {"transformer.wte.weight": EXPECTED, "lm_head.weight": EXPECTED}
        assert Case("torch", "hf_gpt2_tied_single").missing(wanted, [LINE | {"name": "transformer.wte.weight"}]) == []

    def test_there_are_85_cases_of_torch_and_26_of_them_are_damaged(self):
        assert (len(cases("torch")), len(cases("torch", damaged=True))) == (85, 26)

    def test_truths_of_sound_cases_name_4197_tensors(self):
        assert sum(len(target.tensors) for case, target in SOUND if case.family == "torch") == 4197

    def test_hash_list_is_the_documented_json(self):
        assert json.loads(hash_list({"w": EXPECTED})) == {
            "schema": "ckpttools/hash/1",
            "algorithm": "sha256",
            "tensors": [{"name": "w", "dtype": "float32", "shape": [2], "digest": "aa"}],
        }
