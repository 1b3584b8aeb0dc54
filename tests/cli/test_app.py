"""The command itself: help, version, speed, and errors that leave it as one message."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from ddtree.cli.output import need, write_whole
from tests.cli.conftest import Run

VERBS = (
    "generate",
    "tune",
    "demo",
    "check",
    "dump",
    "show",
    "report",
    "catalogue",
    "hooks",
    "prove",
)


def command(*args: object, **env: str) -> "subprocess.CompletedProcess[str]":
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ddtree", *map(str, args)],
        capture_output=True, text=True, check=False, encoding="utf-8", env={**os.environ, **env},
    )  # fmt: skip


def test_version(run: Run) -> None:
    """The installed version, and success."""
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"ddtree {version('ddtree')}\n")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_teaches_by_examples(run: Run, verb: str) -> None:
    """Every verb's help shows how it is called."""
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"ddtree {verb}" in result.stdout.split("Examples")[1]


def test_help_lists_the_verbs(run: Run) -> None:
    """All five are told."""
    listed = run("--help").stdout
    assert all(verb in listed for verb in VERBS)


def test_help_loads_neither_torch_nor_matplotlib() -> None:
    """So it answers at once."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from ddtree.cli.app import app\n"
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


BAD = {
    "budget below 0": (("generate", "x", "--budget", "-1"), "-1; it must be at least 0"),
    "budget word": (
        ("generate", "x", "--budget", "few"),
        "few is neither a whole number nor 'auto'",
    ),
    "topk beside auto": (
        ("generate", "x", "--budget", "auto", "--topk", "3"),
        "--topk cannot be given with --budget auto, which chooses it",
    ),
    "tune budgets": (("tune", "--budgets", "7,x"), "'7,x' is no list of whole numbers"),
    "tune budget 0": (
        ("tune", "--budgets", "0,7"),
        "Invalid value for --budgets: '0,7' is no list of whole numbers from 1 to 4096",
    ),
    "tune topks": (("tune", "--topks", "1,0"), "Invalid value for --topks: 0 is neither 'all' nor"),
    "tune plot": (("tune", "--plot", "x.pdf"), "x.pdf ends in neither .png nor .svg"),
    "tune plot folder": (("tune", "--plot", "no/x.png"), "there is no folder no"),
    "tune no prompts": (("tune", "--prompts", "none.txt"), "'none.txt' does not exist"),
    "topk 0": (("generate", "x", "--topk", "0"), "0 is neither 'all' nor a whole number"),
    "topk word": (("show", "--topk", "few"), "few is neither 'all' nor a whole number"),
    "block size 0": (("generate", "x", "--block-size", "0"), "0; it must be at least 1"),
    "temperature below 0": (
        ("generate", "x", "--temperature", "-1"),
        "-1.0; it must be at least 0",
    ),
    "temperature NaN": (("generate", "x", "--temperature", "nan"), "nan; it must be at least 0"),
    "top-p above 1": (("generate", "x", "--temperature", "1", "--top-p", "1.5"), "1.5 is not in"),
    "top-k without sampling": (
        ("generate", "x", "--top-k", "3"),
        "--top-k cannot be given with --temperature 0",
    ),
    "seed without sampling": (("generate", "x", "--seed", "3"), "--seed cannot be given"),
    "temperature infinite": (
        ("generate", "x", "--temperature", "inf"),
        "inf; it must be at least 0",
    ),
    "no new tokens": (("generate", "x", "--max-new-tokens", "0"), "0; it must be at least 1"),
    "unknown target": (("generate", "x", "--target", "/no/such"), "'/no/such': no such file"),
    "unknown draft": (
        ("generate", "x", "--draft", "no-such"),
        "'no-such' is neither 'embedded' nor",
    ),
    "prefix below 0": (("dump", "x.npz", "--prefix", "-1"), "-1; it must be at least 0"),
    "unknown fault": (
        ("dump", "x.npz", "--fault", "bad=1"),
        "'bad=1' is unknown; there are: width",
    ),
    "fault width 0": (("dump", "x.npz", "--fault", "width=0"), "width needs a width from 1 on"),
    "fault width word": (("dump", "x.npz", "--fault", "qo_indptr=a"), "qo_indptr needs a width"),
    "two sources": (
        ("dump", "x.npz", "--prefix", "5", "--prompt", "x"),
        "--prefix cannot be given with --prompt",
    ),
    "seed of a live call": (
        ("dump", "x.npz", "--seed", "1", "--prompt", "x"),
        "--seed cannot be given with --prompt",
    ),
    "round of a made-up call": (
        (
            "dump",
            "x.npz",
            "--prefix",
            "5",
            "--round",
            "3",
            "--raw",
            "--target",
            "a",
            "--draft",
            "b",
        ),
        "--round, --target, --draft, --chat/--raw cannot be given without --prompt",
    ),
    "options beside a file": (
        ("show", "x.npz", "--prefix", "5", "--budget", "3", "--seed", "1", "--fault", "width=8"),
        "--prefix, --budget, --seed, --fault cannot be given with a file",
    ),
    "prompt beside a file": (("show", "x.npz", "--prompt", "x"), "--prompt cannot be given"),
    "fault width as it is": (
        ("dump", "x.npz", "--budget", "7", "--fault", "width=8"),
        "changes nothing: this call's q_len is 8 itself; take another width",
    ),
    "fault without padding": (
        ("dump", "x.npz", "--fault", "padding=visible"),
        "changes nothing: no row is padding (num_nodes [17], q_len [17]); use --topk 1",
    ),
    "fault in a chain": (
        ("show", "--topk", "1", "--fault", "positions=row"),
        "changes nothing: the tree is a chain",
    ),
    "dump suffix": (("dump", "x.txt"), "x.txt ends in '.txt'; a captured call is one of"),
    "dump to a folder": (("dump", "."), "cannot write .: it is a folder"),
    "check of a folder": (("check", "."), ". is a folder, not a file"),
    "unknown verb": (("chek", "x.npz"), "No such command 'chek'"),
    "unknown option": (("check", "x.npz", "--jsn"), "No such option: --jsn"),
    "unknown option of the command": (("--jsn",), "No such option: --jsn"),
    "no number": (("show", "--budget", "x"), "Invalid value for '--budget'"),
    "dump folder": (("dump", "no/such/x.npz"), "there is no folder"),
    "check no file": (("check", "no-such.npz"), "there is no file no-such.npz"),
    "check no file of that suffix": (("check", "no-such.pt"), "there is no file no-such.pt"),
    "show to a picture": (
        ("show", "--out", "a b.png"),
        "a b.png ends in .png, as a file; --out takes the folder that files are written into",
    ),
    "conform to a file": (
        ("conform", "founding-bug", "--out", "x.safetensors"),
        "x.safetensors ends in .safetensors, as a file; --out takes the folder",
    ),
    "prove to a file": (("prove", "bit_words", "--cases", "x.npz"), "--cases takes the folder"),
    "demo to a picture": (("demo", "--out", "tree.svg"), "tree.svg ends in .svg, as a file"),
    "isolate to a page": (
        ("isolate", "founding-bug", "--out", "x.html"),
        "x.html is to hold JSON; a page is what --html writes",
    ),
    "replay no file": (("replay", "no.safetensors"), "there is no file no.safetensors"),
    "case no file": (
        ("conform", "founding-bug", "--case", "no.safetensors"),
        "there is no file no.safetensors",
    ),
    "module no file": (("isolate", "no.py:Mine"), "there is no file no.py"),
    "catalogue word": (("catalogue", "nope"), "the catalogue has no row nope; it has 1, 2, 3"),
    "catalogue number": (("catalogue", "99"), "the catalogue has no row 99; it has 1, 2, 3"),
    "show no file": (("show", "no-such.npz"), "there is no file no-such.npz"),
    "show request": (("show", "--request", "2"), "--request is 2, the call has 1"),
    "demo length": (("demo", "--max-new-tokens", "1"), "1; it must be at least 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2, the number and what is allowed on stderr, nothing on stdout, no file."""
    monkeypatch.chdir(tmp_path)
    args, said = BAD[name]
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr
    *_, error, following = result.stderr.splitlines()  # before them, progress
    assert error.startswith("error: ")
    assert following.startswith("next: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("nosuch", "or a .gguf file; or fetch this one: hf download nosuch"),
        ("someone/nosuch", "hf download someone/nosuch"),
        (
            "./nosuch",
            "give --target embedded, or the folder of a Transformers model, or a .gguf file",
        ),
        ("nosuch.gguf", "or a .gguf file"),
        ("embeded", "did you mean --target embedded?"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "tune"])
