"""``ddtree show``: draw one verify call's tree and mask."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddtree.cli.captured import read_call, require_call
from ddtree.cli.models import require_places
from ddtree.cli.options import (
    AUTO,
    OF_SOURCE,
    BlockSize,
    Budget,
    Chat,
    Draft,
    Fault,
    Json,
    Out,
    Prefix,
    Prompt,
    Seed,
    Target,
    TopK,
    WhichRound,
    refuse_given,
    refuse_ignored,
    within,
)
from ddtree.cli.output import (
    Say,
    command,
    fail,
    need,
    print_json,
    progress,
    stdout,
    writable_folder,
    write_whole,
)

if TYPE_CHECKING:
    from ddtree.invariants import Call
    from ddtree.pictures import TreeView


def show(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="A captured call; without it, a call made as dump does.")
    ] = None,
    request: Annotated[
        int, typer.Option(callback=within(0), help="Which request of the batch.")
    ] = 0,
    out: Out = None,
    prefix: Prefix = None,
    prompt: Prompt = None,
    which_round: WhichRound = 1,
    budget: Budget = 16,
    topk: TopK = "all",
    block_size: BlockSize = None,
    seed: Seed = 0,
    fault: Fault = None,
    target: Target = "embedded",
    draft: Draft = AUTO,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Draw a draft tree and its mask: as text here, as PNG and SVG with --out.

    A broken call is drawn as a kernel would read it, wrong cells marked.

    \b
    Examples
      ddtree show                              a made-up tree of 16 nodes
      ddtree show call.safetensors --out pictures/
      ddtree show --prefix 5 --fault width=8   as the kernel saw it
      ddtree show --prompt "a, b, c, a, b," --raw --budget 64 --out pictures/
    """
    if file is not None:
        refuse_given(ctx, OF_SOURCE, f"with a file: {file} holds its call")
    refuse_ignored(ctx, prompt)
    require_places(target, draft)
    if file is not None:
        require_call(file)
    if out is not None:
        need("plots", "matplotlib")
        writable_folder(out)
    from ddtree.invariants import Call
    from ddtree.pictures.view import view_of

    if file is not None:
        call, name = read_call(file).call, file.stem
        view = _view_of_file(call, request, file)
    else:
        from ddtree.cli.source import Wanted

        made, token_text = Wanted(
            prefix, prompt, which_round, budget, topk, block_size, seed, target, draft, chat, fault
        ).call()
        call, name = Call.of(made.tree, made.layout, made.mask, made.acceptance), "tree"
        _require_request(request, made.tree.num_nodes.numel())
        view = view_of(made.layout, made.mask, made.tree, made.acceptance, request, token_text)
    view = replace(view, weighed=_weighed(call, request))
    note = _first_violation(call)
    written = []
    if out is not None:
        with progress("drawing") as say:
            written = draw(view, out, name, say, note)
    if as_json:
        print_json({**_report(view), "violation": note, "written": written})
        return
    _print(view, note, is_drawn=out is not None)
    for path in written:
        limited = _size_note(path)
        stdout().print(f"wrote {path}{limited}", markup=False, soft_wrap=True)


def draw(view: "TreeView", out: Path, name: str, say: Say, note: str = "") -> list[Path]:
    """Write ``name``.png and ``name``.svg into the folder; return their paths."""
    from ddtree.pictures.plot import render

    paths = [out / f"{name}.png", out / f"{name}.svg"]
    forms: tuple[Literal["png", "svg"], ...] = ("png", "svg")
    for path, form in zip(paths, forms, strict=True):
        say(f"drawing {path}", passing=True)
        write_whole(path, render(view, form, note))
    return paths


def _size_note(path: Path) -> str:
    """What to know of a PNG whose size was limited; nothing otherwise."""
    from ddtree.pictures.plot import limited_size

    size = limited_size(path.read_bytes()) if path.suffix == ".png" else None
    return f" (limited to {size[0]} x {size[1]} pixels; the SVG is sharp)" if size else ""


