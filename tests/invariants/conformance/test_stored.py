"""Stored cases: what a file gives back is the case that failed, and it fails again in the same words."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs
from safetensors import safe_open
from safetensors.torch import save_file

from ddtree import spec
from ddtree.catalogue.backends import BACKENDS
from ddtree.invariants import dump, load
from ddtree.invariants.conformance import Backend, Refused
from ddtree.invariants.conformance.attend import AttentionCase
from ddtree.invariants.conformance.fuzz import again, hold
from ddtree.invariants.conformance.properties import PROPERTIES, Property
from ddtree.invariants.conformance.stored import read, write
from ddtree.invariants.recorded import read as read_function
from ddtree.peers.own import Reference
from tests.invariants.conformance.test_fuzz import BY_ID, WRONG, mutant

REFERENCE = Backend.of(Reference())


def same(one: Any, other: Any) -> bool:
    """Equal, kind by kind, tensor by tensor, -inf and dtypes included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.id)
@settings(max_examples=4)
@given(data=hs.data())
def test_a_case_comes_back_whole(prop: Property, data: hs.DataObject) -> None:
    """Call, execution, earlier call, inputs and options, of every property; check and replay read it too."""
    case = data.draw(prop.cases(REFERENCE, 3, None))
    with TemporaryDirectory() as folder:
        path = write(Path(folder), REFERENCE, prop, case)
        found, back, _ = read(path)
        assert load(path).known()  # warns of no field: a warning is an error
        assert read_function(path).function == prop.function
    assert found is prop
    assert same(case, back)
    assert str(case) == str(back)


FAULTS = {
    "stale-prefix": "visible set, replay",
    "founding-bug-replay": "visible set, fixed buffers",
    "pages": "visible set",
    "founding-bug": "plan_verify",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_fails_again_from_its_file(name: str, tmp_path: Path) -> None:
    """In the same words, of a backend made anew; a right backend passes the same file."""
    (faulty,) = [f for f in BACKENDS if f.name == name]
    first = hold(Backend.of(faulty.make(), name), BY_ID[FAULTS[name]], seconds=20, folder=tmp_path)
    assert first.file is not None
    second = again(faulty.make(), first.file, name)
    assert (second.state, second.what, second.file) == ("broken", first.what, first.file)
    assert str(second.case) == str(first.case)
    assert again(Reference(), first.file).state == "holds"


@pytest.mark.parametrize("function", WRONG)
def test_a_wrong_step_fails_again_from_its_file(function: str, tmp_path: Path) -> None:
    """Steps around the attention too."""
    wrong = mutant(function, WRONG[function])
    first = hold(Backend.of(wrong), BY_ID[function], folder=tmp_path)
    assert first.file is not None
    assert again(wrong, first.file).what == first.what
    assert again(Reference(), first.file).state == "holds"


def test_numbers_of_the_same_seed_are_off_by_the_same(tmp_path: Path) -> None:
    """Random inputs are made anew from the stored seed, in the stored dtype and heads."""

    def verify_attention(*arguments: Any, softcap: float) -> Any:  # noqa: ARG001 # it is ignored
        return spec.verify_attention(*arguments)

    first = hold(Backend.of(verify_attention), BY_ID["softcap"], folder=tmp_path)
    assert first.file is not None
    assert "is off by" in first.what
    assert again(verify_attention, first.file).what == first.what


def test_what_is_refused_or_not_offered_is_said(tmp_path: Path) -> None:
    """Neither holds."""
    first = hold(Backend.of(lambda *_: None), BY_ID["visible set"], folder=tmp_path)
    assert first.file is not None

    def verify_attention(*_: Any) -> Any:
        raise Refused("closed today")

    refused = again(verify_attention, first.file)
    assert (refused.state, dict(refused.refused)) == ("refused", {"closed today": 1})
    assert again(spec.build_tree, first.file).state == "not offered"


def test_files_without_a_sound_case_are_refused(tmp_path: Path) -> None:
    """A call alone, another version's property, a damaged case: each is told as what it is."""
    first = hold(Backend.of(lambda *_: None), BY_ID["visible set"], folder=tmp_path)
    assert first.file is not None
    assert isinstance(first.case, AttentionCase)
    with safe_open(first.file, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # no dict
    other = tmp_path / "other.safetensors"

    def refused(why: str) -> None:
        with pytest.raises(spec.InputError, match=why):
            again(Reference(), other)

    refused("there is no file")
    dump(other, first.case.call.tree)
    refused("holds no case of ddtree conform")
    save_file(tensors, other, metadata | {"ddtree.property": "speed"})
    refused("'speed', which is no property here")
    save_file(tensors, other, metadata | {"ddtree.property": "build_tree"})
    refused("its case is none of 'build_tree'")
    save_file(tensors, other, metadata | {"ddtree.case": metadata["ddtree.case"][:-9]})
    refused("the case cannot be read")
    without = {name: t for name, t in tensors.items() if name != "case.call.prefix_lens"}
    save_file(without, other, metadata)
    refused("the case cannot be read: 'case.call.prefix_lens'")
    layout = replace(first.case.call.layout, qo_indptr=torch.tensor([0, 9], dtype=torch.int32))
    save_file(tensors | {"case.call.layout.qo_indptr": layout.qo_indptr}, other, metadata)
    refused("the reference itself fails this case, so it is damaged")
