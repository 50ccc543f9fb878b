"""Gather: whatever the pieces, strides, transforms, files and memory, the stream is what numpy has in row-major order."""

from __future__ import annotations

import zlib
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import BY_NAME, DType
from ckpttools.errors import ConversionError, FindingsError, StorageError
from ckpttools.gather import Gather
from ckpttools.geometry import row_major_strides, span_elements
from ckpttools.model import Box, Encoding, Extent, Piece, TensorEntry, TensorSpec
from ckpttools.storage.source import open_source, read
from tests import strategies

WHOLE_BYTES = [d for d in BY_NAME.values() if not d.is_sub_byte]


class MemorySource:
    """Files in memory that remember what was read of them."""

    location = "memory"

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.reads: list[tuple[str, int, int]] = []

    def listing(self):
        raise NotImplementedError

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        data = self.files[file][offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise StorageError("a file became shorter while it was read", where=file)
        buffer[:] = data
        self.reads.append((file, offset, len(buffer)))


def gather_of(source, tile_bytes: int = 4 << 20) -> Gather:
    """A gather with tiles as small as a test needs them; `memory_bytes` alone goes no lower than 64 KiB."""
    made = Gather(source, memory_bytes=256 << 20)
    made._tile_bytes = tile_bytes
    made._strided_tile_bytes = 2 * tile_bytes
    return made


def streamed(source, entry: TensorEntry, box: Box | None = None, *, tile_bytes: int = 4 << 20) -> bytes:
    return b"".join(bytes(tile) for tile in gather_of(source, tile_bytes).stream(entry, box))


def entry_of(dtype: str | DType, shape: tuple[int, ...], *pieces: Piece) -> TensorEntry:
    row = BY_NAME[dtype] if isinstance(dtype, str) else dtype
    return TensorEntry(TensorSpec("w", row, shape), ("w",), pieces)


def raw_values(draw, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes as an array of elements (`V`: they are moved, not looked at)."""
    count = prod(shape) * dtype.item_bytes
    data = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(count)
    return np.frombuffer(data, f"V{dtype.item_bytes}").reshape(shape)


def transformed(values: np.ndarray, dtype: DType, transforms: tuple[str, ...]) -> np.ndarray:
    """Elements as they must be stored for `transforms` to turn them into `values`: each is its own inverse."""
    components = np.frombuffer(values.tobytes(), np.uint8).reshape(-1, dtype.component_bytes).copy()
    for transform in reversed(transforms):
        if transform == "byteswap":
            components = components[:, ::-1].copy()
        elif dtype.kind in ("int", "uint"):
            components = (-components.view(f"<u{dtype.component_bytes}")).view(np.uint8)
        else:  # little-endian: the sign is the highest bit of the last byte
            components[1 if transform == "conj" else 0 :: 2 if transform == "conj" else 1, -1] ^= 0x80
    return np.frombuffer(components.tobytes(), values.dtype).reshape(values.shape)


@st.composite
def stored_pieces(draw, dtype: DType, values: np.ndarray) -> tuple[dict[str, bytes], list[Piece]]:
    """Random pieces of `values`, each stored somewhere in one of a few files with strides and transforms of its own."""
    files: dict[str, bytearray] = {name: bytearray() for name in ("a", "b", "c")}
    pieces = []
    for box in draw(strategies.partitions(values.shape)):
        transforms = tuple(draw(st.lists(st.sampled_from(_transforms(dtype)), max_size=2, unique=True)))
        part = values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        stored = transformed(np.asarray(part), dtype, transforms)
        strides = draw(_strides(box.sizes))
        span = span_elements(box.sizes, strides or row_major_strides(box.sizes))
        block = np.zeros(span, values.dtype)
        if box.volume:
            width = dtype.item_bytes
            steps = tuple(s * width for s in strides or row_major_strides(box.sizes))
            np.lib.stride_tricks.as_strided(block, box.sizes, steps)[...] = stored
        file = draw(st.sampled_from(sorted(files)))
        files[file] += b"\xee" * draw(st.integers(0, 5))
        extent = Extent(file, len(files[file]), span * dtype.item_bytes, strides, transforms)
        encoded = draw(st.booleans()) and draw(st.booleans())
        data = block.tobytes()
        if encoded:
            packer = zlib.compressobj(wbits=-15)
            packed = packer.compress(b"\xdd" * 3 + data) + packer.flush()
            encoding = Encoding("deflate", len(files[file]), len(packed))
            extent = Extent(file, 3, len(data), strides, transforms, encoding)
            data = packed
        files[file] += data
        pieces.append(Piece(box, extent))
    return {name: bytes(data) for name, data in files.items()}, pieces


def _transforms(dtype: DType) -> list[str]:
    return ["neg"] + ["byteswap"] * (dtype.component_bytes > 1) + ["conj"] * (dtype.kind == "complex")


@st.composite
def _strides(draw, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """None for a dense piece; else strides in which no two elements share a place: permuted and padded."""
    if draw(st.booleans()):
        return None
    strides, step = [0] * len(sizes), draw(st.integers(1, 3))
    for axis in draw(st.permutations(range(len(sizes)))):
        strides[axis] = step
        step = step * max(sizes[axis], 1) + draw(st.integers(0, 2))
    return tuple(strides)


@st.composite
def stored_tensors(draw):
    dtype = draw(st.sampled_from(WHOLE_BYTES))
    values = raw_values(draw, dtype, draw(strategies.shapes(max_side=6)))
    files, pieces = draw(stored_pieces(dtype, values))
    box = draw(strategies.boxes_in(values.shape))
    return dtype, values, files, pieces, box, draw(st.sampled_from([16, 48, 256, 4 << 20]))


class TestStream:
    @given(stored_tensors())
    def test_whole_tensor_is_numpys_row_major_bytes(self, drawn):
        dtype, values, files, pieces, _, tile_bytes = drawn
        source = MemorySource(**files)
        assert values.tobytes() == streamed(source, entry_of(dtype, values.shape, *pieces), tile_bytes=tile_bytes)

    @given(stored_tensors())
    def test_any_box_is_numpys_row_major_bytes_of_the_slice(self, drawn):
        dtype, values, files, pieces, box, tile_bytes = drawn
        part = values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        source = MemorySource(**files)
        assert part.tobytes() == streamed(source, entry_of(dtype, values.shape, *pieces), box, tile_bytes=tile_bytes)

    @given(stored_tensors())
    def test_no_tile_is_larger_than_the_budget_allows(self, drawn):
        dtype, values, files, pieces, _, tile_bytes = drawn
        entry = entry_of(dtype, values.shape, *pieces)
        lengths = [len(tile) for tile in gather_of(MemorySource(**files), tile_bytes).stream(entry)]
        assert max(lengths, default=0) <= max(2 * tile_bytes, dtype.item_bytes)

    @given(strategies.shapes(min_rank=1, max_side=9), st.sampled_from([8, 64, 4096]), st.data())
    def test_each_byte_of_dense_pieces_is_read_once(self, shape, tile_bytes, data):
        boxes = data.draw(strategies.partitions(shape))
        starts = np.cumsum([0, *(b.volume for b in boxes)])
        source = MemorySource(f=bytes(int(starts[-1])))
        pieces = [Piece(b, Extent("f", int(s), b.volume)) for b, s in zip(boxes, starts[:-1], strict=True)]
        # rows of a piece that a tile cuts may be read with what lies between them, so tiles are as wide as the tensor
        streamed(source, entry_of("uint8", shape, *pieces), tile_bytes=max(tile_bytes, prod(shape)))
        assert sum(length for _, _, length in source.reads) == prod(shape)

    @pytest.mark.parametrize("location", ["local", "memory"])
    def test_stored_files_are_read_through_any_source(self, location, tmp_path):
        import fsspec

        root = str(tmp_path) if location == "local" else "memory://gather-test"
        fs, path = fsspec.core.url_to_fs(root)
        fs.makedirs(path, exist_ok=True)
        for rank in range(4):
            fs.pipe_file(f"{path}/{rank}", bytes(range(rank * 6, rank * 6 + 6)))
        pieces = [Piece(Box((2 * r, 0), (2, 3)), Extent(str(r), 0, 6)) for r in range(4)]
        source, _ = open_source(root)
        assert bytes(range(24)) == streamed(source, entry_of("uint8", (8, 3), *pieces))
        assert bytes(range(6)) == read(source, "0", 0, 6)


class TestCorners:
    def test_rank_0_is_one_element(self):
        source = MemorySource(f=b"\x00\x00\xf0\x40")
        assert b"\x00\x00\xf0\x40" == streamed(source, entry_of("float32", (), Piece(Box((), ()), Extent("f", 0, 4))))

    def test_rank_0_with_transform_is_transformed(self):
        source = MemorySource(f=b"\x40\xf0\x00\x00")
        extent = Extent("f", 0, 4, transforms=("byteswap",))
        assert b"\x00\x00\xf0\x40" == streamed(source, entry_of("float32", (), Piece(Box((), ()), extent)))

    def test_rank_0_without_piece_is_uncovered_and_not_zero(self):
        with pytest.raises(FindingsError) as error:
            streamed(MemorySource(), entry_of("float32", ()))
        assert ["uncovered"] == [f.code for f in error.value.findings]

    @pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
    def test_tensor_without_elements_streams_nothing_and_reads_nothing(self, shape):
        source = MemorySource(f=b"")
        assert b"" == streamed(source, entry_of("float32", shape, Piece(Box((0,) * len(shape), shape), Extent("f", 0, 0))))
        assert [] == source.reads

    def test_tensor_without_elements_needs_no_piece(self):
        assert b"" == streamed(MemorySource(), entry_of("float32", (0, 4)))

    def test_box_without_elements_streams_nothing(self):
        entry = entry_of("uint8", (4,), Piece(Box((0,), (4,)), Extent("f", 0, 4)))
        assert b"" == streamed(MemorySource(f=b"abcd"), entry, Box((2,), (0,)))

    def test_expanded_view_repeats_its_one_element(self):
        extent = Extent("f", 1, 2, strides=(0, 0))
        source = MemorySource(f=b"-ab-")
        assert b"ab" * 12 == streamed(source, entry_of("uint16", (3, 4), Piece(Box((0, 0), (3, 4)), extent)))

    def test_expanded_view_larger_than_a_tile_repeats_too(self):
        extent = Extent("f", 0, 3, strides=(0, 1))
        entry = entry_of("uint8", (50, 3), Piece(Box((0, 0), (50, 3)), extent))
        assert b"abc" * 50 == streamed(MemorySource(f=b"abc"), entry, tile_bytes=16)

    def test_overlapping_rows_of_a_view_are_both_read(self):
        extent = Extent("f", 0, 5, strides=(1, 1))
        assert b"abcbcdcde" == streamed(MemorySource(f=b"abcde"), entry_of("uint8", (3, 3), Piece(Box((0, 0), (3, 3)), extent)))

    def test_nan_payload_and_sign_of_zero_survive_byteswap(self):
        stored = b"\x7f\xa0\x00\x01\x80\x00\x00\x00"
        extent = Extent("f", 0, 8, transforms=("byteswap",))
        assert b"\x01\x00\xa0\x7f\x00\x00\x00\x80" == streamed(
            MemorySource(f=stored), entry_of("float32", (2,), Piece(Box((0,), (2,)), extent))
        )

    def test_complex_numbers_are_swapped_by_component(self):
        extent = Extent("f", 0, 8, transforms=("byteswap",))
        entry = entry_of("complex64", (1,), Piece(Box((0,), (1,)), extent))
        assert b"\x04\x03\x02\x01\x08\x07\x06\x05" == streamed(MemorySource(f=b"\x01\x02\x03\x04\x05\x06\x07\x08"), entry)

    def test_conjugate_flips_the_sign_of_the_imaginary_part_alone(self):
        values = np.array([1 + 2j, -3 - 4j], np.complex64)
        extent = Extent("f", 0, 16, transforms=("conj",))
        entry = entry_of("complex64", (2,), Piece(Box((0,), (2,)), extent))
        assert values.conj().tobytes() == streamed(MemorySource(f=values.tobytes()), entry)

    def test_negative_flips_the_sign_of_every_component(self):
        values = np.array([1 + 2j, -3 - 4j], np.complex128)
        extent = Extent("f", 0, 32, transforms=("neg",))
        entry = entry_of("complex128", (2,), Piece(Box((0,), (2,)), extent))
        assert (-values).tobytes() == streamed(MemorySource(f=values.tobytes()), entry)

    def test_conjugate_of_bytes_in_the_other_order_is_taken_after_the_swap(self):
        values = np.array([1 + 2j], np.complex64)
        extent = Extent("f", 0, 8, transforms=("byteswap", "conj"))
        entry = entry_of("complex64", (1,), Piece(Box((0,), (1,)), extent))
        assert values.conj().tobytes() == streamed(MemorySource(f=values.view(np.float32).astype(">f4").tobytes()), entry)

    def test_negative_bit_of_an_integer_tensor_is_negation_not_a_flipped_sign_bit(self):
        values = np.array([1, -2, 0, 7], np.int32)
        extent = Extent("f", 0, 16, transforms=("neg",))
        entry = entry_of("int32", (4,), Piece(Box((0,), (4,)), extent))
        assert (-values).tobytes() == streamed(MemorySource(f=values.tobytes()), entry)


class TestHoles:
    def test_element_in_no_piece_is_a_finding(self):
        entry = entry_of("uint8", (4,), Piece(Box((0,), (3,)), Extent("f", 0, 3)))
        with pytest.raises(FindingsError) as error:
            streamed(MemorySource(f=b"abc"), entry)
        assert ["uncovered"] == [f.code for f in error.value.findings]

    def test_box_that_avoids_the_hole_is_read(self):
        entry = entry_of("uint8", (4,), Piece(Box((0,), (3,)), Extent("f", 0, 3)))
        assert b"bc" == streamed(MemorySource(f=b"abc"), entry, Box((1,), (2,)))

    def test_element_in_two_pieces_is_a_finding(self):
        pieces = [Piece(Box((0,), (3,)), Extent("f", 0, 3)), Piece(Box((2,), (2,)), Extent("f", 2, 2))]
        with pytest.raises(FindingsError) as error:
            streamed(MemorySource(f=b"abcd"), entry_of("uint8", (4,), *pieces))
        assert ["pieces-overlap"] == [f.code for f in error.value.findings]

    def test_a_hole_and_an_overlap_of_the_same_volume_do_not_cancel(self):
        pieces = [Piece(Box((0,), (3,)), Extent("f", 0, 3)), Piece(Box((1,), (2,)), Extent("f", 1, 2))]
        with pytest.raises(FindingsError):
            streamed(MemorySource(f=b"abcde"), entry_of("uint8", (5,), *pieces))

    def test_file_that_ends_early_is_an_error_that_names_it(self):
        entry = entry_of("uint8", (4,), Piece(Box((0,), (4,)), Extent("f", 0, 4)))
        with pytest.raises(StorageError) as error:
            streamed(MemorySource(f=b"abc"), entry)
        assert "f" == error.value.where


class TestSubByte:
    ENTRY = entry_of("float4_e2m1fn", (2, 4), Piece(Box((0, 0), (2, 4)), Extent("f", 1, 4)))

    def test_whole_tensor_is_its_packed_bytes(self):
        assert b"abcd" == streamed(MemorySource(f=b"-abcd"), self.ENTRY)

    def test_whole_tensor_is_read_in_tiles(self):
        assert [2, 2] == [len(tile) for tile in gather_of(MemorySource(f=b"-abcd"), 2).stream(self.ENTRY)]

    def test_part_of_it_is_refused(self):
        with pytest.raises(ConversionError):
            streamed(MemorySource(f=b"-abcd"), self.ENTRY, Box((0, 0), (1, 4)))

    def test_tensor_in_two_pieces_is_refused(self):
        pieces = [Piece(Box((i,), (2,)), Extent("f", i // 2, 1)) for i in (0, 2)]
        with pytest.raises(ConversionError):
            streamed(MemorySource(f=b"ab"), entry_of("float4_e2m1fn", (4,), *pieces))

    def test_missing_tensor_is_uncovered(self):
        with pytest.raises(FindingsError):
            streamed(MemorySource(), entry_of("float4_e2m1fn", (4,)))


class TestWatch:
    def test_it_sees_every_stored_byte_with_its_place(self):
        seen = bytearray(6)

        def watch(file, encoding, offset, view):
            seen[offset : offset + len(view)] = view

        pieces = [Piece(Box((0,), (3,)), Extent("f", 3, 3)), Piece(Box((3,), (3,)), Extent("f", 0, 3))]
        list(gather_of(MemorySource(f=b"abcdef")).stream(entry_of("uint8", (6,), *pieces), watch=watch))
        assert b"abcdef" == seen

    def test_it_sees_bytes_as_stored_not_as_transformed(self):
        seen = []
        entry = entry_of("int16", (1,), Piece(Box((0,), (1,)), Extent("f", 0, 2, transforms=("byteswap",))))
        list(gather_of(MemorySource(f=b"ab")).stream(entry, watch=lambda _f, _e, _o, view: seen.append(bytes(view))))
        assert [b"ab"] == seen


@pytest.mark.parametrize("count", [1, 5000, 300_000])
def test_tiles_of_a_given_size_are_the_same_boxes_however_a_tensor_is_stored(count):
    """`diff` reads two tensors side by side, and one of them may be a single run."""
    values = np.arange(count, dtype="<u4").tobytes()
    spec = TensorSpec("w", BY_NAME["float32"], (count,))
    half = count // 2
    pieces = [
        Piece(Box((0,), (half,)), Extent("f", 0, half * 4)),
        Piece(Box((half,), (count - half,)), Extent("f", half * 4, (count - half) * 4)),
    ]
    whole = TensorEntry(spec, ("w",), (Piece(spec.box, Extent("f", 0, count * 4)),))
    cut = TensorEntry(spec, ("w",), tuple(p for p in pieces if p.box.volume))
    tiles = [
        [bytes(t) for t in Gather(MemorySource(f=values), memory_bytes=1 << 20).stream(e, tile_bytes=40_000)]
        for e in (whole, cut)
    ]
    assert tiles[0] == tiles[1]
    assert b"".join(tiles[0]) == values
