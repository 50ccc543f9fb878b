"""Two sides are the same when every name of either has the same dtype, shape and digest on the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.digest import TensorDigest
from ckpttools.errors import NotFoundError, NotRecognisedError
from ckpttools.operations.compare import Side, compare, open_side
from tests.unit.containers.torch_bytes import saved

A, B = "a" * 64, "b" * 64


def side(*rows: tuple[str, str], dtype: str = "float32", shape: tuple[int, ...] = (2,), aliases=(), unread=frozenset()) -> Side:
    return Side("here", "blake3", tuple(TensorDigest(n, dtype, shape, d) for n, d in rows), aliases, unread)


def codes(mine: Side, other: Side, **options: bool) -> list[str]:
    return [f.code for f in compare(mine, other, **options)]


sides = st.dictionaries(st.sampled_from("uvwxyz"), st.sampled_from([A, B])).map(lambda d: side(*d.items()))


class TestCompare:
    @given(sides)
    def test_side_is_the_same_as_itself(self, one):
        assert [] == codes(one, one)

    @given(sides, sides)
    def test_same_names_differ_whichever_side_comes_first(self, one, other):
        opposite = {"missing-tensor": "extra-tensor", "extra-tensor": "missing-tensor"}
        assert sorted(codes(one, other)) == sorted(opposite.get(c, c) for c in codes(other, one))

    def test_other_digest_is_a_difference(self):
        assert ["digest-mismatch"] == codes(side(("w", A)), side(("w", B)))

    def test_other_shape_is_told_rather_than_the_digest(self):
        assert ["shape-mismatch"] == codes(side(("w", A)), side(("w", B), shape=(1, 2)))

    def test_other_dtype_is_told_rather_than_the_shape(self):
        assert ["dtype-mismatch"] == codes(side(("w", A)), side(("w", B), shape=(1, 2), dtype="int32"))

    def test_scalar_is_not_a_vector_of_one(self):
        assert ["shape-mismatch"] == codes(side(("w", A), shape=()), side(("w", A), shape=(1,)))

    def test_absent_name_is_missing(self):
        assert ["missing-tensor"] == codes(side(), side(("w", A)))

    def test_further_name_is_extra(self):
        assert ["extra-tensor"] == codes(side(("w", A)), side())

    def test_name_that_could_not_be_read_is_not_told_twice(self):
        assert [] == codes(side(unread=frozenset({"w"})), side(("w", A)))


class TestAliases:
    TIED = (("head", "embed"),)

    def test_alias_that_a_container_dropped_is_no_difference(self):
        assert [] == codes(side(("embed", A)), side(("embed", A), ("head", A), aliases=self.TIED))

    def test_alias_that_a_container_dropped_is_no_difference_the_other_way(self):
        assert [] == codes(side(("embed", A), ("head", A), aliases=self.TIED), side(("embed", A)))

    def test_alias_with_another_digest_is_a_difference(self):
        assert ["digest-mismatch"] * 2 == codes(side(("embed", B)), side(("embed", A), ("head", A), aliases=self.TIED))

    def test_alias_of_nothing_that_is_there_is_missing(self):
        assert ["missing-tensor"] * 2 == codes(side(), side(("embed", A), ("head", A), aliases=self.TIED))

    def test_further_name_that_was_no_alias_is_extra_though_it_is_equal(self):
        assert ["extra-tensor"] == codes(side(("embed", A), ("head", A)), side(("embed", A)))


class TestAllowMissing:
    def test_names_of_one_side_are_notes(self):
        found = compare(side(("v", A), ("w", A)), side(("u", A), ("w", A)), allow_missing=True)
        assert {("missing-tensor", "note"), ("extra-tensor", "note")} == {(f.code, f.severity) for f in found}

    def test_differences_stay_errors(self):
        assert ["error"] == [f.severity for f in compare(side(("w", A)), side(("w", B)), allow_missing=True)]

    def test_sides_without_a_common_name_are_an_error(self):
        assert any(f.is_error for f in compare(side(("v", A)), side(("w", A)), allow_missing=True))


class TestOpenSide:
    def opened(self, location) -> Side:
        return open_side(str(location), algorithm="blake3", jobs=1, memory_bytes=1 << 26)

    def test_hash_list_is_taken_as_it_is(self, tmp_path):
        (tmp_path / "list.txt").write_text(f"# algorithm: sha256\n{A}  float32  [2]  w\n")
        found = self.opened(tmp_path / "list.txt")
        assert ("sha256", ("w",)) == (found.algorithm, tuple(t.name for t in found.tensors))

    def test_snapshot_is_hashed(self, tmp_path):
        (tmp_path / "w.pt").write_bytes(saved({"w": torch.ones(2)}))
        assert ("w", "float32", (2,)) == (lambda t: (t.name, t.dtype, t.shape))(self.opened(tmp_path / "w.pt").tensors[0])

    def test_text_that_is_no_list_is_refused(self, tmp_path):
        (tmp_path / "list.txt").write_text("hello\n")
        with pytest.raises(NotRecognisedError):
            self.opened(tmp_path / "list.txt")

    def test_nothing_is_not_found(self, tmp_path):
        with pytest.raises(NotFoundError):
            self.opened(tmp_path / "absent")
