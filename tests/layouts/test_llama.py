"""Meta's files of Llama: as Meta's own code cuts and saves them, and as we write them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from ckpttools.errors import ConversionError
from ckpttools.layouts import open_snapshot
from ckpttools.layouts.llama import arrange_ranks
from ckpttools.model import ObjectEntry
from ckpttools.operations.reshard import reshard
from ckpttools.operations.validate import validate
from ckpttools.placement.local import Cut
from tests.layouts.contract import codes
from tests.placement_cases import BF16, FP32, Tensors, assert_round_trip, mesh_of, place, values_of, write
from tests.unit.containers.torch_bytes import as_torch, streamed

torch = pytest.importorskip("torch")
ROWS, COLUMNS = Cut("tp", 0), Cut("tp", 1)
DIM, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 16, 4, 2, 24, 40
HEAD = DIM // HEADS
PARAMS = {"dim": DIM, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "n_layers": 2, "vocab_size": -1, "norm_eps": 1e-5}


def shapes() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """name -> global shape, and the dimension that Llama 1 and 2 cut."""
    found: dict[str, tuple[tuple[int, ...], int | None]] = {"tok_embeddings.weight": ((VOCABULARY, DIM), 1)}
    for layer in range(2):
        prefix = f"layers.{layer}."
        found |= {
            f"{prefix}attention.wq.weight": ((DIM, DIM), 0),
            f"{prefix}attention.wk.weight": ((KV_HEADS * HEAD, DIM), 0),
            f"{prefix}attention.wv.weight": ((KV_HEADS * HEAD, DIM), 0),
            f"{prefix}attention.wo.weight": ((DIM, DIM), 1),
            f"{prefix}feed_forward.w1.weight": ((HIDDEN, DIM), 0),
            f"{prefix}feed_forward.w2.weight": ((DIM, HIDDEN), 1),
            f"{prefix}feed_forward.w3.weight": ((HIDDEN, DIM), 0),
            f"{prefix}attention_norm.weight": ((DIM,), None),
            f"{prefix}ffn_norm.weight": ((DIM,), None),
        }
    return found | {"norm.weight": ((DIM,), None), "output.weight": ((VOCABULARY, DIM), 0), "rope.freqs": ((HEAD // 2,), None)}


def a_model() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    return {n: torch.randn(shape, generator=chance).to(torch.bfloat16) for n, (shape, _) in shapes().items()}


def save_as_meta_does(
    directory: Path, ranks: int, *, embeddings: int | None = 1, params: dict[str, object] | None = None
) -> dict[str, torch.Tensor]:
    """A file per rank, all tensors of which are views of one storage."""
    whole = a_model()
    for rank in range(ranks):
        own = {}
        for name, (_, dim) in shapes().items():
            dim = embeddings if name.startswith("tok_") else dim
            # fewer heads of keys and values than ranks: neighbours have the same ones
            parts = min(ranks, KV_HEADS) if ".wk." in name or ".wv." in name else ranks
            own[name] = whole[name] if dim is None else whole[name].chunk(parts, dim)[rank * parts // ranks]
        flat = torch.cat([t.reshape(-1) for t in own.values()])
        place = 0
        for name, tensor in own.items():
            own[name] = flat[place : place + tensor.numel()].view(tensor.shape)
            place += tensor.numel()
        torch.save(own, directory / f"consolidated.{rank:02d}.pth")
    if params is not None:
        (directory / "params.json").write_text(json.dumps(params))
    (directory / "tokenizer.model").write_bytes(b"tokens")
    return whole


class TestMetas:
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    @pytest.mark.parametrize("embeddings", [0, 1, None])
    @pytest.mark.parametrize("params", [PARAMS, PARAMS | {"vocab_size": VOCABULARY}])
    def test_tensors_of_all_ranks_are_the_whole_ones(self, tmp_path, ranks, embeddings, params):
        whole = save_as_meta_does(tmp_path, ranks, embeddings=embeddings, params=params)
        snapshot = open_snapshot(str(tmp_path), is_located=True)
        assert [] == list(snapshot.checkpoint.findings)
        assert ("llama", f"tp={ranks}") == (snapshot.checkpoint.layout, str(snapshot.checkpoint.mesh))
        assert {name: as_torch(t) for name, t in whole.items()} == streamed(snapshot)
        assert "ok" == validate(str(tmp_path)).verdict

    def test_without_parameters_the_number_of_ranks_is_not_proved(self, tmp_path):
        whole = save_as_meta_does(tmp_path, 2)
        snapshot = open_snapshot(str(tmp_path), is_located=True)
        assert ["completeness-unproved"] == [f.code for f in snapshot.checkpoint.findings]
        assert {name: as_torch(t) for name, t in whole.items()} == streamed(snapshot)

    @pytest.mark.parametrize("lost", [0, 1, 3])
    def test_a_missing_rank_is_seen_the_last_one_too(self, tmp_path, lost):
        save_as_meta_does(tmp_path, 4, params=PARAMS)
        (tmp_path / f"consolidated.{lost:02d}.pth").unlink()
        result = validate(str(tmp_path))
        assert ("incomplete", True) == (result.verdict, {"missing-rank", "uncovered"} <= codes(result))

    def test_one_file_too_many_is_seen(self, tmp_path):
        save_as_meta_does(tmp_path, 2, params=PARAMS)
        (tmp_path / "consolidated.02.pth").write_bytes((tmp_path / "consolidated.01.pth").read_bytes())
        assert "rank-mismatch" in codes(validate(str(tmp_path)))

    def test_norms_that_differ_are_seen(self, tmp_path):
        save_as_meta_does(tmp_path, 2, params=PARAMS)
        path = tmp_path / "consolidated.01.pth"
        state = torch.load(path, weights_only=True)
        state["norm.weight"] += 1
        torch.save(state, path)
        assert {"replica-mismatch"} == codes(validate(str(tmp_path)))

    def test_tensors_of_other_shapes_or_lacking_are_seen(self, tmp_path):
        save_as_meta_does(tmp_path, 2, params=PARAMS)
        path = tmp_path / "consolidated.01.pth"
        state = torch.load(path, weights_only=True)
        del state["output.weight"]
        state["norm.weight"] = torch.ones(3)
        torch.save(state, path)
        assert {"rank-mismatch", "uncovered"} <= codes(validate(str(tmp_path)))

    def test_a_name_without_a_rule_is_listed_rank_by_rank(self, tmp_path):
        save_as_meta_does(tmp_path, 2, params=PARAMS)
        for rank in range(2):
            path = tmp_path / f"consolidated.{rank:02d}.pth"
            torch.save(torch.load(path, weights_only=True) | {"layers.0.extra.weight": torch.full((2,), rank)}, path)
        result = validate(str(tmp_path))
        assert ("damaged", {"no-rule"}) == (result.verdict, codes(result))
        names = {t.name for t in open_snapshot(str(tmp_path)).checkpoint}
        assert {"rank_0.layers.0.extra.weight", "rank_1.layers.0.extra.weight"} <= names

    def test_embeddings_that_fit_no_rule_are_not_guessed(self, tmp_path):
        save_as_meta_does(tmp_path, 2, params=PARAMS)
        for rank in range(2):
            path = tmp_path / f"consolidated.{rank:02d}.pth"
            torch.save(torch.load(path, weights_only=True) | {"tok_embeddings.weight": torch.ones(VOCABULARY, 5)}, path)
        assert {"no-rule"} == codes(validate(str(tmp_path)))

    def test_a_file_named_by_itself_is_what_it_holds(self, tmp_path):
        save_as_meta_does(tmp_path, 2, params=PARAMS)
        checkpoint = open_snapshot(str(tmp_path / "consolidated.01.pth")).checkpoint
        assert ("torch", (DIM // 2, DIM)) == (checkpoint.layout, checkpoint.by_name["layers.0.attention.wq.weight"].spec.shape)

    @pytest.mark.parametrize("params", [b"", b"[]", b"{", b'{"dim": "x", "n_heads": 0}', b'{"dim": 1e999}'])
    def test_parameters_that_are_none_are_not_believed(self, tmp_path, params):
        save_as_meta_does(tmp_path, 2)
        (tmp_path / "params.json").write_bytes(params)
        assert codes(validate(str(tmp_path))) <= {"bad-json", "completeness-unproved"}

    def test_damaged_files_are_findings(self, tmp_path):
        save_as_meta_does(tmp_path, 2, params=PARAMS)
        (tmp_path / "consolidated.00.pth").write_bytes(b"")
        (tmp_path / "consolidated.01.pth").write_bytes(b"PK\x03\x04 no archive")
        assert "damaged" == validate(str(tmp_path)).verdict


def placed_model(embeddings: Cut = COLUMNS) -> Tensors:
    cuts = {0: (ROWS,), 1: (COLUMNS,), None: ()}
    return {
        name: (BF16, shape, (embeddings,) if name.startswith("tok_") else cuts[dim]) for name, (shape, dim) in shapes().items()
    }


class TestReshard:
    @pytest.mark.parametrize("embeddings", [0, 1])
    @pytest.mark.parametrize(
        "steps", [("llama tp=1", "llama tp=2"), ("dcp tp=2,fsdp=2", "llama tp=2"), ("vllm tp=2", "llama tp=1")]
    )
    def test_meta_s_files_survive_other_meshes_and_layouts(self, tmp_path, embeddings, steps):
        directory = tmp_path / "meta"
        directory.mkdir()
        save_as_meta_does(directory, 2, embeddings=embeddings, params=PARAMS | {"vocab_size": VOCABULARY})
        before = values_of(directory)
        for i, step in enumerate(steps):
            target, mesh = step.split(" ")
            reshard(str(directory), str(tmp_path / str(i)), target=target, mesh=mesh_of(mesh))
            directory = tmp_path / str(i)
            assert before == values_of(directory)
            assert (directory / "params.json").exists()


class TestOurs:
    @pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "dp=1,tp=2"])
    @pytest.mark.parametrize("embeddings", [ROWS, COLUMNS])
    def test_what_is_written_is_read_back_whole_and_each_file_is_a_rank_s(self, tmp_path, mesh, embeddings):
        written = write(tmp_path, place(placed_model(embeddings)), mesh_of(mesh), arrange_ranks)
        assert_round_trip(written, "llama")
        for rank in range(mesh_of(mesh).ranks):
            state = torch.load(written.directory / f"consolidated.{rank:02d}.pth", map_location="cpu", weights_only=True)
            own = {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in state.items()}
            assert {name: written.local_bytes(name, rank) for name in placed_model()} == own

    def test_without_our_note_meta_s_rules_give_the_same(self, tmp_path):
        written = write(tmp_path, place(placed_model()), mesh_of("tp=2"), arrange_ranks)
        before = values_of(written.directory)
        (written.directory / "params.json").write_text(json.dumps(PARAMS))
        for path in written.directory.glob("*.pth"):
            torch.save(torch.load(path, weights_only=True), path)
        assert before == values_of(written.directory)
        assert "ok" == validate(str(written.directory)).verdict

    def test_an_alias_is_the_same_tensor(self, tmp_path):
        aliases = {"tied.weight": "output.weight"}
        written = write(tmp_path, place(placed_model()), mesh_of("tp=2"), partial(arrange_ranks, aliases=aliases))
        assert_round_trip(written, "llama", also=aliases)

    @pytest.mark.parametrize("mesh", ["fsdp=2", "pp=2,tp=2"])
    def test_a_mesh_of_other_axes_is_refused(self, mesh):
        with pytest.raises(ConversionError, match="tensor-parallel rank alone"):
            arrange_ranks(place(placed_model()), mesh_of(mesh))

    def test_what_meta_s_loader_does_not_expect_is_named_with_its_numbers(self):
        wrong = {
            "layers.0.attention.wo.weight": (BF16, (8, 8), (ROWS,)),
            "layers.0.attention.wq.weight": (BF16, (9, 8), (ROWS,)),
            "norm.weight": (BF16, (8,), (ROWS,)),
            "other.weight": (FP32, (8,), (ROWS,)),
            "output.weight": (BF16, (8, 8), (ROWS,)),
        }
        with pytest.raises(ConversionError, match="cannot hold 5 of the entries") as caught:
            arrange_ranks(place(wrong), mesh_of("tp=2"), objects=[ObjectEntry("lr", ("lr",), "float", 0.5)])
        found = str(caught.value.found)
        assert "wo.weight` ([8, 8]: it is tp along 0, and Meta's loader has it cut along 1)" in found
        assert "9 along dimension 0 is not divisible by 2" in found
        assert "`norm.weight` ([8]: it is tp along 0, and Meta's loader has it whole)" in found
        assert "`other.weight` (not a name of Llama's own files)" in found
        assert "`output.weight`" not in found

    def test_names_of_another_stack_are_refused_with_a_hint(self):
        with pytest.raises(ConversionError) as caught:
            arrange_ranks(place({"model.embed_tokens.weight": (FP32, (4, 4), ())}), mesh_of("tp=1"))
        assert any("rename" in hint for hint in caught.value.hints)
