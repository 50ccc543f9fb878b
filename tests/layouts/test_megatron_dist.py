"""Megatron-core's distributed checkpoints, and NeMo's directories of them."""

from __future__ import annotations

import json
import pickle
import shutil
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.layouts import open_snapshot
from ckpttools.layouts.megatron_dist.buckets import mask_gaps
from ckpttools.layouts.megatron_dist.flattened import unflatten
from ckpttools.model import VOID, Box, Extent, Piece, TensorEntry, TensorSpec
from ckpttools.operations.scan import scan
from ckpttools.operations.sealing import hash_tensors
from ckpttools.operations.validate import validate
from tests.fixture_cases import FIXTURES, Case
from tests.layouts.contract import LayoutContract, codes

FLATTENED = "tdist_tp2_dp2_flattened"
BUCKETS = "tdist_tp2_dp2_distopt_dp_reshardable"


def snapshot(name: str) -> Path:
    return next(Case("megatron", name).targets()).path


def digests(path: Path) -> dict[str, str]:
    return {t.name: t.digest for t in hash_tensors(str(path), algorithm="sha256").tensors}


class TestContract(LayoutContract):
    layout = "megatron_dist"
    family = "megatron"
    cases = (
        "tdist_tp2_model_only",
        "tdist_ep2_moe",
        "tdist_pp2_tied_gelu_bias",
        "tdist_tp2_pp2_two_iters",
        "tdist_tp2_dp2_distopt_fully_reshardable",
        BUCKETS,
        FLATTENED,
    )
    harmed = ("tdist_tp2_dp2_distopt_fully_reshardable", "__1_1.distcp")


class TestZarrContract(LayoutContract):
    layout = "megatron_dist"
    family = "megatron"
    cases = ("zarr_tp2_pp2",)
    harmed = ("zarr_tp2_pp2", "decoder.layers.mlp.linear_fc1.weight/1.2.0")

    def test_zeroed_data_file_is_found(self, data_file, copied):
        """zarr has no checksums: only values tell."""
        before = digests(copied)
        data_file.write_bytes(bytes(data_file.stat().st_size))
        name = "decoder.layers.mlp.linear_fc1.weight"
        assert ("ok", True) == (validate(str(copied)).verdict, digests(copied)[name] != before[name])


@pytest.fixture
def torch_dist(copy_of) -> Path:
    return copy_of(snapshot("tdist_ep2_moe"))


