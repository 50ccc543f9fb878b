"""The seal: it comes back as it was written, knows when it was changed, and so do hash lists of any names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.digest import TensorDigest
from ckpttools.model import Box
from ckpttools.seals import Seal, SealedFile, SealedPiece, SealError, parse_seal
from ckpttools.seals import render_seal as stretches_of
from tests import strategies

DIGEST = "ab" * 32
digests = st.integers(0, 2**256 - 1).map(lambda n: f"{n:064x}")
names = st.one_of(
    strategies.tensor_names(), st.text(max_size=12), st.sampled_from(["a\nb", "a\\nb", "\\", "\r\n", "a  b", "# x"])
)


@st.composite
def tensor_digests(draw) -> TensorDigest:
    return TensorDigest(draw(names), draw(strategies.dtypes()).name, draw(strategies.shapes()), draw(digests))


@st.composite
def seals(draw) -> Seal:
    tensors = tuple(draw(st.lists(tensor_digests(), max_size=5, unique_by=lambda t: t.name)))
    pieces = {t.name: tuple(draw(st.lists(sealed_pieces(t.shape), max_size=3))) for t in tensors}
    files = tuple(SealedFile(draw(names), draw(st.integers(0, 2**62)), draw(st.sampled_from(["", DIGEST]))) for _ in range(2))
    aliases = (("a", "b"),) if draw(st.booleans()) else ()
    step = draw(st.one_of(st.none(), st.integers(0, 10**9)))
    return Seal(draw(st.sampled_from(["blake3", "sha256"])), tensors, pieces, files, "dcp", step, aliases, {})


@st.composite
def sealed_pieces(draw, shape) -> SealedPiece:
    offset, length = draw(st.integers(0, 2**50)), draw(st.integers(0, 2**50))
    return SealedPiece(draw(names), offset, length, draw(strategies.boxes_in(shape)), draw(digests))


def render_seal(seal: Seal) -> bytes:
    """The document as a whole."""
    return b"".join(stretches_of(seal))


SEAL = Seal(
    "blake3",
    (TensorDigest("w", "float32", (2, 3), DIGEST), TensorDigest("s", "int64", (), "cd" * 32)),
    {"w": (SealedPiece("f", 64, 24, Box((0, 0), (2, 3)), DIGEST),), "s": ()},
    (SealedFile("f", 100), SealedFile("config.json", 2, "ef" * 32)),
    "torch",
    7,
)


def changed(**members: object) -> bytes:
    return json.dumps(json.loads(render_seal(SEAL)) | members).encode()


class TestSeal:
    @given(seals())
    def test_it_comes_back_as_it_was_written(self, seal):
        assert seal == parse_seal(render_seal(seal))

    @given(seals())
    def test_equal_seals_are_equal_bytes(self, seal):
        assert render_seal(seal) == render_seal(parse_seal(render_seal(seal)))

    def test_spelling_of_the_json_does_not_matter(self):
        assert SEAL == parse_seal(json.dumps(json.loads(render_seal(SEAL)), indent=7).encode())

    @pytest.mark.parametrize(
        "members",
        [
            {"algorithm": "sha256"},
            {"layout": "dcp"},
            {"step": 8},
            {"files": []},
            {"tensors": []},
            {"aliases": [["a", "b"]]},
            {"seal_digest": "0" * 64},
            {"seal_digest": None},
            {"more": 1},
        ],
        ids=str,
    )
    def test_changed_member_breaks_it(self, members):
        with pytest.raises(SealError) as error:
            parse_seal(changed(**members))
        assert error.value.is_broken

    @given(st.data())
    def test_changed_character_is_an_error_or_no_change(self, data):
        text = bytearray(render_seal(SEAL))
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.integers(0, 255))
        try:
            found = parse_seal(bytes(text))
        except SealError:
            return
        assert SEAL == found

    @given(st.integers(0, len(render_seal(SEAL)) - 1))
    def test_cut_seal_is_an_error(self, length):
        if render_seal(SEAL)[length:].strip():
            with pytest.raises(SealError):
                parse_seal(render_seal(SEAL)[:length])

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"{}",
            b"[]",
            b"null",
            b"{" * 100_000,
            b"\xff\xfe",
            b'{"schema": "ckpttools/seal/2"}',
            b'{"schema": "ckpttools/hash/1"}',
        ],
        ids=lambda d: ascii(d[:20]),
    )
    def test_what_is_no_seal_is_an_error(self, data):
        with pytest.raises(SealError):
            parse_seal(data)

    @pytest.mark.parametrize(
        "row",
        [
            {"name": 5},
            {"dtype": None},
            {"shape": "23"},
            {"shape": [-1]},
            {"shape": [True]},
            {"shape": [1.0]},
            {"digest": "AB" * 32},
            {"digest": "ab"},
            {"digest": 5},
        ],
        ids=str,
    )
    def test_row_of_a_hash_list_that_is_none_is_an_error(self, row):
        good = {"name": "w", "dtype": "float32", "shape": [2], "digest": DIGEST}
        document = {"schema": "ckpttools/hash/1", "algorithm": "blake3", "tensors": [good | row]}
        with pytest.raises(SealError):
            parse_seal(json.dumps(document).encode())

    @pytest.mark.parametrize("algorithm", ["md5", "", 5, None])
    def test_algorithm_that_is_not_known_is_an_error(self, algorithm):
        document = {"schema": "ckpttools/hash/1", "algorithm": algorithm, "tensors": []}
        with pytest.raises(SealError):
            parse_seal(json.dumps(document).encode())


class TestLines:
    @given(st.lists(tensor_digests(), min_size=1, max_size=5))
    def test_lines_come_back_as_they_were_written(self, tensors):
        text = "".join(t.listed_line + "\n" for t in tensors)
        assert tuple(tensors) == parse_seal(text.encode("utf-8", "surrogatepass")).tensors

    def test_name_with_a_lone_surrogate_comes_back(self):
        tensor = TensorDigest("a\udce9", "float32", (), DIGEST)
        assert (tensor,) == parse_seal(tensor.listed_line.encode("utf-8", "surrogatepass")).tensors

    def test_algorithm_is_told_by_a_comment(self):
        text = f"# algorithm: sha256\n# made by hand\n\n{DIGEST}  float32  []  w\n"
        assert "sha256" == parse_seal(text.encode()).algorithm

    def test_line_of_the_fingerprint_is_no_tensor(self):
        text = f"{DIGEST}  float32  [2,3]  w\n{DIGEST}  fingerprint\n"
        assert 1 == len(parse_seal(text.encode()).tensors)

    def test_name_may_have_two_spaces_in_it(self):
        assert "a  b" == parse_seal(f"{DIGEST}  float32  []  a  b\n".encode()).tensors[0].name

    @pytest.mark.parametrize(
        "line",
        ["nonsense", f"{DIGEST}  w", f"{DIGEST}  float32  2,3  w", f"{DIGEST}  float32  [x]  w", f"{DIGEST[1:]}  float32  []  w"],
    )
    def test_line_that_is_none_is_an_error_with_its_number(self, line):
        with pytest.raises(SealError, match="line 2"):
            parse_seal(f"{DIGEST}  float32  []  w\n{line}\n".encode())

    def test_bytes_that_are_no_text_are_an_error(self):
        with pytest.raises(SealError):
            parse_seal(b"\xff\xfe\x00")

    def test_unknown_algorithm_in_a_comment_is_an_error(self):
        with pytest.raises(SealError):
            parse_seal(f"# algorithm: md5\n{DIGEST}  float32  []  w\n".encode())


class TestSealedSnapshots:
    """Through the command line: what a seal finds afterwards."""

    @pytest.fixture
    def sealed(self, ckpttools, copy_of):
        copied = copy_of("torch/dcp_fsdp2_w2/ckpt")
        assert 0 == ckpttools("seal", copied).exit_code
        return copied

    def test_sealed_snapshot_is_ok(self, ckpttools, sealed):
        assert "ok" == ckpttools("validate", sealed, "--json").document["verdict"]

    def test_changed_seal_is_broken(self, ckpttools, sealed):
        seal = sealed / "ckpttools-seal.json"
        seal.write_text(seal.read_text().replace('"step"', '"stop"'))
        assert "seal-broken" in ckpttools("validate", sealed, "--json").codes

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"{" * 100_000])
    def test_seal_that_is_none_is_broken(self, ckpttools, sealed, content):
        (sealed / "ckpttools-seal.json").write_bytes(content)
        assert "seal-broken" in ckpttools("validate", sealed, "--json").codes

    def test_further_file_is_a_warning(self, ckpttools, sealed):
        (sealed / "notes.txt").write_text("x")
        answer = ckpttools("validate", sealed, "--json")
        assert ({"unlisted-file"}, 0) == (answer.codes, answer.exit_code)

    def test_file_that_is_gone_is_missing_at_every_depth(self, ckpttools, sealed):
        (sealed / "__1_0.distcp").unlink()
        assert "missing-file" in ckpttools("validate", sealed, "--depth", "commit", "--json").codes
