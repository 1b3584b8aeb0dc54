"""Where training prompts come from: this Python's library, PyPI's reasoning-gym, Debian's documents, WordNet.

Every source is a function of a random generator that yields prompts without end or until it has no more.
None needs a hub.
"""

import ast
import gzip
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from ddtree.spec.errors import InputError
from train.held_out import Prompt

REASONING_GYM = "reasoning-gym==0.1.25"
DEBIAN_PACKAGES = ("python3.11-doc", "debian-reference-en", "wordnet-base")
LICENCES = {
    "python": "Python's standard library, PSF-2.0",
    "reasoning-gym": f"PyPI {REASONING_GYM}, Apache-2.0",
    "documents": "Debian's python3.11-doc (PSF-2.0) and debian-reference-en (GPL-2.0-or-later)",
    "wordnet": "Debian's wordnet-base, WordNet 3.0 (WordNet licence)",
    "itself": "the target's own text from no prompt, or its own question",
}
MOST_CHARACTERS = 700


def lacking(names: Sequence[str], debian: Path | None) -> list[str]:
    """What the sources of these names need and is not here, each with what to do."""
    lacks = []
    if "reasoning" in names:
        try:
            _gym()
        except InputError as error:
            lacks.append(str(error))
    held = {
        "documents": ("*.rst.txt", "debian-reference.en.txt.gz"),
        "topics": ("wordnet/data.noun",),
    }
    of_debian = [name for name in names if name in held]
    if of_debian and debian is None:
        lacks.append(f"{' and '.join(of_debian)}: --debian is not given; {_unpack(Path('debian'))}")
    elif debian is not None:
        # one of each is enough: the pages of a package come together
        patterns = [pattern for name in of_debian for pattern in held[name]]
        if not all(any(debian.rglob(pattern)) for pattern in patterns):
            lacks.append(_no_debian(debian))
    return lacks


def python_functions(random: Random) -> Iterator[Prompt]:
    """Signatures with their docstrings to be continued, and the same as questions."""
    functions = [f for path in _library_files() for f in _functions(path)]
    random.shuffle(functions)
    for name, head, summary in functions:
        yield Prompt(head, "python")
        if len(summary) > 20:
            ask = random.choice(
                (
                    "Write a Python function `{name}`. {summary}",
                    "How would you implement `{name}` in Python? It should do this: {summary}",
                    "I need Python code for a function called {name}: {summary} Show an example of its use.",
                    "Explain what this Python function does:\n\n{head}",
                    "Finish this function:\n\n```python\n{head}```",
                )
            )
            yield Prompt(ask.format(name=name, summary=summary, head=head), "python", chat=True)


