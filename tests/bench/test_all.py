"""What ``make bench`` runs where."""

from pathlib import Path

from bench.all import FOLDER, subjects


def test_what_a_machine_cannot_run_has_a_reason() -> None:
    """A CPU runs what needs no GPU, a GPU the rest, and the official code only where it is."""
    on_gpus = {"sampling", "attention", "round", "debug_overhead", "loop", "parts", "official"}
    for official, cuda, left_out in (
        (None, False, on_gpus),
        ("/somewhere", False, on_gpus),
        (None, True, {"official"}),
        ("/somewhere", True, set()),
    ):
        every = subjects(Path("out"), official, cuda=cuda)
        assert {subject.name for subject in every if subject.lacking} == left_out


def test_every_subject_is_a_script() -> None:
    """Each subject has a script of its name."""
    for subject in subjects(Path("out"), None, cuda=True):
        assert (FOLDER / f"{subject.name}.py").is_file()
