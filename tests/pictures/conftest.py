"""Runs of ``ddtree conform`` and ``ddtree isolate`` on the founding bug, made once."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddtree.cli.app import app


def run(*args: object) -> Any:
    """The JSON that a verb prints."""
    result = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert result.exit_code in {0, 1}, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``conform.json``, its failing cases, and ``isolate.json``."""
    folder = tmp_path_factory.mktemp("runs")
    conform, more = (
        run("conform", "founding-bug", "--only", only, "--examples", 8, "--out", folder / "cases")
        for only in ("plan_verify", "fixed buffers")
    )
    conform["properties"] += more["properties"]
    (folder / "conform.json").write_text(json.dumps(conform))
    isolate = run("isolate", "founding-bug", "--calls", 90, "--seconds", 300)
    (folder / "isolate.json").write_text(json.dumps(isolate))
    return folder
