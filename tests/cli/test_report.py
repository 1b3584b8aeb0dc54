"""``ddtree report``, and the pages that ``conform``, ``isolate`` and ``generate`` write."""

import json
import webbrowser
from pathlib import Path

import pytest

from ddtree.cli.output import BAD_INPUT, BROKEN
from tests.cli.conftest import Run
from tests.pictures.parsed import parsed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_call_becomes_a_page_beside_it(run: Run, folder: Path, suffix: str) -> None:
    """The page bears the file's name and what is broken; exit code 0, since the page is there."""
    name = f"wrong.{suffix}"
    assert run("dump", name, "--prefix", 5, "--fault", "width=8").exit_code == 0
    result = run("report", name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "mask_len is broken in request 0\nwrote wrong.html\n"
    page = parsed((folder / "wrong.html").read_bytes())
    assert page.one("h1").text == "mask_len is broken in request 0"
    assert f"ddtree check {name}" in page.text
    assert "ddtree replay" not in page.text
    assert run("report", name).stdout.endswith("\noverwrote wrong.html\n")


def test_json_and_another_place(run: Run, folder: Path) -> None:
    """One JSON object, and the page where it was asked for."""
    run("dump", "call.npz", "--prefix", 5)
    result = run("report", "call.npz", "--out", "x.htm", "--json")
    assert json.loads(result.stdout) == {
        "file": "call.npz", "page": "x.htm", "title": "Nothing is broken",
    }  # fmt: skip
    assert sorted(p.name for p in folder.iterdir()) == ["call.npz", "x.htm"]


def test_the_same_call_gives_the_same_page(run: Run, folder: Path) -> None:
    """No date, no chance."""
    run("dump", "call.npz", "--prefix", 5)
    run("report", "call.npz")
    run("report", "call.npz", "--out", "again.html")
    assert (folder / "call.html").read_bytes() == (folder / "again.html").read_bytes()


@pytest.mark.parametrize("opens", [True, False])
def test_open(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, *, opens: bool) -> None:
    """The browser is given the page; where there is none, the page is there all the same."""
    asked = []

    def show(url: str) -> bool:
        asked.append(url)
        return opens

    monkeypatch.setattr(webbrowser, "open", show)
    run("dump", "call.npz", "--prefix", 5)
    result = run("report", "call.npz", "--open")
    assert asked == [(folder / "call.html").as_uri()]
    assert (folder / "call.html").is_file()
    assert result.exit_code == (0 if opens else BAD_INPUT)
    assert ("no browser could be opened; the page is call.html" in result.stderr) != opens


def test_conform_and_its_json_give_one_page(run: Run, folder: Path) -> None:
    """``--html``, and ``report`` on what ``--json`` printed; the smallest case can be replayed."""
    args = ("conform", "founding-bug", "--only", "plan_verify", "--examples", 5)
    result = run(*args, "--html", "run.html", "--json")
    assert result.exit_code == BROKEN
    (folder / "run.json").write_text(result.stdout)
    assert run("report", "run.json", "--out", "same.html").exit_code == 0
    page = (folder / "run.html").read_bytes()
    assert page == (folder / "same.html").read_bytes()
    assert "ddtree replay ddtree-conform/founding-bug-plan-verify.safetensors" in page.decode()
    assert "wrote run.html" in run(*args, "--html", "run.html").stdout


WRONG = """
import torch

from ddtree import spec


class Wide:
    def verify_attention(self, *given):
        *tensors, layout, mask = given
        wrong = spec.FlatMask(mask.allowed.clone())
        if layout.max_q_len == 3:
            wrong.allowed[-4] = True  # the last but one row of the last request sees its last row
        return spec.verify_attention(*tensors, layout, wrong)


class Double:
    def verify_attention(self, *given):
        output, _ = spec.verify_attention(*given)
        return output * 2
"""


def test_a_failing_case_is_told_as_broken(run: Run, folder: Path) -> None:
    """By its backend, its property and its words; the heat map marks the bit that the row saw."""
    (folder / "mine.py").write_text(WRONG)
    ran = run("conform", "mine.py:Wide", "--only", "visible set", "--examples", 100, "--json")
    found = json.loads(ran.stdout)["properties"][0]
    assert found["state"] == "broken"
    assert "row 1 of request 0 sees row 2" in found["what"]
    result = run("report", found["file"], "--out", "page.html")
    assert result.stdout.startswith("mine.py:Wide: visible set is broken\n")
    page = parsed((folder / "page.html").read_bytes())
    assert page.one("h1").text == "mine.py:Wide: visible set is broken"
    assert page.one("p", class_="statement").text == f"✕ {found['what']}"
    assert page.one("section", class_="bad-card").text.count(found["smallest_case"]) == 1
    assert page.all("section", class_="good-card") == []
    (prefix,) = [
        int(part.split()[1])
        for part in found["smallest_case"].split(", ")
        if part.startswith("prefix_len")
    ]
    assert len(page.all("g", class_="leaked", data_bits=f"1,{prefix + 2}")) == 1
    assert page.all("g", class_="hidden") == []
    assert f"ddtree conform mine.py:Wide --case {found['file']}" in page.text


def test_wrong_numbers_are_told_as_broken(run: Run, folder: Path) -> None:
    """There is no bit to mark: title and box say it, beside the call that was given."""
    (folder / "mine.py").write_text(WRONG)
    assert run("conform", "mine.py:Double", "--only", "values, float32").exit_code == BROKEN
    result = run("report", "ddtree-conform/mine-py-Double-values-float32.safetensors")
    assert result.stdout.startswith("mine.py:Double: values, float32 is broken\n")
    name = "ddtree-conform/mine-py-Double-values-float32.html"
    page = parsed((folder / name).read_bytes())
    assert "output of row 0 of request 0 is off by" in page.one("p", class_="statement").text
    assert "the call itself is sound, what the backend makes of it is not" in page.text
    assert page.all("section", class_="good-card") == []


def test_isolate_and_its_json_give_one_page(run: Run, folder: Path) -> None:
    """``--html``, and ``report`` on what ``--out`` wrote."""
    result = run(
        "isolate", "founding-bug", "--calls", 120, "--seconds", 300,
        "--out", "cells.json", "--html", "isolation.html",
    )  # fmt: skip
    assert result.exit_code == BROKEN
    assert "wrote isolation.html" in result.stdout
    assert run("report", "cells.json").exit_code == 0
    page = (folder / "isolation.html").read_bytes()
    assert page == (folder / "cells.html").read_bytes()
    assert "fails iff q_len != 8" in parsed(page).one("h1").text


def test_a_generation_is_traced(run: Run, tiny_folder: Path, folder: Path) -> None:
    """Each prompt's rounds as the JSON counts them, and the text that it tells."""
    result = run(
        "generate", "a b c d a b c d a b", "c a b c a b", "--target", tiny_folder,
        "--max-new-tokens", 12, "--budget", 6, "--no-compare", "--json", "--trace", "trace.html",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "wrote trace.html" in result.stderr
    requests = json.loads(result.stdout)["requests"]
    page = parsed((folder / "trace.html").read_bytes())
    articles = page.all("article", class_="prompt")
    for article, request in zip(articles, requests, strict=True):
        assert len(article.all("section", class_="round")) == request["verify_passes"]
        assert article.one("p", class_="story").text.replace("·", "") == request["text"]
        assert article.one("p", class_="asked").text == request["prompt"]
    drafted = sum(len(r["rounds"]) for r in requests)
    depth = page.one("svg", data_depth="1").attributes
    accepted = sum(stats["num_accepted"] > 1 for r in requests for stats in r["rounds"])
    assert (int(depth["data-drafted"]), int(depth["data-accepted"])) == (drafted, accepted)


BAD = {
    "no file": (("report", "no.npz"), "there is no file no.npz"),
    "no JSON file": (("report", "no.json"), "there is no file no.json"),
    "another suffix": (
        ("report", "x.txt"), "x.txt ends in '.txt'; a page is made of .safetensors, .npz or .json",
    ),
    "not JSON": (("report", "cut.json"), "cut.json is not JSON"),
    "other JSON": (
        ("report", "other.json"), "other.json is no run that a page can be made of next: a call is what",
    ),
    "a list": (("report", "list.json"), "list.json is no run that a page can be made of"),
    "check's JSON": (("report", "check.json"), "it is what ddtree check says of call.npz; give that file"),
    "a generation": (("report", "said.json"), "it is a generation; ddtree generate --trace PAGE.html"),
    "damaged conform": (("report", "run.json"), "run.json is damaged, or of another version: KeyError"),
    "damaged isolate": (("report", "cells.json"), "cells.json is damaged, or of another version: "),
    "no page": (("report", "call.npz", "--out", "page.pdf"), "page.pdf is to be an HTML page"),
    "no folder": (("report", "call.npz", "--out", "no/page.html"), "there is no folder no to write"),
    "a folder": (("report", "call.npz", "--out", "folder.html"), "cannot write folder.html"),
    "conform": (("conform", "founding-bug", "--html", "x.pdf"), "x.pdf is to be an HTML page"),
    "isolate": (("isolate", "founding-bug", "--html", "no/x.html"), "there is no folder no"),
    "generate": (("generate", "x", "--trace", "x"), "x is to be an HTML page"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused(run: Run, folder: Path, args: tuple[str, ...], message: str) -> None:
    """One message with a next step, exit code 2, and no page."""
    (folder / "x.txt").touch()
    (folder / "cut.json").write_text('{"properties": [')
    (folder / "other.json").write_text('{"a": 1}')
    (folder / "list.json").write_text("[1]")
    (folder / "check.json").write_text('{"file": "call.npz", "not_checked": {}}')
    (folder / "said.json").write_text('{"requests": []}')
    (folder / "run.json").write_text('{"properties": []}')
    (folder / "cells.json").write_text('{"cells": [{}], "backend": "x"}')
    (folder / "folder.html").mkdir()
    before = sorted(folder.iterdir())
    result = run(*args)
    assert result.exit_code == BAD_INPUT
    told = " ".join(result.stderr.split())
    assert message in told
    assert "next: " in told
    assert sorted(folder.iterdir()) == before
