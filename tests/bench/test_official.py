"""The parts of the comparison with the official code that need no copy of it."""

from pathlib import Path

import pytest

from bench.official import REVISION, load_official, paths


def test_a_folder_without_the_official_code_is_refused(tmp_path: Path) -> None:
    """The message says what to fetch and how to name it."""
    with pytest.raises(SystemExit, match=REVISION) as caught:
        load_official(tmp_path)
    assert "DDTREE_OFFICIAL" in str(caught.value)


def test_paths_name_nodes_whatever_their_order() -> None:
    """Two orders of one tree have the same paths, another tree has not."""
    one = paths([5, 1, 2, 3], [-1, 0, 0, 1])
    other = paths([9, 2, 1, 3], [-1, 0, 0, 2])
    assert one == {(): 0, (1,): 1, (2,): 2, (1, 3): 3}
    assert one.keys() == other.keys()
    assert other[1, 3] == 3
    assert one.keys() != paths([5, 1, 2, 3], [-1, 0, 0, 2]).keys()
