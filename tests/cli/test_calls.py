"""``dump``, ``check`` and ``show`` on captured calls, made up and live."""

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree.cli.app import app
from ddtree.invariants import Call, debug, load
from ddtree.invariants.recorded import record
from ddtree.spec import InputError, convert_mask, verify_attention
from tests.cli.conftest import Run
from tests.invariants.calls import verify


def dumped(run: Run, file: Path, *args: object) -> Path:
    """Write a call and return where."""
    result = run("dump", file, *args)
    assert result.exit_code == 0, result.stderr
    return file


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_sound_call_is_held(run: Run, tmp_path: Path, suffix: str) -> None:
    """Nothing is broken, what is missing is listed, and the exit code is 0."""
    file = dumped(run, tmp_path / f"call.{suffix}", "--prefix", 5, "--budget", 16)
    result = run("check", file)
    assert result.exit_code == 0
    assert "nothing is broken" in result.stdout
    assert "mask_len" in result.stdout
    count = result.stdout.split("not checked: ")[1].split()[0]
    assert result.stdout.count("not checked: ") == 1
    listed = run("check", file, "--verbose").stdout
    assert "not checked: packed_len (no packed)" in listed
    assert listed.count("not checked: ") == int(count)


def test_the_founding_bug_is_named_with_its_numbers(run: Run, tmp_path: Path) -> None:
    """Prefix 5, q_len 17, width 8: mask length, 374, 104 and the width."""
    args = ("--prefix", 5, "--budget", 16, "--fault", "width=8")
    result = run("check", dumped(run, tmp_path / "call.safetensors", *args))
    assert result.exit_code == 1
    assert "mask_len is broken in request 0: expected 374, found 104" in result.stdout
    assert "width 8; this call's q_len is 17" in result.stdout


def test_the_founding_bug_in_a_batch(run: Run, tmp_path: Path) -> None:
    """Prefixes 5 and 3: the mask has 714 entries, mask_indptr ends at 192."""
    args = ("--prefix", 5, "--prefix", 3, "--fault", "width=8", "--json")
    result = run("dump", tmp_path / "call.npz", *args)
    told = json.loads(result.stdout)
    assert (told["mask_entries"], told["mask_indptr_end"]) == (714, 192)
    assert run("check", tmp_path / "call.npz").exit_code == 1