class TestFiles:
    def test_mesh_step_and_writer_come_from_the_shared_state(self):
        checkpoint = open_snapshot(str(snapshot("tdist_ep2_moe"))).checkpoint
        assert ("tp=1,pp=1,ep=2,dp=1", 10) == (str(checkpoint.mesh), checkpoint.step)
        assert checkpoint.written_by.startswith("megatron-core torch_dist")

    def test_random_states_and_scales_are_no_weights(self, ckpttools, tmp_path):
        answer = ckpttools("consolidate", snapshot("tdist_ep2_moe"), tmp_path / "out.safetensors")
        assert answer.exit_code == 0, answer.said
        listed = ckpttools("inspect", tmp_path / "out.safetensors", "--tensors", "--json").document["tensors"]
        assert [] == [t["name"] for t in listed if "rng" in t["name"] or "_extra_state" in t["name"]]

    @pytest.mark.parametrize("directory", ["weights", "model_weights"])
    def test_directories_of_nemo_hold_the_same(self, tmp_path, directory):
        shutil.copytree(snapshot("tdist_tp2_model_only"), tmp_path / "step=10" / directory)
        (tmp_path / "step=10" / "context").mkdir()
        (tmp_path / "step=10" / "context" / "model.yaml").write_text("a: 1\n")
        checkpoint = open_snapshot(str(tmp_path / "step=10")).checkpoint
        assert "megatron_dist" == checkpoint.layout
        assert digests(tmp_path / "step=10") == digests(snapshot("tdist_tp2_model_only"))
        assert ["context/model.yaml"] == [f.path for f in checkpoint.files if f.role == "companion"]

    def test_without_metadata_json_it_is_not_committed(self, torch_dist):
        (torch_dist / "metadata.json").unlink()
        result = validate(str(torch_dist), depth="commit")
        assert ("incomplete", {"not-committed"}) == (result.verdict, codes(result))

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"sharded_backend": "x"}', '{"sharded_backend": 1, "sharded_backend": 2}'])
    def test_metadata_json_that_says_nothing_is_damage(self, torch_dist, text):
        (torch_dist / "metadata.json").write_text(text)
        result = validate(str(torch_dist), depth="commit")
        assert ("damaged", True) == (result.verdict, bool(codes(result) & {"empty-file", "bad-json", "bad-container"}))

    def test_only_metadata_json_left_is_not_committed(self, torch_dist):
        for path in torch_dist.iterdir():
            if path.name not in ("metadata.json", "common.pt"):
                path.unlink()
        assert "not-committed" in codes(validate(str(torch_dist)))

    def test_without_common_pt_all_the_rest_is_read(self, torch_dist):
        (torch_dist / "common.pt").unlink()
        result = validate(str(torch_dist))
        assert ("ok", "megatron_dist") == (result.verdict, open_snapshot(str(torch_dist)).checkpoint.layout)

    def test_shared_state_as_an_item_tells_mesh_and_step(self, tmp_path):
        args = Namespace(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, data_parallel_size=3)
        state = {"w": torch.ones(2), "common_state/shard_0_1": [{"args": args, "iteration": 7}]}
        dcp.save(state, checkpoint_id=tmp_path / "a", planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
        (tmp_path / "a" / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        checkpoint = open_snapshot(str(tmp_path / "a"), is_located=True).checkpoint
        assert ("tp=4,pp=2,dp=3", 7) == (str(checkpoint.mesh), checkpoint.step)

    def test_fsdp_dtensor_is_a_dcp_directory(self, tmp_path):
        model = {"module.decoder.layers.0.mlp.linear_fc1.weight": torch.arange(6.0).reshape(2, 3)}
        state = {"args": Namespace(iteration=5), "checkpoint_version": 3.0, "iteration": 5, "model": model}
        dcp.save(state, checkpoint_id=tmp_path / "iter_0000005")
        result = validate(str(tmp_path / "iter_0000005"))
        assert ("ok", 5) == (result.verdict, open_snapshot(str(tmp_path / "iter_0000005")).checkpoint.step)


def edit_metadata(directory: Path, change) -> None:
    """Rewrite `.metadata`, trusted as it is our own fixture."""
    pytest.importorskip("megatron.core", reason="needs megatron-core, whose classes the manifest names")
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


class TestFlattened:
    @pytest.mark.interop
    def test_without_mcore_data_the_parameter_tells_the_shape(self, copy_of):
        directory = copy_of(snapshot(FLATTENED))
        edit_metadata(directory, lambda m: m.__dict__.pop("mcore_data"))
        assert digests(snapshot(FLATTENED)) == digests(directory)

    @pytest.mark.interop
    @pytest.mark.parametrize("shape", [(2, 33, 48), (32, 48), (2, 32, 48, 1), (4, 16, 48), (0, 32, 48)], ids=str)
    def test_shape_that_does_not_fit_is_a_mismatch(self, copy_of, shape):
        directory = copy_of(snapshot(FLATTENED))
        name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
        edit_metadata(directory, lambda m: m.mcore_data[name].update(nd_reformulated_orig_global_shape=shape))
        assert "piece-mismatch" in codes(validate(str(directory), depth="commit"))

    @pytest.mark.interop
    @pytest.mark.parametrize("value", [5, {}, {"a": 1}, {1: {}}, [], {"a": {"nd_reformulated_orig_global_shape": "x"}}], ids=str)
    def test_mcore_data_of_another_form_is_passed_over(self, copy_of, value):
        directory = copy_of(snapshot(FLATTENED))
        edit_metadata(directory, lambda m: setattr(m, "mcore_data", value))
        assert "ok" == validate(str(directory), depth="structure").verdict

    @given(st.data())
    def test_every_element_lands_where_its_fragment_has_it(self, data):
        fragments = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        local = data.draw(st.lists(st.integers(1, 4), min_size=len(fragments), max_size=len(fragments)))
        shape = tuple(f * n for f, n in zip(fragments, local, strict=True))
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        flat = torch.Size(local).numel()
        cuts = sorted({0, flat, *data.draw(st.lists(st.integers(0, flat), max_size=3))})
        pieces = [
            Piece(Box((*index, start), (*(1 for _ in index), stop - start)), Extent("f", 0, 1, container="torch"))
            for index in torch.cartesian_prod(*map(torch.arange, fragments)).reshape(-1, len(fragments)).tolist()
            for start, stop in pairwise(cuts)
        ]
        name = "optimizer.state.exp_avg.w"
        entry = TensorEntry(TensorSpec(name, parse_dtype("float32"), (*fragments, flat)), (name,), tuple(pieces))
        (true,), findings = unflatten([entry], {name: shape})
        assert ([], shape) == (findings, true.spec.shape)
        rebuilt = torch.full(shape, -1)
        by_item = {p.box: p for p in pieces}
        for piece in true.pieces:
            fragment = tuple(o // n for o, n in zip(piece.box.offsets, local, strict=True))
            part = whole[tuple(slice(i * n, i * n + n) for i, n in zip(fragment, local, strict=True))].reshape(-1)
            item = next(
                b
                for b in by_item
                if b.offsets[:-1] == fragment and b.sizes == piece.extent.part.shape and self._holds(b, piece, local)
            )
            stored = part[item.offsets[-1] : item.stops[-1]]
            window = tuple(slice(o, s) for o, s in zip(piece.box.offsets, piece.box.stops, strict=True))
            first = piece.extent.part.first
            rebuilt[window] = stored[first : first + piece.box.volume].reshape(piece.box.sizes)
        assert torch.equal(whole, rebuilt)

    @staticmethod
    def _holds(item: Box, piece: Piece, local: list[int]) -> bool:
        """Whether the first element of a piece is in an item."""
        place = 0
        for o, n in zip(piece.box.offsets, local, strict=True):
            place = place * n + o % n
        return item.offsets[-1] <= place < item.stops[-1]


def bucket(*chunks: tuple[int, int, int]) -> TensorEntry:
    """A bucket of (start, stop, rank) chunks."""
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    pieces = tuple(Piece(Box((a,), (b - a,)), Extent("f", a, b - a, container="torch"), rank) for a, b, rank in chunks)
    return TensorEntry(TensorSpec(name, parse_dtype("float32"), (chunks[-1][1],)), (name,), pieces)


def masked(*chunks: tuple[int, int, int]) -> tuple[list[tuple[int, int]], set[str]]:
    """The chunks that are told to be gaps, and the severities of what is said."""
    (entry,), findings = mask_gaps([bucket(*chunks)], ".metadata")
    gaps = [(p.box.offsets[0], p.box.stops[0]) for p in entry.pieces if VOID in p.extent.transforms]
    return gaps, {f.severity for f in findings}


class TestBuckets:
    def test_gaps_of_the_fixture_count_as_zeros(self):
        entry = next(t for t in open_snapshot(str(snapshot(BUCKETS))).checkpoint if t.name.endswith("bucket_idx_0.param"))
        gaps = [p.box for p in entry.pieces if VOID in p.extent.transforms]
        assert (10, {32}) == (len(gaps), {b.sizes[0] for b in gaps})

    def test_digests_do_not_depend_on_the_bytes_in_gaps(self, copy_of):
        directory = copy_of(snapshot(BUCKETS))
        opened = open_snapshot(str(directory), is_located=True)
        before = scan(opened.source, opened.checkpoint).digests
        for entry in opened.checkpoint:
            for piece in entry.pieces:
                if VOID in piece.extent.transforms:
                    path = directory / piece.extent.file
                    data = bytearray(path.read_bytes())
                    stop = piece.extent.offset + piece.extent.length
                    data[piece.extent.offset : stop] = b"\x55" * piece.extent.length
                    path.write_bytes(data)
        assert before == scan(opened.source, opened.checkpoint).digests

    def test_it_is_said_how_many_elements_count_as_zeros(self):
        (finding,) = [f for f in validate(str(snapshot(BUCKETS))).findings if f.code == "undefined-elements"]
        assert finding.found.startswith("1920 in 60 gaps of 6 tensors")

    def test_parameter_that_goes_on_in_the_next_share_is_none(self):
        assert masked((0, 96, 0), (96, 192, 1)) == ([], set())

    def test_gap_that_goes_on_in_the_next_share_is_one(self):
        assert masked((0, 70, 0), (70, 96, 0), (96, 128, 1), (128, 200, 1)) == ([(70, 96), (96, 128)], {"note"})

    def test_end_of_a_parameter_before_a_gap_in_the_next_share_is_none(self):
        assert masked((0, 96, 0), (96, 100, 1), (100, 128, 1), (128, 200, 1)) == ([(100, 128)], {"note"})

    def test_what_may_be_either_is_kept_and_told(self):
        assert masked((0, 96, 0), (96, 128, 1), (128, 200, 1)) == ([], {"warning"})

    @given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.sampled_from([1, 2, 4, 8, 16]))
    def test_no_parameter_is_ever_taken_for_a_gap(self, volumes, ranks):
        """Buckets laid out as megatron-core does it, cut into shares."""
        params, stop = [], 0
        for volume in volumes:
            start = -(-stop // 64) * 64
            stop = start + volume
            params.append((start, stop))
        share = -(-stop // 128) * 128 // ranks
        edges = sorted({0, stop, *(e for p in params for e in p), *range(0, stop, share)})
        chunks = [(a, b, a // share) for a, b in pairwise(edges)]
        gaps, _ = masked(*chunks)
        real = [(a, b) for a, b, _ in chunks if not any(s <= a and b <= e for s, e in params)]
        assert set(gaps) <= set(real)
        if ranks <= 2:  # shares end at multiples of 64
            assert set(gaps) == set(real)


class TestZarr:
    def array(self, tmp_path: Path, files: dict[str, bytes], /, **metadata: object) -> Path:
        stated = {"zarr_format": 2, "shape": [3, 4], "chunks": [2, 4], "dtype": "<i4", "order": "C", "compressor": None}
        (tmp_path / "s" / "w").mkdir(parents=True)
        (tmp_path / "s" / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
        (tmp_path / "s" / "w" / ".zarray").write_text(json.dumps(stated | {"fill_value": None, "filters": None} | metadata))
        for name, data in files.items():
            (tmp_path / "s" / "w" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "s" / "w" / name).write_bytes(data)
        return tmp_path / "s"

    def expected(self, values: torch.Tensor) -> str:
        import hashlib

        return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()

    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("dtype", ["<i4", ">i4"])
    @pytest.mark.parametrize("separator", [".", "/"])
    def test_edge_chunks_in_every_order_are_put_together(self, tmp_path, order, dtype, separator):
        whole = torch.arange(15, dtype=torch.int32).reshape(3, 5)
        padded = torch.full((4, 6), -1, dtype=torch.int32)
        padded[:3, :5] = whole
        chunks = {}
        for i in range(2):
            for j in range(3):
                part = padded[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].numpy().astype(dtype)
                chunks[f"{i}{separator}{j}"] = part.tobytes(order)
        path = self.array(tmp_path, chunks, shape=[3, 5], chunks=[2, 2], order=order, dtype=dtype, dimension_separator=separator)
        assert ("ok", {"w": self.expected(whole)}) == (validate(str(path)).verdict, digests(path))

    @pytest.mark.parametrize("name", ["rank 0", "empty"])
    def test_shapes_at_the_edge_of_reason(self, tmp_path, name):
        stated = {"shape": [], "chunks": []} if name == "rank 0" else {"shape": [0, 4], "chunks": [1, 4]}
        path = self.array(tmp_path, {"0": b"\5\0\0\0"} if name == "rank 0" else {}, **stated)
        assert "ok" == validate(str(path)).verdict

    def test_absent_chunk_is_damage_and_not_fill_values(self, tmp_path):
        path = self.array(tmp_path, {"0.0": bytes(32)}, fill_value=0)
        result = validate(str(path))
        assert ("incomplete", {"missing-file", "uncovered"}) == (result.verdict, codes(result))
        assert any("w/1.0" in f.where for f in result.findings)

    def test_grid_of_more_chunks_than_there_are_atoms_ends(self, tmp_path):
        path = self.array(tmp_path, {"0.0": bytes(4)}, shape=[2**40, 2**20], chunks=[1, 1])
        result = validate(str(path))
        assert ("incomplete", True) == (result.verdict, len(result.findings) < 30)

    @pytest.mark.parametrize(
        ("stated", "code"),
        [
            ({"zarr_format": 3}, "unsupported-container"),
            ({"compressor": {"id": "blosc"}}, "unsupported-container"),
            ({"filters": [{"id": "delta"}]}, "unsupported-container"),
            ({"dtype": "<V2"}, "unknown-dtype"),
            ({"dtype": [["a", "<i4"]]}, "unknown-dtype"),
            ({"order": "K"}, "bad-container"),
            ({"order": ["C"]}, "bad-container"),
            ({"chunks": [0, 4]}, "bad-container"),
            ({"chunks": [2]}, "bad-container"),
            ({"shape": [3, -4]}, "bad-container"),
            ({"shape": [3, True]}, "bad-container"),
            ({"shape": "34"}, "bad-container"),
            ({"shape": [2**80, 4]}, "bad-container"),
        ],
        ids=str,
    )
    def test_metadata_that_cannot_be_followed_is_told(self, tmp_path, stated, code):
        path = self.array(tmp_path, {"0.0": bytes(32), "1.0": bytes(32)}, **stated)
        assert code in codes(validate(str(path)))

    def test_chunk_that_is_longer_is_told(self, tmp_path):
        path = self.array(tmp_path, {"0.0": bytes(33), "1.0": bytes(32)})
        assert "trailing-bytes" in codes(validate(str(path)))

    def test_chunk_outside_of_the_grid_is_a_note(self, tmp_path):
        path = self.array(tmp_path, {"0.0": bytes(32), "1.0": bytes(32), "7.0": bytes(32)})
        result = validate(str(path))
        assert ("ok", {"unreferenced-file"}) == (result.verdict, codes(result))

    def test_object_of_a_grid_that_is_absent_is_missing(self, copy_of):
        directory = copy_of(snapshot("zarr_tp2_pp2"))
        (directory / "rng_state" / "shard_1.0_2.2.pt").unlink()
        result = validate(str(directory))
        assert ["rng_state/shard_1.0_2.2.pt"] == [f.where for f in result.findings if f.code == "missing-file"]

    def test_without_metadata_json_it_is_not_committed(self, copy_of):
        directory = copy_of(snapshot("zarr_tp2_pp2"))
        (directory / "metadata.json").unlink()
        assert {"not-committed"} == codes(validate(str(directory)))


class TestRuns:
    def test_release_stands_for_its_run(self, ckpttools, tmp_path):
        shutil.copytree(snapshot("tdist_tp2_model_only"), tmp_path / "run" / "release")
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
        answer = ckpttools("latest", tmp_path / "run")
        assert (0, "release") == (answer.exit_code, Path(answer.stdout.strip()).name)
        assert 0 == ckpttools("validate", tmp_path / "run").exit_code

    def test_release_that_is_not_there_dangles(self, ckpttools, tmp_path):
        shutil.copytree(snapshot("tdist_tp2_model_only"), tmp_path / "run" / "iter_0000010")
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
        answer = ckpttools("status", tmp_path / "run", "--json")
        assert (1, True) == (answer.exit_code, "tracker" in answer.said and "release" in answer.said)

    def test_unfinished_zarr_is_passed_over(self, ckpttools, tmp_path):
        for step in (10, 20):
            shutil.copytree(snapshot("zarr_tp2_pp2"), tmp_path / "run" / f"iter_{step:07d}")
        (tmp_path / "run" / "iter_0000020" / "metadata.json").unlink()
        assert "iter_0000010" == Path(ckpttools("latest", tmp_path / "run").stdout.strip()).name


def test_fixture_of_every_distributed_kind_is_read():
    kinds = {json.loads(p.read_text())["kind"] for p in (FIXTURES / "megatron").glob("*/truth.json")}
    assert {"torch_dist", "zarr"} <= kinds


def test_object_that_holds_tensors_goes_over_whole(ckpttools, tmp_path):
    source = FIXTURES / "torch" / "dcp_overwritten_stale_files" / "ckpt"
    answer = ckpttools("reshard", source, tmp_path / "out", "--to", "megatron-dist", "--mesh", "fsdp=2", "--drop")
    assert answer.exit_code == 0, answer.said
    assert ckpttools("validate", tmp_path / "out").exit_code == 0
    assert digests(source)["tuple.1"] == digests(tmp_path / "out")["tuple.1"]
