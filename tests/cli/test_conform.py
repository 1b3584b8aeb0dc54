"""``ddtree conform`` and ``ddtree isolate``: the founding bug, a backend of one's own, and bad requests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.processes import PYTHONPATH

MINE = '''
import os, time

from ddtree import spec
from ddtree.invariants.conformance import Refused


class Mine:
    """Right, but for one width alone."""

    def verify_attention(self, query, key, value, key_pool, value_pool, layout, mask):
        if len(set(layout.qo_indptr.diff().tolist()) - {0}) > 1:
            raise Refused("one width only")
        return spec.verify_attention(query, key, value, key_pool, value_pool, layout, mask)


class NeedsArg(Mine):
    def __init__(self, device):
        pass


class Boom(Mine):
    def __init__(self):
        raise SystemExit(0)


class Leaves:
    def verify_attention(self, *arguments):
        raise SystemExit(0)


class Plans:
    def plan_verify(self, *arguments):
        layout = spec.plan_verify(*arguments)
        layout.positions[layout.qo_indptr[1:2]:] += 1
        return layout


class Refuses:
    def verify_attention(self, *arguments):
        raise Refused("closed today")


class Prints:
    def verify_attention(self, *arguments):
        print("of Python")
        os.write(1, b"of a kernel\\n")
        return spec.verify_attention(*arguments)


class Tree:
    def build_tree(self, *arguments):
        raise ValueError("boom")


class Slow:
    def verify_attention(self, *arguments):
        time.sleep(0.3)
        return spec.verify_attention(*arguments)


class Sees(Mine):
    """Right but for its numbers."""

    def verify_attention(self, *arguments):
        output, _ = spec.verify_attention(*arguments)
        return output * 2 if arguments[0][0].any() else output


class Keeps:
    """Gives its first answer to every call."""

    def __init__(self):
        self.first = None

    def tree_mask(self, *arguments):
        self.first = self.first or spec.tree_mask(*arguments)
        return self.first
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, since failing cases are written to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_founding_bug_is_found_and_written(run: Run, folder: Path) -> None:
    """The table, the smallest case with its cause, and a file that ``ddtree check`` refuses."""
    result = run("conform", "founding-bug", "--only", "plan_verify", "--examples", "20")
    assert result.exit_code == 1, result.stderr
    assert "smallest case: q_len 1, num_nodes 1, prefix_len 0, page size 1" in result.stdout
    assert "the width came from configuration" in result.stdout
    assert "founding-bug: 0 hold, 1 broken" in result.stdout
    checked = run("check", folder / "ddtree-conform/founding-bug-plan-verify.safetensors")
    assert checked.exit_code == 1
    assert "mask_len is broken in request 0: expected 1, found 64" in checked.stdout
    assert "the file is of a conformance failure of plan_verify" in checked.stdout


def test_a_case_is_run_again_from_its_file(run: Run, folder: Path) -> None:
    """By the command that the report prints: the same verdict; of a mended backend that it holds."""
    (folder / "mine.py").write_text(MINE)
    first = run("conform", "mine.py:Sees", "--only", "values, float16", "--examples", "5")
    (again,) = [line.strip() for line in first.stdout.splitlines() if " --case " in line]
    file = "ddtree-conform/mine-py-Sees-values-float16.safetensors"
    assert again == f"ddtree conform mine.py:Sees --case {file}"
    second = run(*again.split()[1:])
    assert second.exit_code == first.exit_code == 1
    for told in (
        "values, float16: the same in half",
        "  output of row 0",
        "mine.py:Sees: 0 hold, 1",
    ):
        lines = [
            [line for line in r.stdout.splitlines() if line.startswith(told)]
            for r in (first, second)
        ]
        assert lines[0] == lines[1] != []
    assert "  case: 1 request, q_len 1" in second.stdout
    whole = json.loads(run("conform", "mine.py:Sees", "--case", file, "--json").stdout)
    assert [prop["file"] for prop in whole["properties"]] == [file]
    checked = run("check", file)
    assert (checked.exit_code, "nothing is broken" in checked.stdout) == (0, True)
    assert checked.stdout.splitlines()[-1] == (
        f"the file is of a conformance failure of values, float16: `ddtree report {file}` shows what the "
        f"backend gave, `{again}` runs it again"
    )
    assert json.loads(run("check", file, "--json").stdout)["conformance"] == {
        "backend": "mine.py:Sees", "property": "values, float16",
    }  # fmt: skip
    mended = run("conform", "mine.py:Mine", "--case", file)
    assert (mended.exit_code, "1 hold, 0 broken, 1 case" in mended.stdout) == (0, True)
    assert "was mended since" in " ".join(mended.stdout.replace("│", " ").split())
    assert run("conform", "mine.py:Sees", "--case", file, "--html", "p.html").exit_code == 1
    assert again in (folder / "p.html").read_text()


def test_what_fails_only_after_other_calls_is_said(run: Run, folder: Path) -> None:
    """In the report, its JSON and page, and where the case alone is run again and holds."""
    (folder / "mine.py").write_text(MINE)
    some = ("conform", "mine.py:Keeps", "--examples", "9")
    said = "fails only after other calls"
    first = run(*some, "--html", "p.html")
    assert (first.exit_code, said in first.stdout, said in (folder / "p.html").read_text()) == (
        1,
        True,
        True,
    )
    told = json.loads(run(*some, "--json").stdout)["properties"]
    (kept,) = [prop for prop in told if prop["state"] == "broken"]
    assert kept["fails_only_after_other_calls"] is True
    again = run("conform", "mine.py:Keeps", "--case", kept["file"])
    assert again.exit_code == 0
    assert "it failed only after other calls" in " ".join(again.stdout.replace("│", " ").split())
    (held,) = json.loads(run("conform", "mine.py:Keeps", "--case", kept["file"], "--json").stdout)[
        "properties"
    ]
    assert held["note"].startswith("when it was written, it failed only after other calls")


@pytest.mark.parametrize(
    ("args", "said", "step"),
    [
        (("--case", "f.npz"), "--case needs the backend", "ddtree conform BACKEND --case f.npz"),
        (
            ("reference", "--case", "f.npz"),
            "there is no file f.npz",
            "check the path; `ddtree conform reference` writes one",
        ),
        (("reference", "--case", "d.npz"), "d.npz is a folder, not a file", "ddtree conform"),
        (("d.py:Mine",), "d.py is a folder, not a file", "check the path"),
        (
            ("reference", "--case", "f.npz", "--seed", "3"),
            "--seed cannot be given with --case",
            "leave out --seed",
        ),
    ],
)
def test_a_case_that_cannot_be_run_is_refused(
    run: Run, folder: Path, args: tuple[str, ...], said: str, step: str
) -> None:
    """What was wrong, and the next step."""
    (folder / "d.npz").mkdir()
    (folder / "d.py").mkdir()
    result = run("conform", *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert f"next: {step}" in result.stderr


def test_a_backend_of_ones_own_holds(run: Run, folder: Path) -> None:
    """A class in a file: what holds, what was refused and why; no folder is left behind."""
    (folder / "mine.py").write_text(MINE)
    args = ("conform", "mine.py:Mine", "--only", "visible", "--examples", "25")
    result = run(*args)
    assert result.exit_code == 0, result.stdout
    assert "3 hold, 0 broken" in result.stdout
    assert [
        path.name for path in folder.iterdir() if path.is_dir() and "conform" in path.name
    ] == []
    told = json.loads(run(*args, "--json").stdout)
    assert [prop["state"] for prop in told["properties"]] == ["holds"] * 3
    assert all(list(prop["refused"]) == ["one width only"] for prop in told["properties"])


def test_where_time_was_up_it_holds_so_far(run: Run, folder: Path) -> None:
    """In the table, the closing line, the JSON and the page; one that had its cases says nothing of it."""
    (folder / "mine.py").write_text(MINE)
    args = ("conform", "mine.py:Slow", "--only", "visible set, fixed", "--html", "page.html")
    cut = run(*args, "--seconds", 1, "--examples", 9)
    told = " ".join(cut.stdout.replace("│", " ").split())
    (ran,) = re.findall(r"holds \(so far: (\d) of 9 cases, time was up\)", told)
    assert 0 < int(ran) < 9
    one = "1 hold (1 of them so far: time was up, --seconds gives more), 0 broken, "
    assert (cut.exit_code, one in cut.stdout) == (0, True), cut.stdout
    page = (folder / "page.html").read_text()
    assert "mine.py:Slow: all that was held to the reference holds so far: time was up" in page
    assert "good-card" not in page.split("</style>")[1]
    whole = json.loads(run(*args, "--seconds", 1, "--examples", 9, "--json").stdout)
    keys = ("state", "cases_were_cut", "shrinking_was_cut")
    assert [[p[key] for key in keys] for p in whole["properties"]] == [["holds", True, False]]
    assert whole["properties"][0]["note"].endswith(" of 9 cases, time was up")
    done = run(*args, "--seconds", 60, "--examples", 2)
    assert ("so far" in done.stdout, "1 hold, 0 broken, 2 cases" in done.stdout) == (False, True)


def test_isolation_says_it_in_a_sentence(run: Run, folder: Path) -> None:
    """The sentence, the table, an example, and every call in a file."""
    result = run(
        "isolate", "founding-bug", "--calls", "400", "--seconds", "300", "--out", "cells.json"
    )
    assert result.exit_code == 1, result.stderr
    told = " ".join(result.stdout.split())
    assert "founding-bug fails iff q_len != 8, eager and replay alike" in told
    assert "a width of 8 is used where q_len belongs" in told
    assert "for example: q_len" in told
    data = json.loads((folder / "cells.json").read_text())
    assert data["rules"] == ["q_len != 8"]
    assert len(data["cells"]) <= 400


def test_isolation_of_what_is_right(run: Run, folder: Path) -> None:
    """Nothing fails: exit code 0."""
    (folder / "mine.py").write_text(MINE)
    result = run("isolate", "mine.py:Mine", "--calls", "60")
    assert result.exit_code == 0
    assert "nothing fails: 34 calls" in result.stdout


def test_too_few_calls_tell_nothing(run: Run) -> None:
    """It says how few ran, and ends with exit code 2; what failed in them is told, but not where."""
    right = run("isolate", "ddtree.spec:verify_attention", "--calls", "1")
    assert right.exit_code == 2
    told = "ddtree.spec:verify_attention: nothing failed in 1 call: too few to tell"
    assert told in right.stdout
    # "error: " and "next: " on stderr, as of every exit code 2
    assert f"error: {told}\nnext: give it more: --calls" in right.stderr
    plain = run("isolate", "ddtree.spec:verify_attention", "--calls", "1", "--json")
    assert (plain.exit_code, json.loads(plain.stdout)["sentence"]) == (2, told.split(": ", 1)[1])
    assert f"error: {told}\nnext: " in plain.stderr
    wrong = run("isolate", "inverted", "--calls", "10")
    assert wrong.exit_code == 1
    assert "calls failed: too few to tell where" in " ".join(wrong.stdout.split())


def test_isolation_of_a_plan(run: Run, folder: Path) -> None:
    """A backend without attention is proposed for isolation, and its layouts compared."""
    (folder / "mine.py").write_text(MINE)
    wrong = run("conform", "mine.py:Plans", "--examples", "20")
    assert "next: ddtree isolate mine.py:Plans" in wrong.stdout
    result = run("isolate", "mine.py:Plans", "--calls", "100", "--html", "page.html")
    assert result.exit_code == 1, result.stderr
    assert "mine.py:Plans fails iff the request is not the first" in result.stdout
    assert "compared: the layouts of plan_verify" in result.stdout
    assert "plan_verify" in (folder / "page.html").read_text()


def test_isolation_of_neither_is_refused(run: Run) -> None:
    """With what does hold such a backend to the reference."""
    result = run("isolate", "ddtree.spec:build_tree")
    assert result.exit_code == 2
    assert "offers neither verify_attention nor plan_verify; it offers build_tree" in result.stderr
    assert "next: ddtree conform ddtree.spec:build_tree" in result.stderr


@pytest.mark.parametrize("verb", ["conform", "isolate"])
def test_without_a_backend_json_lists_them(run: Run, verb: str) -> None:
    """A list, and nothing else."""
    listed = json.loads(run(verb, "--json").stdout)
    assert {"reference", "founding-bug", "flashinfer"} <= {row["backend"] for row in listed}
    assert {row["backend"] for row in listed if row["needs_gpu"]} == {"flashinfer"}


@pytest.mark.parametrize("verb", ["conform", "isolate"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NeedsArg", "it raised TypeError: NeedsArg.__init__() missing 1 required"),
        ("Boom", "it raised SystemExit: 0 (mine.py:24)"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(
    run: Run, folder: Path, verb: str, name: str, said: str
) -> None:
    """One message with its place and a next step, exit code 2, and nothing on stdout."""
    (folder / "mine.py").write_text(MINE)
    result = run(verb, f"mine.py:{name}", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: mine.py:{name} cannot be made: {said}" in result.stderr
    assert f"mine = {name}(...)" in result.stderr
    assert [path.name for path in folder.iterdir() if "conform" in path.name] == []


ATTRIBUTES = {
    "dtypes = ('float32',)": "dtypes is ('float32',); allowed is a tuple of one or more of torch.float32,",
    "dtypes = torch.float32": "dtypes is torch.float32; allowed is a tuple of one or more of torch.float32,",
    "dtypes = (torch.float64,)": "dtypes is (torch.float64,); allowed is a tuple of one or more of",
    "mask_forms = ()": "mask_forms is (); allowed is a tuple of one or more of 'flat', 'packed', 'den",
    "mask_forms = 'flat'": "mask_forms is 'flat'; allowed is a tuple of one or more of 'flat'",
    "call_limit = -1": "call_limit is -1; allowed is a number of seconds over 0, at most 1e+09",
    "call_limit = float('inf')": "call_limit is inf; allowed is a number of seconds over 0",
    "device = 'nowhere'": "device is 'nowhere'; allowed is a device that torch can use here, such as 'cpu'",
    "device = 'cuda:63'": "device is 'cuda:63'; allowed is a device that torch can use here, such as 'cpu'",
    "device = 'meta'": "device is 'meta'; allowed is a device that torch can use here, such as 'cpu'",
    "device = 0": "device is 0; allowed is a device that torch can use here",
    "tolerances = {}": (
        "tolerances is {}; allowed is a mapping with a finite number from 0 on for each of torch.float32, "
        "torch.float16, torch.bfloat16; it has none for torch.float32, torch.float16, torch.bfloat16"
    ),
    "tolerances = 0.1": "tolerances is 0.1; allowed is a mapping with a finite number",
    "tolerances = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 'x')": "tolerances is {",
    "any_mask = 'no'": "any_mask is 'no'; allowed is True or False",
    "capture = 3": "capture is 3; allowed is a function that takes what verify_attention takes",
    "dtypes = property(lambda self: 1 / 0)": "dtypes cannot be read: it raised ZeroDivisionError: division",
}


@pytest.mark.parametrize("line", ATTRIBUTES)
def test_an_attribute_that_is_not_allowed_is_refused(run: Run, folder: Path, line: str) -> None:
    """It is named with what stands there and what is allowed, before a call is made; by every way in."""
    (folder / "own.py").write_text(
        "import torch\n\n\nclass Mine:\n"
        f"    {line}\n\n"
        "    def verify_attention(self, *given):\n        raise AssertionError('called')\n"
    )
    for verb in ("conform", "isolate"):
        result = run(verb, "own.py:Mine", "--json")
        assert (result.exit_code, result.stdout) == (2, ""), result.stdout
        first, step = result.stderr.splitlines()
        assert first.startswith(f"error: own.py:Mine: {ATTRIBUTES[line]}")
        assert step.startswith("next: ddtree conform --help")


def test_attributes_may_be_lists_and_devices(run: Run, folder: Path) -> None:
    """And of one dtype a tolerance is enough."""
    (folder / "own.py").write_text(
        "import torch\n\nfrom ddtree import spec\n\n\nclass Mine:\n"
        "    mask_forms, dtypes = ['bits', 'flat'], [torch.float16]\n"
        "    tolerances, device, call_limit = {torch.float16: 0.01}, torch.device('cpu'), 30\n\n"
        "    def verify_attention(self, *given):\n        return spec.verify_attention(*given)\n"
    )
    result = run("conform", "own.py:Mine", "--only", "v", "--examples", 4)
    assert (result.exit_code, "4 hold, 0 broken" in result.stdout) == (0, True), result.stdout


def test_a_backend_that_refuses_everything_is_not_green(run: Run, folder: Path) -> None:
    """Nothing was judged: exit code 2, with the reason."""
    (folder / "mine.py").write_text(MINE)
    told = {
        ("conform", "--examples", "3"): "cannot tell: it refused every case (closed today)",
        (
            "isolate",
            "--calls",
            "5",
        ): "cannot tell: it refused every call (closed today)",
    }
    for (verb, *most), said in told.items():
        result = run(verb, "mine.py:Refuses", *most)
        assert (result.exit_code, said in result.stdout) == (2, True), result.stdout
        plain = run(verb, "mine.py:Refuses", *most, "--json")
        assert plain.exit_code == 2
        assert json.loads(plain.stdout)
        for ended in (result, plain):
            assert f"error: mine.py:Refuses: {said}\nnext: " in ended.stderr


def test_what_a_backend_prints_is_beside_the_json(folder: Path) -> None:
    """Printed in Python or by a library in C, it goes to stderr."""
    (folder / "mine.py").write_text(MINE)
    some = ("mine.py:Prints", "--only", "values, float32", "--examples", "2", "--json")
    command = [sys.executable, "-m", "ddtree", "conform", *some]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    ended = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    assert [prop["state"] for prop in json.loads(ended.stdout)["properties"]] == ["holds"]
    assert ended.stderr.count(b"of Python\n") == ended.stderr.count(b"of a kernel\n") == 2


def test_where_the_checker_finds_nothing_it_is_not_proposed(run: Run, folder: Path) -> None:
    """A builder of trees that raises: its input alone is written, and that is sound."""
    (folder / "mine.py").write_text(MINE)
    result = run("conform", "mine.py:Tree", "--examples", "3")
    assert result.exit_code == 1
    file = "ddtree-conform/mine-py-Tree-build-tree.safetensors"
    nothing = f"ddtree check finds nothing in {file}"
    assert "it raised ValueError: boom (mine.py:" in result.stdout
    assert (
        f"the call itself is sound, what the backend makes of it is not; {nothing}" in result.stdout
    )
    assert f"  ddtree check {file}" not in result.stdout
    assert run("check", file).exit_code == 0


def test_a_module_that_cannot_be_imported_is_refused(run: Run, folder: Path) -> None:
    """Whatever it raises, and where."""
    (folder / "ends.py").write_text("x = 1\nraise SystemExit(0)\n")
    result = run("conform", "ends.py:Mine")
    assert result.exit_code == 2
    assert "cannot be imported: it raised SystemExit: 0 (ends.py:2)" in result.stderr


def test_a_backend_that_leaves_the_program_is_broken(run: Run, folder: Path) -> None:
    """SystemExit(0) is the backend's failure, not the command's success."""
    (folder / "mine.py").write_text(MINE)
    result = run("conform", "mine.py:Leaves", "--only", "values, float32", "--examples", "3")
    assert result.exit_code == 1
    assert "it raised SystemExit: 0 (mine.py:29)" in result.stdout
    assert run("isolate", "mine.py:Leaves", "--calls", "10").exit_code == 1


def test_what_is_not_offered_is_not_said_to_hold(run: Run, folder: Path) -> None:
    """A property that was asked for and that the backend lacks: exit code 2."""
    (folder / "mine.py").write_text(MINE)
    result = run("conform", "mine.py:Mine", "--only", "window", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "does not offer what 'window' asks for" in result.stderr
    assert "verify_attention takes no window" in result.stderr


@pytest.mark.parametrize(
    ("verb", "option", "out"),
    [
        ("isolate", "--out", "no/o.json"),
        ("conform", "--out", "mine.py/out"),
        ("conform", "--html", "/proc/q.html"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_at_once(
    run: Run, folder: Path, verb: str, option: str, out: str
) -> None:
    """Before the backend is so much as imported; root may not write everywhere either."""
    (folder / "mine.py").write_text("raise AssertionError('imported')")
    result = run(verb, "mine.py:Mine", option, out)
    assert result.exit_code == 2
    assert "imported" not in result.stderr
    assert "next: " in result.stderr


def test_isolation_is_proposed_where_it_can_help(run: Run, folder: Path) -> None:
    """Where numbers alone are wrong it finds nothing, is not proposed, and says what it does not cross."""
    (folder / "mine.py").write_text(MINE)
    wrong = run("conform", "mine.py:Sees", "--only", "values, float32", "--examples", "5")
    assert (wrong.exit_code, "ddtree isolate" in wrong.stdout) == (1, False)
    nothing = run("isolate", "mine.py:Sees", "--calls", "60")
    assert nothing.exit_code == 0
    assert "not crossed: windows, softcap, sinks, log-sum-exp, values" in nothing.stdout
    file = "ddtree-conform/mine-py-Sees-values-float32.safetensors"
    assert f"ddtree check finds nothing in {file}" in wrong.stdout
    assert run("check", file).exit_code == 0
    seen = run("conform", "inverted", "--only", "visible set, fixed", "--examples", "5")
    assert "next: ddtree isolate inverted" in seen.stdout


@pytest.mark.parametrize("verb", ["conform", "isolate"])
def test_without_a_backend_the_built_in_ones_are_listed(run: Run, verb: str) -> None:
    """Peers, faults, and how one's own is named."""
    result = run(verb)
    assert result.exit_code == 0
    for name in ("sglang-triton", "sdpa", "founding-bug", "module:object"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "there is no built-in backend 'nothing'"),
        ("none.py:Mine", "there is no file none.py"),
        ("no_such_module:Mine", "no_such_module:Mine cannot be imported"),
        ("ddtree.spec:Mine", "has no attribute 'Mine'"),
        ("pathlib:Path", "Path offers none of the functions build_tree"),
    ],
)
def test_a_backend_that_is_none_is_refused(run: Run, name: str, said: str) -> None:
    """One message with a next step, exit code 2."""
    result = run("conform", name)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_an_unknown_property_is_refused(run: Run) -> None:
    """The message lists those there are."""
    result = run("conform", "reference", "--only", "speed")
    assert result.exit_code == 2
    assert "no property is called 'speed'" in result.stderr
    assert "'values, float16', 'values, bfloat16'" in result.stderr


@pytest.mark.parametrize("verb", ["conform", "isolate"])
def test_nothing_is_left_in_the_folder(folder: Path, verb: str) -> None:
    """A process of its own writes neither hypothesis' files nor an empty folder for cases."""
    (folder / "mine.py").write_text(MINE)
    some = ("--examples", "40", "--only", "visible") if verb == "conform" else ("--calls", "60")
    command = [sys.executable, "-B", "-m", "ddtree", verb, "mine.py:Mine", *some]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    environment.pop("HYPOTHESIS_STORAGE_DIRECTORY", None)
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    assert [path.name for path in folder.iterdir()] == ["mine.py"]
