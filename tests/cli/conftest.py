"""What the tests of the command line share: a runner, and a small real model in a folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from ddtree.cli.app import app
from tests.decoding.tiny import VOCAB, tiny_model

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run the app in this process: ``run("check", "file")``."""
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers with random weights, and a tokenizer whose tokens are a, b, c, ..."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    words = {chr(ord("a") + i): i for i in range(26)} | {str(i): 26 + i for i in range(VOCAB - 26)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))  # noqa: S106 (a token of text)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