FAULTS = {
    "width=8": "mask_len",
    "qo_indptr=8": "qo_indptr",
    "mask_indptr=8": "mask_len",
    "max_q_len=8": "max_q_len",
    "mask=inverted": "visibility",
    "padding=visible": "padding_invisible",
    "positions=row": "positions",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_and_named(run: Run, tmp_path: Path, fault: str) -> None:
    """A fault put in by dump is what check names, in JSON too."""
    # topk 1 leaves padding and is a chain, where rows and depths agree: positions need branches
    topk = "all" if fault == "positions=row" else "1"
    file = dumped(run, tmp_path / "call.npz", "--topk", topk, "--fault", fault)
    result = run("check", file, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (told["ok"], told["conformance"]) == (False, None)
    assert FAULTS[fault] in {one["invariant"] for one in told["broken"]}


def test_a_seed_repeats(run: Run, tmp_path: Path) -> None:
    """The same options give the same file, another seed another."""
    first = dumped(run, tmp_path / "a.safetensors", "--seed", 3).read_bytes()
    assert dumped(run, tmp_path / "b.safetensors", "--seed", 3).read_bytes() == first
    assert dumped(run, tmp_path / "c.safetensors", "--seed", 4).read_bytes() != first


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_truncated_file_is_refused(run: Run, tmp_path: Path, suffix: str) -> None:
    """Exit code 2 and one message, from check and from show."""
    file = dumped(run, tmp_path / f"call.{suffix}")
    file.write_bytes(file.read_bytes()[:-40])
    for verb in ("check", "show"):
        result = run(verb, file)
        assert result.exit_code == 2
        assert str(file) in result.stderr
        assert result.stdout == ""


def test_a_file_of_pickles_is_not_unpickled(run: Run, tmp_path: Path) -> None:
    """An object array is refused, not loaded."""
    np.savez(tmp_path / "call.npz", qo_indptr=np.array([{}], dtype=object))
    result = run("check", tmp_path / "call.npz")
    assert result.exit_code == 2
    assert "qo_indptr is no plain array of numbers; write it as int32 or int64" in result.stderr
    assert "allow_pickle" not in result.stderr


def test_other_names_are_listed_as_not_read(run: Run, tmp_path: Path) -> None:
    """All of them, in the report and in JSON; a suggestion only where it is close and wanting."""
    arrays = {"draft_token_num": np.array(17), "seq_lens": np.array([5]), "qo_indptrs": np.ones(2)}
    np.savez(tmp_path / "call.npz", kv_indptr=np.array([0, 5]), **arrays)  # type: ignore[arg-type]
    result = run("check", tmp_path / "call.npz")
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("not read")]
    assert line.startswith("not read: draft_token_num, seq_lens (")
    assert line.endswith("qo_indptrs (did you mean qo_indptr?)")
    told = json.loads(run("check", tmp_path / "call.npz", "--json").stdout)
    assert list(told["not_read"]) == list(arrays)
    assert told["not_read"]["draft_token_num"] == ""


def test_a_file_without_any_known_name_is_refused(run: Run, tmp_path: Path) -> None:
    """What it holds, and all names that are known, on lines that can be read."""
    np.savez(tmp_path / "call.npz", qo_indptrs=np.array([0, 17]), seq=np.array([1]))
    result = run("check", tmp_path / "call.npz")
    assert result.exit_code == 2
    assert "found: qo_indptrs (did you mean qo_indptr?), seq" in result.stderr
    assert "mask_indptr" in result.stderr and "custom_mask" in result.stderr
    assert max(len(line) for line in result.stderr.splitlines()[1:-1]) <= 80


@pytest.mark.parametrize(
    ("name", "following"),
    [
        ("folder", "call.npz"),
        ("none.npz", "ddtree dump"),
        ("call.pt", "save_file"),
        ("bad.npz", "lists the fields"),
    ],
)
def test_a_bad_file_has_a_fitting_next_step(
    run: Run, tmp_path: Path, name: str, following: str
) -> None:
    """A folder's first call, an example, the way to write one."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "call.npz").touch()
    (tmp_path / "bad.npz").write_text("garbage")
    result = run("check", tmp_path / name)
    assert result.exit_code == 2
    assert following in result.stderr.split("next: ")[1]


@pytest.mark.parametrize(
    ("written", "named", "kind"),
    [
        ("call.npz", "call.safetensors", "an .npz"),
        ("call.safetensors", "call.npz", "a .safetensors"),
    ],
)
def test_a_file_of_the_other_suffix_is_to_be_renamed(
    run: Run, tmp_path: Path, written: str, named: str, kind: str
) -> None:
    """Its first bytes tell what it is; after the renaming it is read."""
    right, wrong = tmp_path / written, tmp_path / named
    dumped(run, right).rename(wrong)
    for verb in ("check", "replay"):
        result = run(verb, wrong)
        assert result.exit_code == 2
        assert f"{wrong} is {kind} file by its first bytes: rename it to {written}" in result.stderr
    assert f"next: mv {wrong} {right}" in run("check", wrong).stderr
    wrong.rename(right)
    assert run("check", right).exit_code == 0


def test_a_dump_of_wrong_types_is_no_captured_call(run: Run, tmp_path: Path) -> None:
    """Debug mode's file of a call that has no fields: what was wrong, and the command that reads it."""
    _, layout, mask = verify([5, 3], 16, 3)
    call = partial(
        convert_mask, mask, replace(layout, positions=layout.positions.float()), "packed"
    )
    with debug(action="dump", dump_dir=tmp_path), pytest.raises(InputError, match="positions"):
        call()
    (file,) = tmp_path.iterdir()
    for verb in ("check", "report"):
        result = run(verb, file)
        assert result.exit_code == 2
        assert (
            "holds no field of a captured call: it holds the arguments of convert_mask, dumped because "
            "types is broken, in layout.positions of convert_mask: expected Int64[Tensor, 'T'], found "
            f"torch.float32 [{layout.positions.numel()}]"
        ) in result.stderr
        assert result.stderr.endswith(f"next: ddtree replay {file}\n")
    refused = run("replay", file)
    assert refused.exit_code == 2
    assert refused.stdout.startswith(
        "convert_mask is refused by the kernels: VerifyLayout.positions has dtype torch.float32; expected "
        "torch.int32 or torch.int64; and by the reference: VerifyLayout.positions has dtype torch.float32"
    )


def test_a_call_that_the_kernels_refuse_is_run_by_the_reference(run: Run, tmp_path: Path) -> None:
    """A head_dim that they do not have: it is said, with what the reference gives; exit code 2."""
    tree, layout, mask = verify([5, 3], 16, 3)
    rows = layout.positions.numel()
    query, key, pool = torch.randn(rows, 2, 16), torch.randn(rows, 1, 16), torch.randn(400, 1, 16)
    arguments = (query, key, key, pool, pool, layout, mask)
    names = ("query", "key", "value", "key_pool", "value_pool", "layout", "mask")
    given = dict(zip(names, arguments, strict=True))
    file = record(tmp_path / "call.safetensors", "verify_attention", given, Call.of(tree, layout))
    result = run("replay", file)
    assert result.exit_code == 2
    assert "verify_attention is refused by the kernels: head_dim is 16" in result.stdout
    assert f"the reference alone takes the call and gives result[0] float32 [{rows}, 2, 16]" in (
        result.stdout
    )
    plain = run("replay", file, "--json")
    told = json.loads(plain.stdout)
    assert (told["same"], list(told["reference"])) == (False, ["result[0]"])
    for ended in (result, plain):
        assert "error: nothing was compared: verify_attention is refused by the ker" in ended.stderr
        assert "\nnext: " in ended.stderr


def test_a_call_with_the_founding_bug_is_run_again(run: Run, tmp_path: Path) -> None:
    """The end that mask_indptr claims cuts nothing off that the rows read: both run it, and agree."""
    _, layout, mask = verify([5], 10, 3)
    rows = layout.positions.numel()
    wrong = replace(layout, mask_indptr=torch.tensor([0, 8 * 13]))
    query, key, pool = torch.randn(rows, 2, 64), torch.randn(rows, 1, 64), torch.randn(400, 1, 64)
    with debug(action="dump", dump_dir=tmp_path):
        verify_attention(query, key, key, pool, pool, wrong, mask)
    (file,) = tmp_path.iterdir()
    assert "mask_len" in file.name
    result = run("replay", file)
    assert result.exit_code == 0, result.stderr
    assert "reference and kernels (Triton's interpreter) give the same" in result.stdout


def test_a_folder_is_not_replayed(run: Run, tmp_path: Path) -> None:
    """It is named as what it is, whatever its suffix."""
    (tmp_path / "dir.npz").mkdir()
    result = run("replay", tmp_path / "dir.npz")
    assert result.exit_code == 2
    told = f"error: {tmp_path / 'dir.npz'} is a folder, not a file\nnext: give one of its files\n"
    assert result.stderr == told


def test_what_is_no_call_is_not_sent_from_verb_to_verb(run: Run, tmp_path: Path) -> None:
    """A script is neither replayed nor proposed to ``ddtree check``."""
    (tmp_path / "mine.py").write_text("import torch")
    result = run("replay", tmp_path / "mine.py")
    assert result.exit_code == 2
    assert result.stderr.endswith("next: ddtree replay --help\n")


@pytest.mark.parametrize("name", ["call.npz", "call.safetensors", "call.html"])
def test_files_have_the_mode_of_the_umask(run: Run, tmp_path: Path, name: str) -> None:
    """Whoever may read other files may read these."""
    before = os.umask(0o027)
    try:
        call = dumped(
            run, (tmp_path / name).with_suffix(".npz" if "html" in name else Path(name).suffix)
        )
        assert run("report", call).exit_code == 0
    finally:
        os.umask(before)
    assert oct((tmp_path / name).stat().st_mode & 0o777) == "0o640"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("options", "numbers", "step"),
    [
        (
            ("--prefix", "1000000", "--budget", "1024"),
            "1,026,050,625 entries of a byte (1,025 rows over prefixes of 1,000,000 together)",
            "prefixes of 260,863 together fit --budget 1024; or choose a smaller --budget",
        ),
        (
            ("--prefix", "0", "--budget", "4096") + ("--prefix", "0") * 15,
            "268,566,544 entries of a byte (4,097 rows over prefixes of 0 together)",
            "choose a smaller --budget",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["dump", "show"])
def test_a_mask_of_gigabytes_is_refused_before_it_is_made(
    run: Run, tmp_path: Path, verb: str, options: tuple[str, ...], numbers: str, step: str
) -> None:
    """With its size, and what would fit."""
    file = (tmp_path / "call.npz",) if verb == "dump" else ()
    begin = time.monotonic()
    result = run(verb, *file, *options)
    assert time.monotonic() - begin < 1
    assert result.exit_code == 2
    assert f"would have {numbers}; the most is 268,435,456" in result.stderr
    assert result.stderr.endswith(f"next: {step}\n")
    assert not list(tmp_path.iterdir())


def test_the_prefix_that_is_said_to_fit_does(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one entry more does not; with a smaller bound, so that what fits is small."""
    monkeypatch.setattr("ddtree.cli.source.MOST_ENTRIES", 10_000)
    refused = run("dump", tmp_path / "a.npz", "--prefix", "900")
    assert "next: prefixes of 571 together fit --budget 16; or choose" in refused.stderr
    for prefixes, code in (((571,), 0), ((572,), 2), ((300, 254), 0), ((300, 255), 2)):
        args = [arg for prefix in prefixes for arg in ("--prefix", str(prefix))]
        assert run("dump", tmp_path / "b.npz", *args).exit_code == code


def test_a_failed_dump_leaves_the_old_file(run: Run, tmp_path: Path) -> None:
    """Bad options do not cost what was there."""
    file = dumped(run, tmp_path / "call.npz")
    before = file.read_bytes()
    assert run("dump", file, "--fault", "nothing").exit_code == 2
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_live_call_is_dumped_checked_and_shown(
    run: Run, tmp_path: Path, tiny_folder: Path
) -> None:
    """The second verify call of a real generation: sound, and its prefix is the prompt and more."""
    source = ("--prompt", "a b c a b c a b", "--target", tiny_folder, "--round", 2)
    file = dumped(run, tmp_path / "live.safetensors", *source, "--budget", 7)
    assert run("check", file).exit_code == 0
    call = load(file)
    assert call.kv_indptr is not None
    assert int(call.kv_indptr[-1]) > 8
    shown = json.loads(run("show", *source, "--budget", 7, "--json").stdout)
    assert set(shown["tokens"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789")
    assert call.parents is not None
    assert shown["parents"] == call.parents[0, : shown["num_nodes"]].tolist()


def test_a_round_that_never_comes_is_told(run: Run, tmp_path: Path, tiny_folder: Path) -> None:
    """The context is full before round 200."""
    source = ("--prompt", "a b c", "--target", tiny_folder, "--round", 200)
    result = run("dump", tmp_path / "live.npz", *source)
    assert result.exit_code == 2
    assert "--round is 200" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_show_draws_both_files(run: Run, tmp_path: Path) -> None:
    """PNG and SVG, named after the call, and the text on stdout."""
    file = dumped(run, tmp_path / "call.npz", "--fault", "width=8")
    result = run("show", file, "--out", tmp_path / "new" / "pictures")
    assert result.exit_code == 0
    assert "mask_len is broken" in result.stdout
    assert result.stdout.startswith("request 0: prefix_len 5, q_len 8 claimed, 17 by the call, num")
    assert "no query row" in result.stdout
    written = sorted(path.name for path in (tmp_path / "new" / "pictures").iterdir())
    assert written == ["call.png", "call.svg"]


def test_show_json_is_json_alone(run: Run) -> None:
    """Tree, mask and violation, and infinities as null."""
    told = json.loads(run("show", "--topk", 1, "--json").stdout)
    assert (told["q_len"], told["num_nodes"], told["violation"]) == (17, 8, "")
    assert told["parents"] == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert np.array(told["visible"]).shape == (17, 22)


def test_an_empty_batch_is_named(run: Run, tmp_path: Path) -> None:
    """Nothing is broken in no request, which is said; and there is nothing to draw."""
    zero = np.array([0])
    np.savez(
        tmp_path / "call.npz", qo_indptr=zero, kv_indptr=zero, mask_indptr=zero,
        custom_mask=np.zeros(0, bool),
    )  # fmt: skip
    assert "nothing is broken (0 requests; 11 held" in run("check", tmp_path / "call.npz").stdout
    result = run("show", tmp_path / "call.npz")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the call has 0 requests: there is nothing to draw\n")
    np.savez(tmp_path / "part.npz", vocab_size=np.array(5))
    assert "0 requests" not in run("check", tmp_path / "part.npz").stdout


def test_show_needs_a_mask(run: Run, tmp_path: Path) -> None:
    """What is missing is named."""
    np.savez(tmp_path / "call.npz", qo_indptr=np.array([0, 17]))
    result = run("show", tmp_path / "call.npz")
    assert result.exit_code == 2
    assert "lacks kv_indptr, mask_indptr, custom_mask" in result.stderr


def test_the_verbs_are_these() -> None:
    """A verb joins the app by being listed there."""
    assert [command.callback.__name__ for command in app.registered_commands if command.callback] == [
        "generate", "tune", "demo", "check", "dump", "replay", "show", "report", "catalogue", "conform",
        "isolate", "hooks", "prove",
    ]  # fmt: skip


def test_a_call_without_tokens_is_drawn_without_them(run: Run, tmp_path: Path) -> None:
    """No token 0 that was never there; without a tree, no count of nodes either."""
    file = dumped(run, tmp_path / "call.npz", "--topk", 1)
    arrays = dict(np.load(file))
    del arrays["token_ids"]
    np.savez(tmp_path / "bare.npz", **arrays)
    assert json.loads(run("show", tmp_path / "bare.npz", "--json").stdout)["tokens"] == []
    assert "0*  0.00" in run("show", tmp_path / "bare.npz").stdout.splitlines()
    del arrays["parents"]
    np.savez(tmp_path / "bare.npz", **arrays)
    shown = run("show", tmp_path / "bare.npz").stdout
    assert "num_nodes" not in shown.splitlines()[0]
    assert json.loads(run("show", tmp_path / "bare.npz", "--json").stdout)["num_nodes"] is None


def test_a_cut_mask_points_to_the_files_that_have_it(run: Run, tmp_path: Path) -> None:
    """--out is not advised to whoever gave it."""
    wide = ("show", "--budget", 100)
    assert "cut: widen, or use --out" in run(*wide).stdout
    assert "cut: the files have all" in run(*wide, "--out", tmp_path).stdout
