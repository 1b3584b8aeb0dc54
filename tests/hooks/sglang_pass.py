"""Verify passes of SGLang's metadata code, in a process of its own: ``python -m tests.hooks.sglang_pass``.

Arguments: a version, and a function of this module. SGLang's loader finds the plugin by the entry points of
pyproject.toml; the function's result is printed as JSON in the last line.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch

from ddtree.invariants.streams import capturing
from tests.hooks import sglang_engine
from tests.hooks.entry_points import caught, declare_entry_points
from tests.hooks.sglang_engine import CONFIGURED, Pass, attend, backend, flashinfer_backend


def founding_bug(*, third_party: bool = False) -> dict[str, Any]:
    """A pass of width 17 on a backend configured for 8: eager, at capture, at replay, at the kernel."""
    made, wide = backend(), Pass(16, [5], third_party=third_party)
    found = {
        "eager": caught(lambda: made.init_forward_metadata(wide.batch())),
        "kernel of the same pass": caught(lambda: attend(made, wide)),
    }
    unseen = made.forward_metadata.mask_indptr.clone()
    made.forward_metadata.mask_indptr = unseen
    found["kernel"] = caught(lambda: attend(made, wide))
    found["capture"] = caught(lambda: made.init_forward_metadata_out_graph(wide.batch(), True))
    found["replay"] = caught(lambda: made.init_forward_metadata_out_graph(wide.batch(room=4)))
    ragged = Pass(16, [31, 0, 5], third_party=third_party)
    found["batch"] = caught(lambda: made.init_forward_metadata(ragged.batch()))
    unmasked = Pass(16, [5], third_party=third_party, topk=1)
    unmasked.spec_info.custom_mask = None
    found["no mask"] = caught(lambda: made.init_forward_metadata(unmasked.batch()))
    batch = wide.batch()
    with torch.device("meta"):  # as models are loaded and graphs captured: another default device
        found["another device"] = caught(lambda: made.init_forward_metadata(batch))
    hooks: Any = import_module("ddtree.invariants.hooks.sglang")
    is_capturing, hooks.is_capturing = hooks.is_capturing, lambda: True
    found["kernel, captured"] = caught(lambda: attend(made, wide))
    hooks.is_capturing = is_capturing
    return found


def founding_bug_of_a_third_party() -> dict[str, Any]:
    """The same where ``spec_info`` sets ``draft_token_num`` alone."""
    return founding_bug(third_party=True)


def silent() -> int:
    """Right passes of trees, and passes of other kinds; returns how many trees' there were."""
    other_passes()
    return right_passes()


def right_passes() -> int:
    """Passes whose width is the configured one, or comes from the call."""
    made, passes = backend(), 0
    held = getattr(
        made, "_verify_mask", None
    )  # since 0.5.17, when the width came to follow the call
    follows = held is not None
    if held is not None:  # it has room for the configured width alone
        made._verify_mask = type(held)(
            torch.zeros(1 << 16, dtype=torch.uint8), held.mode, held.max_bs
        )
    for budget, topk in product((63, 1, 7, 8, 16), (4, 1)):
        for prefixes in ([5], [31, 0, 17]):
            if not follows:
                made.num_draft_tokens = budget + 1
            done = Pass(budget, prefixes, third_party=budget % 2 == 0, topk=topk)
            done.spec_info.num_tokens_per_req = budget + 1
            made.init_forward_metadata(done.batch())
            if budget < 8:  # the interpreter is slow
                attend(made, done)
            made.init_forward_metadata_out_graph(done.batch(room=4), True)
            made.init_forward_metadata_out_graph(done.batch(room=4))
            passes += 1
    if follows:
        for budget, topk in product((7, 12), (3, 1)):
            built = Pass(budget, [31, 0, 17], third_party=False, topk=topk)
            built.by_sglang()
            made.init_forward_metadata(built.batch())
    return passes


