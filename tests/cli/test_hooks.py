"""``ddtree hooks``: what is installed here, and whether it would be hooked."""

import json
import sys
from pathlib import Path

import pytest

from ddtree.invariants.hooks import sglang, vllm
from tests.cli.conftest import Run


def install(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of version 9.9 that has none of its modules."""
    info = folder / f"{name}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(folder))


def test_no_engine_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither is installed that is said, and that nothing is hooked while the variable is unset."""
    monkeypatch.delenv("DDTREE_DEBUG", raising=False)
    for module in (sglang, vllm):
        if module.installed_version():
            pytest.skip("an engine is installed")
    result = run("hooks")
    assert result.exit_code == 0
    assert "SGLang: not installed here" in result.stdout
    assert f"looked in {sys.executable}\nnext: run it in the server's environment" in result.stdout
    assert "DDTREE_DEBUG is unset: nothing is hooked until it is" in result.stdout


def test_what_would_not_be_hooked_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version without the targets, and a list of plugins without ddtree, each with what to do."""
    install("sglang", tmp_path, monkeypatch)
    monkeypatch.setenv("SGLANG_PLUGINS", "another, and-more")
    result = run("hooks", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)["engines"][0]
    assert (told["name"], told["version"]) == ("SGLang", "9.9")
    problems = "\n".join(told["problems"])
    assert (
        "init_forward_metadata: not found: sglang.srt.layers.attention.triton_backend" in problems
    )
    assert "SGLANG_PLUGINS=another, and-more leaves ddtree out" in problems
    shown = run("hooks").stdout
    assert "SGLang 9.9: not all of it would be hooked" in shown


@pytest.mark.parametrize("module", [sglang, vllm])
def test_a_wrong_setting_is_logged(
    module: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine swallows what a plugin raises: the log says that nothing is installed, and why."""
    monkeypatch.setenv("DDTREE_DEBUG_DUMP_DIR", str(tmp_path / "nowhere"))
    module.plugin()  # type: ignore[attr-defined]
    assert "ddtree hooks: NOT installed on" in caplog.text
    assert f"there is no folder {tmp_path / 'nowhere'} to dump calls to" in caplog.text


def test_an_engine_without_the_target_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plugin of an engine whose modules cannot be imported names what it looked for."""
    if vllm.installed_version():
        pytest.skip("vLLM is installed")
    monkeypatch.setenv("DDTREE_DEBUG_DUMP_DIR", str(tmp_path))
    vllm.plugin()
    assert "ddtree hooks: NOT installed on vLLM (unknown version)" in caplog.text
    assert (
        "AttentionGroup.build_metadata (not found: vllm.v1.worker.utils.AttentionGroup"
        in caplog.text
    )
