"""Sizes and durations: what is read, what is refused, and that what is printed reads as what was meant."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import units

SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
SIZES |= {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class TestParseBytes:
    @given(st.integers(0), st.sampled_from(sorted(SIZES)))
    def test_number_and_unit_are_multiplied_exactly(self, number, unit):
        assert number * SIZES[unit] == units.parse_bytes(f"{number}{unit}")

    @given(st.integers(0, 10**6), st.sampled_from(sorted(u for u in SIZES if u)))
    def test_space_before_the_unit_and_around_changes_nothing(self, number, unit):
        assert units.parse_bytes(f"{number}{unit}") == units.parse_bytes(f"  {number} {unit} ")

    @given(st.integers(0, 10**6), st.sampled_from(sorted(u for u in SIZES if len(u) > 1)))
    def test_case_of_a_spelled_out_unit_changes_nothing(self, number, unit):
        assert units.parse_bytes(f"{number}{unit}") == units.parse_bytes(f"{number}{unit.lower()}")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("300", 300), ("5GB", 5_000_000_000), ("1.5 TiB", 1_649_267_441_664), ("5MiB", 5_242_880), ("0", 0), ("0.5KB", 500)],
    )
    def test_sizes_as_people_write_them(self, text, expected):
        assert expected == units.parse_bytes(text)

    @pytest.mark.parametrize(
        "text",
        ["", "GB", "5Mi", "5m", "-5GB", "+5GB", "5 GB free", "5GB5", "5 5", "1e9", "1_000", "1,5GB", ".5GB", "5.", "5.GB"],
    )
    def test_what_could_mean_something_else_is_refused(self, text):
        self.refused(text)

    @pytest.mark.parametrize("text", ["0x10", "inf", "nan", "٣GB", "5GiBB", "5bits", "5%", "GB5"])
    def test_what_is_no_number_with_a_unit_is_refused(self, text):
        self.refused(text)

    def refused(self, text):
        with pytest.raises(ValueError, match="not a size") as refusal:
            units.parse_bytes(text)
        assert f"`{text}`" in str(refusal.value)

    @pytest.mark.parametrize("text", ["1.5", "0.0001KB", "1.3KiB", "1.00000000000000000000000000000001GB"])
    def test_part_of_a_byte_is_refused(self, text):
        with pytest.raises(ValueError, match="not a whole number of bytes"):
            units.parse_bytes(text)


class TestRenderBytes:
    @given(st.integers(0, 10**20))
    def test_says_the_exact_number_of_bytes(self, length_bytes):
        text = units.render_bytes(length_bytes)
        exact = text.rpartition("(")[2].rstrip(")")
        assert length_bytes == int(exact.split()[0])

    @given(st.integers(0, 10**20))
    def test_short_form_is_within_its_last_digit(self, length_bytes):
        number, unit = units.render_bytes_short(length_bytes).split()
        assert abs(Fraction(number) * SIZES[unit] - length_bytes) <= Fraction(SIZES[unit], 20) + Fraction(length_bytes, 2**52)

    @given(st.integers(0, 2**50))
    def test_short_form_never_says_1024_of_a_unit(self, length_bytes):
        assert float(units.render_bytes_short(length_bytes).split()[0]) < 1024

    @pytest.mark.parametrize(
        ("length_bytes", "expected"),
        [
            (0, "0 bytes"),
            (1, "1 byte"),
            (24, "24 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB (1024 bytes)"),
            (1610612736, "1.5 GiB (1610612736 bytes)"),
        ],
    )
    def test_sizes_for_people(self, length_bytes, expected):
        assert expected == units.render_bytes(length_bytes)

    @pytest.mark.parametrize(
        ("length_bytes", "expected"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (2**20 - 1, "1.0 MiB"),
            (2**20 - 52, "1023.9 KiB"),
            (2**60, "1024.0 PiB"),
        ],
    )
    def test_sizes_for_a_narrow_column(self, length_bytes, expected):
        assert expected == units.render_bytes_short(length_bytes)


class TestParseDuration:
    @given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(sorted(SECONDS))), min_size=1, unique_by=lambda p: p[1]))
    def test_parts_add_up(self, parts):
        parts = sorted(parts, key=lambda part: -SECONDS[part[1]])
        expected = sum(number * SECONDS[unit] for number, unit in parts)
        assert expected == units.parse_duration("".join(f"{n}{u}" for n, u in parts))
        assert expected == units.parse_duration(" ".join(f"{n}{u}" for n, u in parts))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("36h", 129600),
            ("7d", 604800),
            ("1h30m", 5400),
            ("1h 30m", 5400),
            ("90s", 90),
            ("1.5h", 5400),
            ("2w", 1209600),
            ("0s", 0),
        ],
    )
    def test_durations_as_people_write_them(self, text, expected):
        assert expected == units.parse_duration(text)

    @pytest.mark.parametrize(
        "text",
        ["", "90", "h", "-5m", "30m1h", "1h1h", "1h30", "1y", "5 m", "1H", "1h,30m", "1h30m ago", "1hour", "٣h", "1h-30m"],
    )
    def test_what_could_mean_something_else_is_refused(self, text):
        with pytest.raises(ValueError, match="not a duration") as refusal:
            units.parse_duration(text)
        assert f"`{text}`" in str(refusal.value)

    @pytest.mark.parametrize("text", ["0.5s", "0.001m", "1.00000000000000000000000000000001h"])
    def test_part_of_a_second_is_refused(self, text):
        with pytest.raises(ValueError, match="not a whole number of seconds"):
            units.parse_duration(text)


class TestRenderDuration:
    @given(st.integers(0, 10**9))
    def test_reads_back_as_the_same_time_less_what_was_cut_off(self, seconds):
        text = units.render_duration(seconds)
        assert 0 <= seconds - units.parse_duration(text) < SECONDS[text[-1]]

    @given(st.integers(0, 10**9))
    def test_has_two_parts_at_most(self, seconds):
        assert len(units.render_duration(seconds).split()) <= 2

    @pytest.mark.parametrize(
        ("seconds", "expected"),
        [(0, "0s"), (0.9, "0s"), (12, "12s"), (5400, "1h 30m"), (273_600, "3d 4h"), (86_405, "1d 5s"), (604_800, "7d")],
    )
    def test_durations_for_people(self, seconds, expected):
        assert expected == units.render_duration(seconds)
