"""Several roots as one source: what is listed, what a copy is called, what a reference means, which places a glob names."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ckpttools.errors import NotFoundError, StorageError, UsageError
from ckpttools.storage.source import read
from ckpttools.storage.union import expand, open_roots, require_apart, root_name


def make(root: Path, **files: bytes) -> str:
    root.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (root / name).write_bytes(data)
    return str(root)


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    return [
        make(tmp_path / "a", both=b"of a", only_a=b"a"),
        make(tmp_path / "b", both=b"of b", only_b=b"bb", cut=b"1"),
        make(tmp_path / "c", cut=b"12345"),
    ]


class TestListing:
    def test_files_of_all_roots_have_their_relative_paths(self, nodes):
        listing = open_roots(nodes)[0].listing()
        assert ["both", "cut", "only_a", "only_b"] == [f.path for f in listing]

    def test_a_copy_has_its_root_in_front(self, nodes):
        source, _ = open_roots(nodes)
        (copy,) = source.listing().copies["both"]
        assert (f"{nodes[1]}/both", nodes[1]) == (copy.path, copy.root)
        assert (b"of a", b"of b") == (read(source, "both", 0, 4), read(source, copy.path, 0, 4))

    def test_the_longest_copy_comes_first(self, nodes):
        listing = open_roots(nodes)[0].listing()
        assert (5, nodes[2]) == (listing.length_bytes("cut"), listing.files["cut"].root)
        assert [1] == [c.length_bytes for c in listing.copies["cut"]]

    def test_the_holders_of_a_path_are_its_roots(self, nodes):
        listing = open_roots(nodes)[0].listing()
        assert [(nodes[0], "both"), (nodes[1], f"{nodes[1]}/both")] == listing.holders("both")
        assert [(nodes[1], "only_b")] == listing.holders("only_b")
        assert [] == listing.holders("none")

    def test_a_file_that_no_root_lists_is_not_read(self, nodes, tmp_path):
        source, _ = open_roots(nodes)
        (tmp_path / "a" / "late").write_bytes(b"x")
        with pytest.raises(StorageError):
            read(source, "late", 0, 1)

    def test_one_root_is_the_source_itself(self, nodes):
        assert not open_roots(nodes[:1])[0].listing().copies

    def test_a_root_that_is_not_there_is_an_error(self, nodes):
        with pytest.raises(NotFoundError):
            open_roots([*nodes, nodes[0] + "/none"])

    def test_urls_and_paths_go_together(self, nodes):
        fsspec = pytest.importorskip("fsspec")
        root = f"memory://{uuid.uuid4()}"
        fsspec.open(f"{root}/both", "wb").open().close()
        with fsspec.open(f"{root}/both", "wb") as file:
            file.write(b"of u")
        source, _ = open_roots([nodes[0], root])
        assert b"of u" == read(source, f"{root}/both", 0, 4)


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/nodes/a/", "/nodes/a"),
        ("nodes/a", "./nodes/a"),
        ("../a", "../a"),
        (".", "."),
        ("file:///nodes/a", "/nodes/a"),
        ("gs://bucket/a/", "gs://bucket/a"),
    ],
)
def test_a_root_never_looks_like_a_relative_path(location, name):
    assert name == root_name(location)


@pytest.mark.parametrize("places", [("/n/a", "/n/a/"), ("/n/a", "/n/a-b", "/n/a/inner"), ("gs://b/x", "gs://b/x/y"), ("/", "/n")])
def test_a_place_in_another_is_refused(places):
    with pytest.raises(UsageError):
        require_apart(places)


def test_places_side_by_side_are_apart():
    require_apart(("/n/a", "/n/ab", "/n/a-b", "gs://b/x", "gs://b/xy"))


class TestExpand:
    def test_numbers_sort_as_numbers(self, tmp_path):
        for n in (10, 2, 1):
            make(tmp_path / f"node{n}" / "step-5")
        names = [Path(p).parent.name for p in expand([f"{tmp_path}/node*/step-5"])]
        assert ["node1", "node2", "node10"] == names

    def test_each_place_comes_once(self, nodes, tmp_path):
        (tmp_path / "link").symlink_to(nodes[0])
        assert nodes == expand([nodes[0], f"{tmp_path}/[abc]", str(tmp_path / "link"), nodes[1] + "/"])

    def test_a_name_with_a_star_in_it_is_that_name(self, tmp_path):
        make(tmp_path / "we*ird")
        assert [str(tmp_path / "we*ird")] == expand([str(tmp_path / "we*ird")])

    def test_a_glob_without_a_match_is_an_error(self, tmp_path):
        with pytest.raises(NotFoundError, match="nothing matches"):
            expand([f"{tmp_path}/none*"])

    def test_globs_of_urls(self):
        fsspec = pytest.importorskip("fsspec")
        root = f"memory://{uuid.uuid4()}"
        for n in (2, 10):
            with fsspec.open(f"{root}/node{n}/x", "wb") as file:
                file.write(b"x")
        assert [f"{root}/node2", f"{root}/node10"] == expand([f"{root}/node*"])