def other_passes() -> None:
    """Prefill and decode, a warm-up without tokens, and layouts that are not known."""
    modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    made = backend()
    prefill = Pass(CONFIGURED - 1, [5, 9], third_party=True).batch()
    prefill.forward_mode, prefill.spec_info = modes.EXTEND, None
    prefill.extend_prefix_lens, prefill.extend_prefix_lens_cpu = torch.tensor([5, 9]), [5, 9]
    prefill.extend_seq_lens, prefill.extend_seq_lens_cpu = torch.tensor([8, 8]), [8, 8]
    made.init_forward_metadata(prefill)
    decode = Pass(CONFIGURED - 1, [5, 9], third_party=True).batch()
    decode.forward_mode, decode.spec_info = modes.DECODE, None
    made.init_forward_metadata(decode)
    made.init_forward_metadata_out_graph(decode, True)

    chain = Pass(CONFIGURED - 1, [5, 9], third_party=True, topk=1)
    chain.spec_info.custom_mask = None
    made.init_forward_metadata(chain.batch())
    made.init_forward_metadata_out_graph(chain.batch(), True)
    made.init_forward_metadata_out_graph(chain.batch())

    evened = Pass(CONFIGURED - 1, [5], third_party=False).batch(room=3)
    evened._original_batch_size = 1  # padded to the batch of another data-parallel rank
    made.init_forward_metadata(evened)

    warm_up = Pass(CONFIGURED - 1, [5, 9], third_party=False)
    warm_up.spec_info.draft_token, warm_up.spec_info.custom_mask = (
        None,
        torch.ones_like(warm_up.mask),
    )
    made.init_forward_metadata(warm_up.batch())
    empty = Pass(CONFIGURED - 1, [5, 9], third_party=True)
    empty.spec_info.custom_mask = torch.zeros_like(empty.mask)
    made.init_forward_metadata(empty.batch())
    attend(made, empty)

    ragged = Pass(16, [5], third_party=True)
    ragged.spec_info.ragged_verify_layout = object()
    made.init_forward_metadata(ragged.batch())
    made.init_forward_metadata(ragged.batch())


def wrong() -> dict[str, Any]:
    """Passes of the right width with wrong contents, and a tree too wide for the mask that graphs read."""
    made = backend()
    wide = Pass(63, [5], third_party=True)

    def broken(change: Callable[[Pass, Any], None]) -> list[Any] | None:
        wrong = Pass(CONFIGURED - 1, [5, 2], third_party=False)
        batch = wrong.batch()
        change(wrong, batch)
        return caught(lambda: made.init_forward_metadata(batch))

    def see(wrong: Pass, _: Any) -> None:
        wrong.spec_info.custom_mask[13 * 2 + 5 + 7] = True

    def by_row(_: Pass, batch: Any) -> None:
        batch.positions = torch.cat([torch.arange(8) + 5, torch.arange(8) + 2])

    def twice(_: Pass, batch: Any) -> None:
        batch.out_cache_loc = torch.full_like(batch.out_cache_loc, 50)

    def own_prefix(_: Pass, batch: Any) -> None:
        batch.out_cache_loc = batch.out_cache_loc - 1

    return {
        "mask": broken(see), "positions": broken(by_row), "one slot": broken(twice),
        "slots of the prefix": broken(own_prefix),
        "room": caught(lambda: made.init_forward_metadata_out_graph(wide.batch(), True)),
    }  # fmt: skip


def flashinfer() -> dict[str, Any]:
    """Right and wrong passes on FlashInfer's backend."""
    return {"right": flashinfer_right(), "wrong": flashinfer_wrong()}


def flashinfer_right() -> list[int]:
    """Eager, captured and replayed passes, and passes of other kinds; returns how many plans of verify passes
    there were, and how many wrappers are still watched."""
    modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    made, plans = flashinfer_backend(), 0
    for budget, topk in product((63, 1, 16), (4, 1)):
        for prefixes in ([5], [31, 0, 17]):
            done = Pass(budget, prefixes, third_party=False, topk=topk)
            made.init_forward_metadata(done.batch())
            made.init_forward_metadata_out_graph(done.batch(room=4), True)
            made.init_forward_metadata_out_graph(done.batch(room=4))
            plans += made.prefill_cuda_graph_metadata[4][0].planned
    padded = Pass(7, [5], third_party=False).batch(room=3)
    padded._original_batch_size = 1
    made.init_forward_metadata(padded)
    prefill = Pass(7, [5, 9], third_party=False).batch()
    prefill.forward_mode, prefill.spec_info = modes.EXTEND, None
    prefill.extend_prefix_lens, prefill.extend_prefix_lens_cpu = torch.tensor([5, 9]), [5, 9]
    prefill.cross_attention_custom_mask = None
    made.init_forward_metadata(prefill)
    wrappers = (*made.prefill_wrappers_verify, *made.prefill_wrappers_paged)
    return [
        plans + made.prefill_wrappers_verify[0].planned,
        sum("begin_forward" in vars(wrapper) for wrapper in wrappers),
    ]


