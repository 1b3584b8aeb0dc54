"""``prove`` through the command: the table, one proof in full, its counterexamples as files, JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import z3

from ddtree.cli import prove as verb
from ddtree.invariants import proofs
from ddtree.invariants.proofs import PROOFS, Proof, Twin, proof
from tests.cli.conftest import Run

SOME = ("commit_moves", "bit_words")


def test_a_proof_in_full(run: Run) -> None:
    """Goals, twins, numbers and the command that shows the checker the counterexample."""
    result = run("prove", "packed_bits")
    assert result.exit_code == 0, result.stdout
    assert "packed_bits: proved in" in result.stdout
    assert "goal requests_share_no_byte: The next request starts on a fresh byte" in result.stdout
    assert "twin no_byte_padding" in result.stdout
    assert "num_bits = 1" in result.stdout
    file = "out/packed_bits.no_byte_padding.safetensors"
    assert (
        f"ddtree prove packed_bits --cases out; ddtree check {file}    # packed_len"
        in result.stdout
    )
    assert result.stdout.splitlines()[-1].startswith(
        "holds: 1 of 1 proof; 4 of 4 wrong twins refuted"
    )


def test_counterexamples_are_calls(run: Run, tmp_path: Path) -> None:
    """Each file that is written is one that check refuses, by the invariant that was named."""
    plain = json.loads(run("prove", *SOME, "--cases", tmp_path / "o ut", "--json").stdout)
    assert plain["ok"] and [proof["name"] for proof in plain["proofs"]] == list(SOME)
    broken = {
        f"{proof['name']}.{twin['name']}": twin["breaks"]
        for proof in plain["proofs"]
        for twin in proof["twins"]
        if twin["breaks"]
    }
    told = [twin["check"] for proof in plain["proofs"] for twin in proof["twins"]]
    assert sorted(broken) == sorted(Path(file).stem for file in plain["written"])
    for file in plain["written"]:
        assert f"ddtree check '{file}'" in told
        result = run("check", file)
        assert result.exit_code == 1
        assert f"{broken[Path(file).stem]} is broken" in result.stdout


def test_a_place_for_cases_that_is_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    """With the option that names it."""
    (tmp_path / "mine.py").touch()
    result = run("prove", "bit_words", "--cases", tmp_path / "mine.py")
    assert result.exit_code == 2
    assert "next: choose another folder with --cases\n" in result.stderr


def test_the_whole_table(run: Run) -> None:
    """Without a name all proofs are listed, and the JSON holds the sizes at which offsets overflow."""
    result = run("prove", "--json")
    assert result.exit_code == 0
    plain = json.loads(result.stdout)
    assert [proof["name"] for proof in plain["proofs"]] == [proof.name for proof in PROOFS]
    assert {limit["smallest"] for limit in plain["limits"]} >= {46341, 14135, 2**31}
    assert all(twin["refuted"] for proof in plain["proofs"] for twin in proof["twins"])


def test_a_table_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a proof: name, statement, formulas, seconds, twins; the last line counts them."""
    monkeypatch.setattr(proofs, "PROOFS", tuple(p for p in PROOFS if p.name in SOME))
    lines = run("prove").stdout.splitlines()
    assert lines[0].split() == [
        "proof",
        "for",
        "all",
        "sizes",
        "formulas",
        "seconds",
        "twins",
        "refuted",
    ]
    assert [line.split()[0] for line in lines if line.startswith(SOME)] == [
        "bit_words",
        "commit_moves",
    ]
    assert lines[-1].startswith("holds: 2 of 2 proofs; 8 of 8 wrong twins refuted")


def test_a_twin_that_is_right_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a twin is not refuted the verdict and the exit code say so."""
    proof = next(proof for proof in PROOFS if proof.name == "commit_moves")
    right = Twin("right", "It is not wrong at all.", {"kv_len": lambda p, q: q + p})
    spoiled = Proof(proof.name, proof.statement, proof.goals, (*proof.twins, right))
    monkeypatch.setattr(proofs, "PROOFS", (spoiled,))
    result = run("prove", "commit_moves")
    assert result.exit_code == 1
    assert "NOT REFUTED" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(
        "DOES NOT HOLD: 1 of 1 proof; 4 of 5 wrong twins"
    )


def test_unknown_proof(run: Run) -> None:
    """A name that is none is refused with those that are."""
    result = run("prove", "mask_widths")
    assert result.exit_code == 2
    assert "there is no proof 'mask_widths'" in result.stderr
    assert "mask_width," in result.stderr


def test_without_z3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra it says how to install it."""
    from ddtree.cli import output

    monkeypatch.setattr(output, "find_spec", lambda name: None)
    result = run("prove")
    assert result.exit_code == 2
    assert "this needs z3" in result.stderr and "pip install 'ddtree[proofs]'" in result.stderr


def test_exhaustive(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons join the table; one that found a difference ends in exit code 1."""
    from ddtree.invariants.proofs.exhaustive import Checked

    parts = [Checked("every_tree", 2827, (), "words[0, 0]: 1 for 0", 1.0)]
    monkeypatch.setattr(verb, "_exhaustive", lambda say: iter(parts))
    result = run("prove", "bit_words", "--exhaustive")
    assert result.exit_code == 0
    assert "1 of 1 exhaustive comparison; 5 of 5 wrong twins refuted" in result.stdout
    parts[0] = Checked("every_tree", 3, ("budget 2: words[1, 0]: 3 for 1",), "found", 1.0)
    result = run("prove", "bit_words", "--exhaustive")
    assert result.exit_code == 1
    assert "every_tree: budget 2: words[1, 0]: 3 for 1" in result.stdout


INTERRUPT_ITSELF = """
import os, signal, threading
from ddtree.cli.app import run
from ddtree.invariants.proofs import proof

count, check = 0, proof._check

def interrupted(solver):
    global count
    count += 1
    if count == 5:  # once, while z3 solves or just before
        threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()
    return check(solver)

proof._check = interrupted
run()
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.2])
def test_one_interrupt_ends_it(delay: float) -> None:
    """One SIGINT is enough wherever it comes: neither z3 nor a destructor swallows it."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT_ITSELF.format(delay=delay), "prove"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout) == (130, ""), done
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr


INTERRUPT_ALL = """
import os, signal, threading, time
from multiprocessing import active_children
from ddtree.cli.app import run

def interrupt():
    while not (workers := active_children()):
        time.sleep(0.01)
    time.sleep(0.5)  # they are importing, or at work: neither may be told of with a traceback
    print(time.time(), *(worker.pid for worker in workers), flush=True)
    os.killpg(0, signal.SIGINT)

if __name__ == "__main__":  # a worker imports this too
    threading.Thread(target=interrupt, daemon=True).start()
    run()
"""


def test_an_interrupt_ends_the_workers(tmp_path: Path) -> None:
    """Ctrl-C of a terminal goes to all processes: the command ends at once, without a word of theirs."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPT_ALL)
    done = subprocess.run(
        [sys.executable, script, "prove", "bit_words", "--exhaustive"],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    sent, *workers = done.stdout.split()
    assert time.time() - float(sent) < 5, "a part takes a minute"
    assert done.returncode == 130, done
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(worker), 0)


def test_an_interrupt_that_z3_took_is_one() -> None:
    """Z3's own word for Ctrl-C is no verdict."""

    class Interrupted:
        def check(self) -> object:
            return z3.unknown

        def reason_unknown(self) -> str:
            return "interrupted from keyboard"

    with pytest.raises(KeyboardInterrupt):
        proof._check(Interrupted())
