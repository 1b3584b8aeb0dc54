"""``ddtree dump``: write one verify call's metadata as a captured-call file."""

from pathlib import Path
from typing import Annotated

import typer

from ddtree.cli.models import require_places
from ddtree.cli.options import (
    AUTO,
    BlockSize,
    Budget,
    Chat,
    Draft,
    Fault,
    Json,
    Prefix,
    Prompt,
    Seed,
    Target,
    TopK,
    WhichRound,
    refuse_ignored,
)
from ddtree.cli.output import command, print_json, stdout


def dump(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="Where to: .safetensors or .npz; replaced if there.")
    ],
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
    """Write a captured call, one verify pass's metadata, for check and show.

    Without --prompt the call is made up from --seed and needs no model.

    \b
    Examples
      ddtree dump call.safetensors --prefix 5 --budget 16
      ddtree dump call.safetensors --prefix 5 --budget 16 --fault width=8
      ddtree dump batch.npz --prefix 5 --prefix 3 --topk 4
      ddtree dump live.npz --prompt "1, 2, 3, 1, 2," --raw --round 3
    """
    refuse_ignored(ctx, prompt)
    require_places(target, draft)
    from ddtree.cli.source import Wanted
    from ddtree.invariants import Call
    from ddtree.invariants import dump as write
    from ddtree.invariants.capture import require_writable

    require_writable(file)  # said before a generation of minutes, not after it
    call, _ = Wanted(
        prefix, prompt, which_round, budget, topk, block_size, seed, target, draft, chat, fault
    ).call()
    fields = Call.of(
        call.tree, call.layout, call.mask, call.acceptance,
        kv_pool_size=call.kv_pool_size, budget=budget,
    )  # fmt: skip
    is_there = file.exists()
    write(file, call=fields)
    report = {
        "file": file,
        "fault": fault,
        "q_lens": call.q_lens,
        "prefix_lens": call.prefix_lens,
        "mask_entries": call.mask.allowed.numel(),
        "mask_indptr_end": int(call.layout.mask_indptr[-1]),
        "fields": sorted(fields.known()),
    }
    if as_json:
        print_json(report)
        return
    stdout().print(
        f"{file}: prefix_len {_numbers(call.prefix_lens)}, q_len {_numbers(call.q_lens)}, "
        f"{report['mask_entries']} mask entries, mask_indptr ends at {report['mask_indptr_end']}"
        + (f"; fault {fault}" if fault else "")
        + f"\n{'overwrote' if is_there else 'wrote'} {file}\nnext: {command('ddtree', 'check', file)}",
        soft_wrap=True,
        markup=False,
    )


def _numbers(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)