def flashinfer_wrong() -> dict[str, Any]:
    """A pass of width 17 that says it has 8: eager, at capture, at replay; and wrong contents."""
    made = flashinfer_backend()
    wide = Pass(16, [5], third_party=False)
    wide.spec_info.draft_token_num = CONFIGURED

    def broken(change: Callable[[Pass, Any], None]) -> list[Any] | None:
        wrong = Pass(16, [5, 2], third_party=False)
        batch = wrong.batch()
        change(wrong, batch)
        return caught(lambda: made.init_forward_metadata(batch))

    def see(wrong: Pass, _: Any) -> None:
        wrong.spec_info.custom_mask[22 * 2 + 5 + 7] = True

    def short(wrong: Pass, _: Any) -> None:
        wrong.spec_info.custom_mask = wrong.mask[:-40]  # SGLang fills it up with True

    def by_row(_: Pass, batch: Any) -> None:
        batch.positions = torch.cat([torch.arange(17) + 5, torch.arange(17) + 2])

    def elsewhere(_: Pass, batch: Any) -> None:
        batch.out_cache_loc = batch.out_cache_loc + 40

    return {
        "eager": caught(lambda: made.init_forward_metadata(wide.batch())),
        "capture": caught(lambda: made.init_forward_metadata_out_graph(wide.batch(), True)),
        "replay": caught(lambda: made.init_forward_metadata_out_graph(wide.batch())),
        "mask": broken(see), "short mask": broken(short), "positions": broken(by_row),
        "written elsewhere": broken(elsewhere), "fast plan": fast_plan(made),
    }  # fmt: skip


def fast_plan(made: Any) -> list[Any] | None:
    """A replay whose plan is told a width by the host: the configured one, beside the pass's own."""
    module: Any = import_module("sglang.srt.layers.attention.flashinfer_backend")
    right = Pass(16, [5], third_party=False)
    made.init_forward_metadata_out_graph(right.batch(), True)
    (wrapper,) = made.prefill_cuda_graph_metadata[1]
    module.fast_prefill_plan = wrapper.begin_forward
    wrapper.begin_forward = partial(module.fast_prefill_plan)
    batch = right.batch()
    batch.seq_lens_cpu, batch.spec_info.num_tokens_per_req = torch.tensor([5]), CONFIGURED
    return caught(lambda: made.init_forward_metadata_out_graph(batch))


def captured() -> dict[str, Any]:
    """On a GPU: the attention kernel in a CUDA graph, of the right width and of another."""
    torch.set_default_device("cuda")
    made, right, wide = backend(), Pass(7, [5], third_party=False), Pass(16, [5], third_party=False)
    found = {"capture": caught(lambda: made.init_forward_metadata_out_graph(right.batch(), True))}
    attend(made, right)  # a warm-up, which compiles
    with capturing() as graph:
        found["kernel"] = caught(lambda: attend(made, right))
    found["replay"] = caught(lambda: made.init_forward_metadata_out_graph(right.batch()))
    graph.replay()
    with capturing():
        found["wide kernel"] = caught(lambda: attend(made, wide))
    found["wide replay"] = caught(lambda: made.init_forward_metadata_out_graph(wide.batch()))
    torch.cuda.synchronize()
    return found


def forked() -> list[int]:
    """A worker forked after the hooks were installed makes a broken pass; both make dumps."""
    made, wide = backend(), Pass(16, [5], third_party=False)
    made.init_forward_metadata(wide.batch())
    attend(made, wide)
    child = os.fork()
    if not child:
        made.init_forward_metadata(wide.batch())
        os._exit(0)
    os.waitpid(child, 0)
    return [os.getpid(), child]


def swallow_a_hook() -> None:
    """Have SGLang fail to apply that hook: it logs the failure and goes on."""
    registry: Any = import_module("sglang.srt.plugins.hook_registry")
    wrap = registry._wrap_fn

    def fail(function: Any, hook: Any, kind: Any) -> Any:
        if function.__name__ == "__init__":
            raise RuntimeError("cannot be applied")
        return wrap(function, hook, kind)

    registry._wrap_fn = fail


def main(version: str, name: str) -> None:
    """Load this version and its plugins, and print what the function returns."""
    declare_entry_points()
    sglang_engine.load(version)
    if name == "wrong":
        swallow_a_hook()
    import_module("sglang.srt.plugins").load_plugins()
    print(json.dumps(globals()[name]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
