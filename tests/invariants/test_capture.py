"""Captured calls on disk: whole, typed, never unpickled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ddtree.invariants import Call, check, dump, load, violations
from ddtree.invariants.capture import read
from ddtree.spec import InputError
from tests.invariants.calls import captured, indptr, verify, whole_round

SUFFIXES = (".safetensors", ".npz")


def same(one: Call, other: Call) -> bool:
    a, b = one.known(), other.known()
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype
        if isinstance(a[n], torch.Tensor)
        else a[n] == b[n]
        for n in a
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    """What is dumped is what is loaded, every field and dtype of it."""
    for call in (whole_round(), Call.of(*captured()), whole_round(budget=0, prefixes=(0,))):
        path = dump(tmp_path / f"call{suffix}", call=call)
        assert same(load(path), call)
        assert violations(load(path)) == []
    assert [entry.name for entry in tmp_path.iterdir()] == [f"call{suffix}"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_from_contract_objects(tmp_path: Path, suffix: str) -> None:
    """A live call's objects are dumped as they are, under the contracts' names."""
    tree, layout, mask = verify([5, 3], 16, 3)
    call = load(dump(tmp_path / f"call{suffix}", tree, layout, mask, kv_pool_size=44))
    assert call.kv_pool_size == 44
    assert call.is_captured is False
    assert torch.equal(call.known()["custom_mask"], mask.allowed)
    assert torch.equal(call.known()["parents"], tree.parents)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_other_names_are_not_read_and_told(tmp_path: Path, suffix: str) -> None:
    """A dump may hold more than a call: all of it is listed, and loading warns."""
    path = tmp_path / f"call{suffix}"
    arrays = {name: torch.zeros(2, dtype=torch.int64) for name in ("kv_indptr", "qo_indptrs", "x")}
    if suffix == ".npz":
        plain: dict[str, Any] = {name: value.numpy() for name, value in arrays.items()}
        np.savez(path, **plain)
    else:
        save_file(arrays, path)
    captured = read(path)
    assert captured.not_read == {"qo_indptrs": "did you mean qo_indptr?", "x": ""}
    assert list(captured.call.known()) == ["kv_indptr"]
    with pytest.warns(UserWarning, match=r"not read: qo_indptrs \(did you mean qo_indptr\?\), x"):
        assert list(load(path).known()) == ["kv_indptr"]


def test_a_file_of_other_names_alone_is_refused(tmp_path: Path) -> None:
    """With what it holds and what is known."""
    path = tmp_path / "call.safetensors"
    save_file({"mask_indptrs": torch.zeros(2, dtype=torch.int64)}, path)
    with pytest.raises(InputError, match=r"(?s)found: mask_indptrs \(did you mean mask_indptr\?\)"):
        load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_unsigned_indices_are_refused(tmp_path: Path, suffix: str) -> None:
    """With the dtypes that are right."""
    path = tmp_path / f"call{suffix}"
    array = np.array([0, 17], dtype=np.uint64)
    if suffix == ".npz":
        np.savez(path, qo_indptr=array)
    else:
        save_file({"qo_indptr": torch.from_numpy(array)}, path)
    with pytest.raises(InputError, match="qo_indptr has dtype uint64; write it as int32 or int64"):
        load(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A folder in the way: the error is about the path that was given."""
    (tmp_path / "call.npz").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*call\.npz: it is a folder$"):
        dump(tmp_path / "call.npz", max_q_len=8)
    with pytest.raises(InputError, match=r"call\.npz is a folder, not a file$"):
        load(tmp_path / "call.npz")


def test_a_misspelt_argument_gives_the_nearest() -> None:
    """A keyword that no field has would check nothing."""
    with pytest.raises(InputError, match="no field 'qo_indpt'; did you mean 'qo_indptr'"):
        check(qo_indpt=indptr([17]))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "qo_indptr",
            torch.zeros(2),
            "qo_indptr has dtype torch.float32; expected an integer dtype",
        ),
        (
            "qo_indptr",
            torch.zeros(2, 2, dtype=torch.int32),
            r"qo_indptr has shape \[2, 2\]; expected 1 axes",
        ),
        (
            "max_q_len",
            torch.tensor([1, 2]),
            r"max_q_len is a torch.int64 tensor of shape \[2\]; expected one integer",
        ),
        ("max_q_len", torch.tensor(8.0), "max_q_len is a torch.float32 tensor"),
        ("is_captured", torch.tensor(2), "is_captured is 2; expected 0 or 1"),
        (
            "scores",
            torch.zeros(2, 2, dtype=torch.int64),
            "scores has dtype torch.int64; expected a floating dtype",
        ),
    ],
)
def test_wrong_kind(
    tmp_path: Path, suffix: str, name: str, value: torch.Tensor, message: str
) -> None:
    """A field that no invariant could read is refused by name, with what was found."""
    path = tmp_path / f"call{suffix}"
    if suffix == ".npz":
        arrays: dict[str, Any] = {name: value.numpy()}
        np.savez(path, **arrays)
    else:
        save_file({name: value}, path)
    with pytest.raises(InputError, match=message):
        load(path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """An archive that holds a pickled object is refused, not opened."""
    path = tmp_path / "call.npz"
    marker = tmp_path / "ran"
    np.savez(path, qo_indptr=np.array([Trap(marker)], dtype=object))
    with pytest.raises(InputError, match="no plain array of numbers"):
        load(path)
    assert not marker.exists()


class Trap:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 half an archive", b"\x93NUMPY"])
def test_bad_file(tmp_path: Path, suffix: str, content: bytes) -> None:
    """A file of another kind is refused as such."""
    path = tmp_path / f"call{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match="call"):
        load(path)


def test_missing_file_suffix_and_folder(tmp_path: Path) -> None:
    """No file, another suffix, no folder, nothing to write: each is said."""
    with pytest.raises(InputError, match="there is no file"):
        load(tmp_path / "none.npz")
    with pytest.raises(
        InputError, match=r"ends in '.pt'; a captured call is one of .safetensors, .npz"
    ):
        load(tmp_path / "call.pt")
    with pytest.raises(InputError, match="there is no folder"):
        dump(tmp_path / "no" / "call.npz", max_q_len=8)
    with pytest.raises(InputError, match="holds no field"):
        dump(tmp_path / "call.npz")
    with pytest.raises(InputError, match="a str is no part of a captured call"):
        dump(tmp_path / "call.npz", "layout")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_dump_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be written whole is not written at all."""
    path = dump(tmp_path / "call.npz", max_q_len=17)
    before = path.read_bytes()
    with pytest.raises(InputError, match="scores is bfloat16"):
        dump(path, call=replace(whole_round(), scores=torch.zeros(2, 17, dtype=torch.bfloat16)))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["call.npz"]
