"""The exit codes, and the exceptions that carry what a message needs."""

from __future__ import annotations

import pytest

from ckpttools import errors
from ckpttools.errors import EXIT_CODE_MEANINGS, CkpttoolsError, ExitCode, FindingsError
from ckpttools.findings import NOTE, Finding

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, CkpttoolsError)]


class TestExitCodes:
    def test_numbers_are_those_that_scripts_rely_on(self):
        assert {code.name: code.value for code in ExitCode} == {
            "OK": 0,
            "WRONG": 1,
            "USAGE": 2,
            "INCOMPLETE": 3,
            "FAILED": 4,
            "LOCKED": 5,
            "INTERRUPTED": 130,
        }

    def test_each_has_a_meaning_for_the_documentation(self):
        assert set(EXIT_CODE_MEANINGS) == set(ExitCode)


class TestErrors:
    @pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
    def test_kind_of_error_never_exits_0(self, cls):
        assert cls.exit_code not in (ExitCode.OK, ExitCode.WRONG)

    def test_carries_what_a_message_needs(self):
        error = CkpttoolsError(
            "short read", where="a.bin at byte 8", expected="24 bytes", found="16 bytes", hints=["copy it again"]
        )
        assert ("short read", "a.bin at byte 8", "24 bytes", "16 bytes", ("copy it again",)) == (
            error.message,
            error.where,
            error.expected,
            error.found,
            error.hints,
        )

    def test_text_of_the_exception_is_its_message(self):
        assert str(CkpttoolsError("nothing there: /a", where="/a")) == "nothing there: /a"


MISSING, DAMAGE, REMARK = Finding("missing-file", "a"), Finding("empty-file", "b"), Finding("checksums-off", "c")


class TestFindingsError:
    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            ([MISSING], ExitCode.INCOMPLETE),
            ([MISSING, REMARK], ExitCode.INCOMPLETE),
            ([DAMAGE], ExitCode.WRONG),
            ([MISSING, DAMAGE], ExitCode.WRONG),
            ([REMARK], ExitCode.WRONG),
            ([], ExitCode.WRONG),
        ],
    )
    def test_exits_3_when_nothing_but_absence_was_found(self, found, expected):
        assert expected == FindingsError("not whole", found).exit_status

    def test_remark_on_an_absent_file_does_not_make_it_damage(self):
        found = [MISSING, Finding("empty-file", "b", severity=NOTE)]
        assert FindingsError("not whole", found).exit_status == ExitCode.INCOMPLETE
