"""``ddtree hooks``: which engines here would be hooked, and where."""

import os
import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import typer
from rich.text import Text

from ddtree.cli.options import Json
from ddtree.cli.output import BROKEN, print_json, stdout


def hooks(as_json: Json = False) -> None:
    """Say which engines installed here would be hooked, and where.

    With DDTREE_DEBUG=1 in its environment SGLang (0.5.12 on) and vLLM load the
    hooks by themselves, in every process: the metadata of each verify pass is
    held to the invariants, and what breaks one is logged and written to a file.
    Transformers models are hooked by ddtree.hooks.attach(model).

    Exit code: 0 what is installed would be hooked, 1 something would not.

    \b
    Examples
      ddtree hooks
      DDTREE_DEBUG=1 python -m sglang.launch_server ...
    """
    from ddtree.invariants.hooks import sglang, vllm

    engines = [
        _engine("SGLang", sglang, "sglang.srt.plugins", "SGLANG_PLUGINS"),
        _engine("vLLM", vllm, "vllm.general_plugins", "VLLM_PLUGINS"),
    ]
    setting = os.environ.get("DDTREE_DEBUG", "")
    if as_json:
        print_json({"DDTREE_DEBUG": setting, "python": sys.executable, "engines": engines})
    else:
        _print(engines, setting)
    if any(engine["version"] and engine["problems"] for engine in engines):
        raise typer.Exit(BROKEN)


def _engine(name: str, module: ModuleType, group: str, allowed: str) -> dict[str, Any]:
    """An engine's version, its targets, and what would keep the hooks away; it is imported to see."""
    version = module.installed_version()
    targets: dict[str, str] = module.status() if version else {}
    problems = [f"{target}: {why}" for target, why in targets.items() if why]
    if "ddtree" not in {entry.name for entry in entry_points(group=group)}:
        problems.append(
            f"no entry point {group} of ddtree: install it where {name} is, pip install ddtree"
        )
    chosen = os.environ.get(allowed)
    if chosen and "ddtree" not in [word.strip() for word in chosen.split(",")]:
        problems.append(f"{allowed}={chosen} leaves ddtree out: add it, or unset the variable")
    return {"name": name, "version": version, "targets": list(targets), "problems": problems}


def _print(engines: list[dict[str, Any]], setting: str) -> None:
    console = stdout()
    for engine in engines:
        if not engine["version"]:
            console.print(Text(f"{engine['name']}: not installed here", "bright_black"))
            continue
        title = f"{engine['name']} {engine['version']}: "
        if engine["problems"]:
            console.print(Text(f"{title}not all of it would be hooked", "bold red"))
        else:
            console.print(Text(f"{title}would be hooked", "bold green"))
        broken = {problem.partition(":")[0] for problem in engine["problems"]}
        for target in engine["targets"]:
            if target not in broken:
                console.print(f"  {target}")
        for problem in engine["problems"]:
            console.print(Text(f"  {problem}", "red"), soft_wrap=True)
    if not any(engine["version"] for engine in engines):
        console.print(Text(f"looked in {sys.executable}"), soft_wrap=True)
        step = "run it in the server's environment, with ddtree installed there: python -m ddtree hooks"
        console.print(Text.assemble(("next: ", "bold"), step), soft_wrap=True)
    console.print("Transformers: ddtree.hooks.attach(model)")
    state = (
        f"DDTREE_DEBUG is {setting}"
        if setting
        else "DDTREE_DEBUG is unset: nothing is hooked until it is"
    )
    console.print(state, soft_wrap=True)