def _print(view: "TreeView", note: str, *, is_drawn: bool) -> None:
    from ddtree.pictures.text import ASCII, mask_text, title, tree_text

    console = stdout()
    console.print(title(view), soft_wrap=True)
    if note:
        console.print(note, style="bold red", soft_wrap=True, markup=False)
    for text in (tree_text(view), mask_text(view, console.width, is_drawn=is_drawn)):
        if console.options.ascii_only:
            text.plain = text.plain.translate(ASCII)
        console.print()
        console.print(text, soft_wrap=True)


def _view_of_file(call: "Call", request: int, file: Path) -> "TreeView":
    """The picture of a captured call, as far as its fields go."""
    import torch

    from ddtree.pictures.view import view_of
    from ddtree.spec.contracts import Acceptance, DraftTree, FlatMask, VerifyLayout

    known = call.known()
    missing = [
        f for f in ("qo_indptr", "kv_indptr", "mask_indptr", "custom_mask") if f not in known
    ]
    if missing:
        check = command("ddtree", "check", file)
        fail(f"{file} lacks {', '.join(missing)}: there is no mask to draw", check)
    _require_request(request, known["qo_indptr"].numel() - 1)
    nothing = torch.zeros(0, dtype=torch.int64)
    layout = VerifyLayout(
        qo_indptr=known["qo_indptr"],
        kv_indptr=known["kv_indptr"],
        kv_indices=known.get("kv_indices", nothing),
        mask_indptr=known["mask_indptr"],
        max_q_len=known.get("max_q_len", 0),
        positions=known.get("positions", nothing),
        out_cache_loc=known.get("out_cache_loc", nothing),
    )
    tree = acceptance = None
    has_tokens = "token_ids" in known
    if {"parents", "num_nodes"} <= known.keys():
        parents = known["parents"]
        tree = DraftTree(
            token_ids=known.get("token_ids", torch.zeros_like(parents)),
            parents=parents,
            depths=known.get("depths", torch.zeros_like(parents)),
            scores=known.get("scores", torch.full(parents.shape, -torch.inf).double()),
            num_nodes=known["num_nodes"],
        )
    if {"nodes", "num_accepted"} <= known.keys():
        acceptance = Acceptance(known["nodes"], known["num_accepted"], known.get("bonus", nothing))
    mask = FlatMask(known["custom_mask"].bool())
    return view_of(layout, mask, tree, acceptance, request, has_tokens=has_tokens)


def _require_request(request: int, batch: int) -> None:
    if batch == 0:
        fail("the call has 0 requests: there is nothing to draw", "give a call that has one")
    if request >= batch:
        fail(f"--request is {request}, the call has {batch}", "count requests from 0")


def _weighed(call: "Call", request: int) -> tuple[int, int] | None:
    """``prefix_len`` and ``q_len`` of the request as ``ddtree check`` has them; None where it has not."""
    from ddtree.invariants.sizes import sizes_of

    sizes = sizes_of(call)
    if sizes.q_lens is None or sizes.prefix_lens is None or request >= sizes.batch:
        return None
    return sizes.prefix_lens[request], sizes.q_lens[request]


def _first_violation(call: "Call") -> str:
    """The first line of the first violation, or nothing."""
    from ddtree.invariants import violations

    found = violations(call)
    return str(found[0]).splitlines()[0] if found else ""


def _report(view: "TreeView") -> dict[str, Any]:
    return {
        "request": view.request,
        "prefix_len": view.prefix_len,
        "q_len": view.q_len,
        "num_nodes": view.num_nodes,
        "token_ids": view.token_ids,
        "tokens": view.labels,
        "parents": view.parents,
        "depths": view.depths,
        "scores": view.scores,
        "accepted": view.accepted,
        "visible": view.allowed.tolist() if view.allowed is not None else None,
    }
