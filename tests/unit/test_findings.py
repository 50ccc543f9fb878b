"""The table of findings, and what a finding takes from its row."""

from __future__ import annotations

import re

import pytest

from ckpttools import findings
from ckpttools.findings import CODES, TABLE, Finding

rows = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.code)


class TestTable:
    def test_no_code_stands_twice(self):
        assert sorted(CODES) == sorted(row.code for row in TABLE)

    @rows
    def test_code_is_words_joined_by_hyphens(self, row):
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", row.code)

    @rows
    def test_severity_is_one_of_three(self, row):
        assert row.severity in (findings.ERROR, findings.WARNING, findings.NOTE)

    @rows
    def test_says_what_it_means_and_what_to_do_in_the_style_of_messages(self, row):
        for text in (row.meaning, row.remedy):
            assert text
            assert not text.endswith(".")
            assert not text.split()[0].istitle()

    @rows
    def test_only_errors_are_incompleteness(self, row):
        assert row.severity == findings.ERROR or not row.is_incompleteness


class TestFinding:
    @rows
    def test_takes_severity_and_remedy_from_its_row(self, row):
        finding = Finding(row.code, "model.safetensors")
        assert (row.severity, row.remedy, row.is_incompleteness) == (finding.severity, finding.remedy, finding.is_incompleteness)

    def test_place_that_emits_it_may_say_otherwise(self):
        finding = Finding("missing-file", "a.bin", remedy="look on node 3", severity=findings.WARNING)
        assert (findings.WARNING, "look on node 3", False) == (finding.severity, finding.remedy, finding.is_error)

    def test_unknown_code_is_a_bug_seen_at_once(self):
        with pytest.raises(KeyError):
            Finding("no-such-code", "a.bin")

    def test_equal_findings_are_equal(self):
        assert Finding("empty-file", "a.bin") == Finding("empty-file", "a.bin")
