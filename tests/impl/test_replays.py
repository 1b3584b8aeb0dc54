"""Captured rounds, replayed over random shapes, against the reference."""

import os

import pytest
import torch

from tests.impl.replays import CAPTURED, replay

LONG = os.environ.get("DDTREE_PROFILE") == "long"
REPLAYS = 10_000 if LONG else 200
SHARDS = 3 if LONG else 1
"""Graphs of each kind: the reference takes the time, so several processes (``pytest -n``) share it."""


@pytest.mark.gpu
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", CAPTURED)
def test_every_replay_equals_the_reference(name: str, shard: int) -> None:
    """Nothing of an earlier replay, batch or prefix is left in a later one."""
    generator = torch.Generator("cuda").manual_seed(len(name) + 1000 * shard)
    replay(CAPTURED[name], -(-REPLAYS // (len(CAPTURED) * SHARDS)), generator)