def python_lines(random: Random) -> Iterator[Prompt]:
    """Some lines from the middle of a library file."""
    files = list(_library_files())
    random.shuffle(files)
    for path in files:
        lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
        for _ in range(len(lines) // 120):
            start = random.randrange(len(lines))
            text = "\n".join(lines[start : start + random.randint(4, 24)])
            if 40 < len(text) <= MOST_CHARACTERS:
                yield Prompt(text + "\n", "python")


def reasoning(random: Random) -> Iterator[Prompt]:
    """Procedural puzzles and arithmetic, every kind in turn.

    Raises:
        InputError: reasoning-gym is not installed.
    """
    reasoning_gym, names = _gym()
    kinds = sorted(names - {"composite"})
    while True:
        kept = []
        for kind in kinds:
            dataset = reasoning_gym.create_dataset(kind, size=12, seed=random.randrange(2**31))
            texts = [dataset[i]["question"].strip() for i in range(12)]
            fitting = [text for text in texts if 0 < len(text) <= MOST_CHARACTERS]
            if len(fitting) > 6:
                kept.append(kind)
            for text in fitting:
                yield Prompt(text, "reasoning-gym", chat=True)
        kinds = kept


def documents(random: Random, folder: Path) -> Iterator[Prompt]:
    """Paragraphs of Debian's documents: their beginnings, and questions about them.

    Raises:
        InputError: the folder holds none of them.
    """
    pages = sorted(folder.rglob("*.rst.txt"))
    texts = [re.sub(r":[a-z:]+:`~?([^`<]*?)`", r"`\1`", path.read_text()) for path in pages]
    texts += [
        gzip.decompress(path.read_bytes()).decode()
        for path in sorted(folder.rglob("debian-reference.en.txt.gz"))
    ]
    paragraphs = [
        " ".join(part.split())
        for text in texts
        for part in re.split(r"\n\s*\n", text)
        if part[:1].isalnum() and 150 < len(part) < 1200 and ". " in part
    ]
    if not paragraphs:
        raise InputError(_no_debian(folder))
    random.shuffle(paragraphs)
    for paragraph in paragraphs:
        words = paragraph.split()
        yield Prompt(" ".join(words[: random.randint(6, len(words) * 2 // 3)]), "documents")
        if len(paragraph) <= MOST_CHARACTERS:
            ask = random.choice(
                (
                    "Summarize this in one sentence:\n\n{}",
                    "Explain the following in simple words.\n\n{}",
                    "Rewrite this paragraph as a list of points:\n{}",
                    "What is this text about? {}",
                    "Write three questions that this text answers, with the answers.\n\n{}",
                    "{}\n\nGive an example.",
                )
            )
            yield Prompt(ask.format(paragraph), "documents", chat=True)


ASKED = (
    "What is {a}?",
    "What is the difference between {a} and {b}?",
    "Explain {a} to a ten year old.",
    "Write a short story about {a} and {b}.",
    "Write a poem about {a}.",
    "Give me five facts about {a}.",
    "Write a dialogue in which two friends talk about {a}.",
    "List the advantages and disadvantages of {a}.",
    "Why is {a} important?",
    "How has {a} changed over the years?",
    "Write an email to a colleague about {a}.",
    "Write a paragraph that uses the words {a}, {b} and {c}.",
    "Give step by step instructions for someone who has to deal with {a}.",
    "Translate into French: The {a} is next to the {b}.",
    "Make a table that compares {a}, {b} and {c}.",
    "Describe {a} in three sentences.",
    "Write a Python class that represents {a}.",
    "Write a haiku about {a} and explain it.",
    "Suggest ten names for a company that sells {a}.",
    "What would happen if there were no {a}?",
    "Correct the grammar: {a} are a thing what {b} needs.",
    "Write a news article with the headline: {a} found near {b}",
    "What should a beginner know about {a}?",
    "Write a JSON object that describes {a}.",
    "Tell me a joke about {a}.",
    "Write a product description for {a}.",
    "How do I explain {a} and {b} in a talk of five minutes?",
    "Write an SQL table for {a} with example rows.",
    "Write the opening paragraph of a novel set near {a}.",
    "{gloss} What is the word for this? Use it in three sentences.",
)
BEGUN = (
    "{A} is {gloss}. It",
    "The history of {a} begins",
    "Once upon a time there was {a} that",
    "Dear {name},\n\nI am writing to you about {a}.",
    "Chapter 1\n\n{name} had never seen {a} before. That morning",
    "# {A}\n\n## Introduction\n\n",
    "Q: What is {a}?\nA:",
    "The difference between {a} and {b} is",
    "In this article, we will look at {a} and",
    '"{A}?" asked {name}. "',
    "{name} walked past the {a} and",
    "How to find {a}:\n\n1.",
    "Recent studies of {a} show that",
    "{A}, {b}, {c},",
    "| name | meaning |\n|---|---|\n| {a} |",
    "<h1>{A}</h1>\n<p>",
    "import json\n\n# {gloss}\nclass {Type}:\n    def __init__(self",
    "/* {gloss} */\n#include <stdio.h>\n\n",
    '{{\n  "name": "{a}",\n  "kind": "{b}",',
    "SELECT {a}, {b} FROM {c} WHERE",
)
NAMES = (
    "Anna",
    "Omar",
    "Li Wei",
    "Maria",
    "John",
    "Priya",
    "Kofi",
    "Sofia",
    "Tom",
    "Yuki",
    "Elena",
)


def topics(random: Random, folder: Path) -> Iterator[Prompt]:
    """Questions and beginnings about WordNet's nouns, the frequent ones.

    Raises:
        InputError: the folder does not hold WordNet.
    """
    paths = sorted(folder.rglob("wordnet/data.noun"))
    if not paths:
        raise InputError(_no_debian(folder))
    counts = paths[0].with_name("cntlist.rev").read_text().splitlines()
    frequent = {line.split("%1:")[0] for line in counts if "%1:" in line}  # seen in tagged text
    nouns = []
    for line in paths[0].read_text().splitlines():
        if not line.startswith(" "):
            fields, gloss = line.split(" | ", 1)
            word = fields.split()[4]
            if word in frequent and word.islower():
                nouns.append((word.replace("_", " "), gloss.split(";")[0].strip()))
    while True:
        (a, gloss), (b, _), (c, _) = random.sample(nouns, 3)
        chat = random.random() < 0.6
        text = random.choice(ASKED if chat else BEGUN).format(
            a=a, b=b, c=c, A=a.capitalize(), gloss=gloss, name=random.choice(NAMES),
            Type=a.title().replace(" ", "").replace("-", ""),
        )  # fmt: skip
        yield Prompt(text, "wordnet", chat=chat)


def _library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "test", "tests", "idle_test", "__pycache__"} & {*parts}:
            yield path


def _functions(path: Path) -> Iterator[tuple[str, str, str]]:
    """Name, text up to the docstring's end, and the docstring's first sentence."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # a library holds files that are wrong on purpose
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node)
            if docstring and node.body[0].end_lineno:
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
                if len(head) <= MOST_CHARACTERS:
                    summary = " ".join(docstring.split("\n\n")[0].split())
                    yield node.name, _unindent(head), summary


def _unindent(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return re.sub(rf"^ {{{indent}}}", "", text, flags=re.MULTILINE)


def _gym() -> tuple[Any, set[str]]:
    """The package reasoning-gym, and the names of its puzzles."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            f"this needs reasoning-gym and what it imports; run: pip install {REASONING_GYM} ({error})"
        ) from error
    return reasoning_gym, set(DATASETS)


def _no_debian(folder: Path) -> str:
    return f"{folder} lacks some of Debian's documents; {_unpack(folder)}"


def _unpack(folder: Path) -> str:
    names = " ".join(DEBIAN_PACKAGES)
    return f"on Debian: apt-get download {names}, then for each file: dpkg -x FILE {folder}"