def test_a_target_that_is_none_has_a_next_step(run: Run, verb: str, name: str, step: str) -> None:
    """What can be given, and how a model of the hub is fetched."""
    result = run(verb, *(["x"] if verb == "generate" else []), "--target", name)
    assert result.exit_code == 2
    assert f"error: target {name!r}" in result.stderr
    assert result.stderr.endswith(f"{step}\n")


def test_an_embedded_target_that_cannot_be_kept_has_a_next_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message tells the variable, and the step another model."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = run("generate", "x")
    assert result.exit_code == 2
    assert "set XDG_CACHE_HOME to another place" in result.stderr
    assert result.stderr.endswith("next: mend that, or give another model: --target FOLDER\n")


@pytest.mark.parametrize("args", [("demo", "--out"), ("show", "--out")])
def test_an_out_folder_that_cannot_be_written_is_told_first(
    run: Run, tmp_path: Path, args: tuple[str, ...]
) -> None:
    """Before any work, with the reason and the next step."""
    (tmp_path / "file").write_text("in the way")
    result = run(*args, tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "cannot write into" in result.stderr
    assert "--out" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("module", ["typer", "rich.table", "ddtree.cli.tune"])
def test_an_interruption_at_the_start_ends_it_quietly(module: str) -> None:
    """Wherever its imports are: exit code 130, and no traceback."""
    stops = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Stops:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stops())\n"
        "sys.argv = ['ddtree', 'check', 'call.npz']\n"
        "from ddtree.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", stops], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_real_command_leaves_bad_input_without_a_traceback() -> None:
    """What holds in this process holds in a shell."""
    done = command("check", "no-such.safetensors")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no file no-such.safetensors")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_narrow_plain_ascii_output() -> None:
    """No colour, 30 columns, no Unicode: still a tree and a mask, and no escape codes."""
    done = command("show", "--budget", "3", COLUMNS="30", NO_COLOR="1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "#####|#..." in done.stdout
    assert "|- 1" in done.stdout


def test_a_missing_extra_is_named_with_its_install_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The modules that lack, and exactly what installs them."""
    with pytest.raises(typer.Exit) as left:
        need("plots", "math", "no_such_module")
    assert left.value.exit_code == 2
    said = capsys.readouterr().err
    assert "this needs no_such_module" in said
    assert "pip install 'ddtree[plots]'" in said


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    """A target that cannot be replaced leaves no temporary file behind."""
    write_whole(tmp_path / "good", b"all of it")
    assert (tmp_path / "good").read_bytes() == b"all of it"
    (tmp_path / "folder" / "in the way").mkdir(parents=True)
    with pytest.raises(typer.Exit):
        write_whole(tmp_path / "folder", b"data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "good"]


@pytest.mark.parametrize("args", ["check call.npz --json", "check call.npz", "--help", "show"])
def test_a_closed_pipe_is_never_a_broken_call(tmp_path: Path, args: str) -> None:
    """The reader leaves at once: the command ends by the signal, as others do, or had written all."""
    assert command("dump", tmp_path / "call.npz").returncode == 0
    shell = f"set -o pipefail; '{sys.executable}' -m ddtree {args} | true"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode in {0, 141}
    assert done.stderr == ""


@pytest.mark.parametrize("verb", ["check", "dump", "show"])
def test_a_debug_variable_that_is_not_understood(tmp_path: Path, verb: str) -> None:
    """One message and exit code 2, no traceback."""
    done = command(verb, tmp_path / "call.npz", DDTREE_DEBUG="garbage")
    assert done.returncode == 2
    assert done.stderr.startswith("error: DDTREE_DEBUG is 'garbage'; understood are 1")
    assert "next: set DDTREE_DEBUG=1" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_refuses_the_variable_itself() -> None:
    """A program that is not the command gets the error where it imports."""
    done = subprocess.run(
        [sys.executable, "-c", "import ddtree"],
        capture_output=True, text=True, check=False, env={**os.environ, "DDTREE_DEBUG": "garbage"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "InputError: DDTREE_DEBUG is 'garbage'" in done.stderr


def test_check_help_lists_every_field(run: Run) -> None:
    """By the names that a file must have."""
    from ddtree.invariants.call import FIELDS

    listed = run("check", "--help").stdout.split("Fields")[1].split("Examples")[0]
    names = listed.replace(",", " ").split()
    assert set(FIELDS) <= set(names)


def test_generation_of_strategies_names_its_extra() -> None:
    """Without hypothesis the import says what to install."""
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "try:\n    import ddtree.invariants.strategies\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'ddtree[fuzz]'" in done.stdout
