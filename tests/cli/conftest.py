"""What the tests of the command line share: a runner, and a small real model in a folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ddtree.cli.app import app
from tests.decoding.tiny import write_tiny

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run the app in this process: ``run("check", "file")``."""
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers with random weights, and a tokenizer whose tokens are a, b, c, ..."""
    return write_tiny(tmp_path_factory.mktemp("tiny-llama"))
