"""Captured rounds, replayed over random shapes, against the reference."""

import os

import pytest
import torch

from tests.impl.replays import CAPTURED, replay

REPLAYS = 10_000 if os.environ.get("DDTREE_PROFILE") == "long" else 200


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_every_replay_equals_the_reference(name: str) -> None:
    """Nothing of an earlier replay, batch or prefix is left in a later one."""
    generator = torch.Generator("cuda").manual_seed(len(name))
    replay(CAPTURED[name], REPLAYS // len(CAPTURED), generator)
