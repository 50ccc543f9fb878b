"""`consolidate --format torch` gives back the nesting: classes of mappings, their attributes, and the order of entries."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from ckpttools.operations.convert import consolidate
from ckpttools.operations.select import Choice, Renaming

torch = pytest.importorskip("torch", reason="needs torch, which saves and loads")

pytestmark = pytest.mark.interop


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)


def converted(state: object, tmp_path: Path, **options: object) -> object:
    torch.save(state, tmp_path / "in.pt")
    consolidate(str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), **options)
    return torch.load(tmp_path / "out.pt", weights_only=True)


def shape_of(value: object) -> object:
    """Classes and keys, in order, without the tensors."""
    if isinstance(value, dict):
        return type(value), [(k, shape_of(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(v) for v in value]
    return type(value) if isinstance(value, torch.Tensor) else value


def test_a_state_dict_stays_an_ordered_dict_with_its_metadata(tmp_path):
    state = Net().state_dict()
    found = converted(state, tmp_path)
    assert shape_of(state) == shape_of(found)
    assert state._metadata == found._metadata
    Net().load_state_dict(found)


def test_nested_state_keeps_classes_and_the_order_of_tensors_and_objects(tmp_path):
    net = Net()
    state = {
        "epoch": 3,
        "model": net.state_dict(),
        "args": {"lr": 0.1, "name": "x"},
        "optimizer": torch.optim.Adam(net.parameters()).state_dict(),
        "ema": OrderedDict(b=torch.ones(1), decay=0.9, a=torch.zeros(1)),
        "history": [torch.ones(2), {"loss": 1.5}],
        "done": True,
    }
    found = converted(state, tmp_path)
    assert shape_of(state) == shape_of(found)
    assert state["model"]._metadata == found["model"]._metadata


def test_metadata_goes_by_names_so_renaming_drops_it(tmp_path):
    found = converted(Net().state_dict(), tmp_path, choice=Choice(renaming=Renaming.parse((), ["^first=last"])))
    assert list(found)[:2] == ["last.weight", "last.bias"]
    assert not hasattr(found, "_metadata")


def test_what_is_left_out_leaves_the_rest_in_order(tmp_path):
    state = OrderedDict((name, torch.ones(1)) for name in "zyxw")
    found = converted(state, tmp_path, choice=Choice(exclude=("y",)))
    assert list(found) == ["z", "x", "w"]


def test_tied_tensors_stay_tied_and_in_their_places(tmp_path):
    tied = torch.ones(3)
    found = converted(OrderedDict(head=tied, body=torch.zeros(2), embed=tied), tmp_path)
    assert list(found) == ["head", "body", "embed"]
    assert found["head"].data_ptr() == found["embed"].data_ptr()
