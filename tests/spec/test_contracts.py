"""The data contracts: what a step was handed stays as it is, and what a caller may leave out."""

from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest
import torch

from ddtree.spec import PagedKV, QLen, VerifyLayout, contracts

CONTRACTS: list[Any] = [kind for kind in vars(contracts).values() if is_dataclass(kind)]


@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_a_contract_is_not_rewritten(kind: Any) -> None:
    """No field of an object takes another value: whoever holds it sees what was handed over."""
    names = [field.name for field in fields(kind)]
    made = kind(**dict.fromkeys(names))
    for name in names:
        with pytest.raises(FrozenInstanceError):
            setattr(made, name, 1)


def test_what_is_left_out() -> None:
    """A layout is of one call alone unless it is said to be captured, and a page is one slot."""
    none = torch.zeros(0)
    assert VerifyLayout(none, none, none, none, QLen(1), none, none).is_captured is False
    assert PagedKV((), (), none).page_size == 1
