"""What is fuzzed: one table of properties, each of one function, with the cases that it is held to.

A property joins by a line in ``PROPERTIES``.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from hypothesis import strategies as hs
from torch import Tensor

from ddtree import spec
from ddtree.invariants import strategies as st
from ddtree.invariants.call import Call
from ddtree.invariants.conformance import oracle
from ddtree.invariants.conformance.attend import (
    POISON,
    AttentionCase,
    Execution,
    Inputs,
    attend,
    output_of,
)
from ddtree.invariants.conformance.backend import Backend
from ddtree.invariants.conformance.calls import MAX_Q_LEN, OPEN_Q_LEN, calls, widths
from ddtree.invariants.conformance.steps import (
    StepCase,
    call_of,
    liked_choices,
    paged_kv,
    step_difference,
)
from ddtree.invariants.strategies import VerifyCall

Case = StepCase | AttentionCase


@dataclass(frozen=True)
class Property:
    """One thing that a right implementation does, whatever the case."""

    id: str
    function: str
    statement: str
    cases: Callable[[Backend, int, int | None], hs.SearchStrategy[Any]]
    """Given the backend, the most requests of a call, and the width that is wanted; None: any."""
    difference: Callable[[Backend, Any], str]
    """What the backend does otherwise; empty: nothing."""
    keyword: str = ""
    """An argument that the function must take for this."""
    dtype: torch.dtype | None = None
    """A dtype that the backend must take for this."""
    is_of_any_mask: bool = False
    """Whether the backend must take masks that are no tree's for this."""

    @property
    def max_q_len(self) -> int:
        """The largest width of its cases."""
        return OPEN_Q_LEN if self.is_of_any_mask else MAX_Q_LEN

    def offered(self, backend: Backend) -> str:
        """Why a backend does not offer this; empty: it does."""
        if self.function not in backend.functions:
            return f"no {self.function}"
        if self.keyword and not backend.accepts(self.function, self.keyword):
            return f"{self.function} takes no {self.keyword}"
        if self.dtype is not None and self.dtype not in backend.dtypes:
            return f"it takes no {str(self.dtype).removeprefix('torch.')}"
        if self.is_of_any_mask and not backend.any_mask:
            return "any_mask is not set: it takes trees alone"
        return ""


def captured_call(backend: Backend, case: Case) -> Call:
    """What ``ddtree check`` can look at of a case."""
    if isinstance(case, StepCase):
        return call_of(backend, case)
    call = case.call
    mask = None if case.is_open else case.flat(call)  # the table knows trees' masks
    return Call.of(
        call.tree, call.layout, mask,
        prefix_lens=call.prefix_lens, slot_table=call.slots.table,
        kv_pool_size=call.slots.num_slots, q_lens=call.q_lens,
    )  # fmt: skip


def arguments_of(case: Case) -> dict[str, Any]:
    """A case's arguments by the names of ``ddtree.spec``, the eager call of it."""
    if isinstance(case, StepCase):
        return {**case.arguments, **case.options}
    call = case.call
    tensors = random_inputs(case, call, call.slots.num_slots)._asdict()
    mask = case.mask(call, case.form)
    return {**tensors, "layout": call.layout, "mask": mask, **case.options}


# Attention.


def random_inputs(case: AttentionCase, call: VerifyCall, slots: int) -> Inputs:
    """Normal numbers from the case's seed."""
    generator = torch.Generator().manual_seed(case.seed)
    rows, layout = int(call.layout.qo_indptr[-1]), call.layout

    def random(count: int, heads: int) -> Tensor:
        numbers = torch.randn(count, heads, case.head_dim, generator=generator)
        return numbers.to(case.dtype)

    def pool() -> Tensor:
        written = layout.kv_indices[: int(layout.kv_indptr[-1])]
        made = torch.full((slots, case.kv_heads, case.head_dim), POISON, dtype=case.dtype)
        made[written] = random(len(written), case.kv_heads)
        return made

    key, value = random(rows, case.kv_heads), random(rows, case.kv_heads)
    return Inputs(random(rows, case.q_heads), key, value, pool(), pool())


def visible_difference(backend: Backend, case: AttentionCase) -> str:
    """Rows that see another set than they should."""
    result = attend(backend, case, lambda call, slots: oracle.inputs(case, call, slots))
    wrong = oracle.wrong_rows(case, result)
    return oracle.explain(case, result, wrong) if wrong else ""


def visible_rows(backend: Backend, case: AttentionCase, what: str) -> Tensor | None:
    """What each row saw in a case that failed with ``what``; None where it now comes out otherwise."""
    try:
        with warnings.catch_warnings(), backend.patience.for_a_call():
            warnings.simplefilter("ignore")
            result = attend(backend, case, lambda call, slots: oracle.inputs(case, call, slots))
            wrong = oracle.wrong_rows(case, result)
            is_same = bool(wrong) and oracle.explain(case, result, wrong) == what
            return oracle.seen_sets(case, result, wrong) if is_same else None
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 # a backend may raise anything, SystemExit too
        return None


def value_difference(backend: Backend, case: AttentionCase) -> str:
    """Real rows whose numbers are not the reference's in float64."""
    result = attend(backend, case, lambda call, slots: random_inputs(case, call, slots))
    call = case.call
    inputs = random_inputs(case, call, call.slots.num_slots)
    options = {k: v for k, v in case.options.items() if k != "return_lse"}
    expected, lse = spec.verify_attention(
        *inputs, call.layout, case.mask(call, "bits"),
        return_lse=True, compute_dtype=torch.float64, **options,
    )  # fmt: skip
    assert lse is not None
    pairs = [("output", output_of(result, expected.shape[0]), expected)]
    if case.options.get("return_lse"):
        if not isinstance(result, tuple) or not isinstance(result[1], Tensor):
            return "return_lse gave no log-sum-exp"
        pairs.append(("log-sum-exp", result[1][: lse.shape[0]].detach().cpu(), lse))
    most = backend.tolerances[case.dtype]
    for name, found, right in pairs:
        if found.shape != right.shape:
            return f"the {name} has shape {list(found.shape)}; expected {list(right.shape)}"
        error = (found.double() - right).abs() / right.abs().clamp(min=1)
        error = torch.where(error.isnan(), torch.inf, error)
        for b, start in enumerate(call.layout.qo_indptr[:-1].tolist()):
            real = error[start : start + int(call.tree.num_nodes[b])].flatten(1).amax(1)
            if real.max() > most:
                row = int(real.argmax())
                return (
                    f"{name} of row {row} of request {b} is off by {float(real[row]):.2g}; "
                    f"{str(case.dtype).removeprefix('torch.')} allows {most:g}"
                )
    return ""


@hs.composite
def attention_cases(
    draw: hs.DrawFn,
    backend: Backend,
    max_batch: int,
    wanted: int | None = None,
    execution: Execution | None = "eager",
    dtype: torch.dtype | None = None,
    option: str = "",
) -> AttentionCase:
    """Calls of all sizes, run in one way or, for None, in any; the oracle's capacity is kept to."""
    dtype = backend.dtypes[0] if dtype is None else dtype
    is_oracle, is_open = option == "oracle", option == "open"
    drawn = partial(calls, max_batch, max_q_len=OPEN_Q_LEN if is_open else MAX_Q_LEN)
    ways: tuple[Execution, ...] = get_args(Execution) if execution is None else (execution,)
    way = draw(hs.sampled_from(ways))
    call = draw(drawn(wanted=wanted))
    earlier = None  # on the same pool, so of the same page size
    if way == "replay":
        earlier = draw(drawn(page_size=call.slots.page_size))
    case = AttentionCase(
        call,
        way,
        earlier,
        draw(hs.sampled_from(backend.mask_forms)) if way == "eager" else "flat",
        dtype,
        seed=0 if is_oracle else draw(hs.integers(0, 2**16)),
        is_open=is_open,
    )
    if is_oracle:
        both = [call for call in (case.earlier, case.call) if call is not None]
        while max(map(oracle.entries, both)) > oracle.capacity(case):
            case = replace(case, kv_heads=case.kv_heads * 2, q_heads=case.q_heads * 2)
        return case
    kv_heads, group = draw(hs.sampled_from([(1, 1), (2, 1), (1, 4), (2, 2)]))
    options: dict[str, Any] = {}
    match option:
        case "window":
            options = {"window": draw(hs.integers(1, 24))}
        case "softcap":
            options = {"softcap": draw(hs.sampled_from([1.0, 3.0, 30.0]))}
        case "sinks":
            options = {"sinks": torch.linspace(-1, 1, kv_heads * group).to(dtype)}
        case "return_lse":
            options = {"return_lse": True}
        case "" | "open":
            pass
        case other:
            raise ValueError(other)
    head_dim = draw(hs.sampled_from([64, 128]))
    return replace(
        case, q_heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, options=options
    )


def _attention(id: str, statement: str, **options: Any) -> Property:  # noqa: A002 # the property's id
    option = options.get("option", "")
    return Property(
        id,
        "verify_attention",
        statement,
        lambda backend, most, wanted: attention_cases(backend, most, wanted, **options),
        visible_difference if option == "oracle" else value_difference,
        keyword="" if option in {"oracle", "open"} else option,
        dtype=options.get("dtype"),
        is_of_any_mask=option == "open",
    )


# The steps around it.


@hs.composite
def _draft_cases(
    draw: hs.DrawFn, _backend: Backend, max_batch: int, wanted: int | None
) -> StepCase:
    batch, horizon = draw(hs.integers(1, max_batch)), draw(hs.integers(0, 5))
    vocab = draw(hs.integers(1, 9))
    roots = draw(hs.lists(hs.integers(0, vocab - 1), min_size=batch, max_size=batch))
    return StepCase(
        "build_tree",
        {
            "draft_log_probs": draw(st.draft_log_probs(batch, horizon, vocab)),
            "root_token_ids": torch.tensor(roots),
            "budget": spec.Budget(draw(widths(MAX_Q_LEN, wanted)) - 1),
            "topk": draw(hs.none() | hs.integers(1, vocab)),
        },
    )


@hs.composite
def _plan_cases(
    draw: hs.DrawFn, _backend: Backend, max_batch: int, wanted: int | None, *, ragged: bool
) -> StepCase:
    call = draw(calls(max_batch, ragged=ragged, wanted=wanted))
    arguments = {
        "tree": call.tree,
        "prefix_lens": call.prefix_lens,
        "slot_table": call.slots.table,
    }
    return StepCase("plan_verify", arguments, {"q_lens": call.q_lens} if ragged else {}, call)


@hs.composite
def _mask_cases(draw: hs.DrawFn, backend: Backend, max_batch: int, wanted: int | None) -> StepCase:
    call = draw(calls(max_batch, wanted=wanted))
    form = draw(hs.sampled_from(backend.mask_forms))
    arguments = {"tree": call.tree, "layout": call.layout, "form": form}
    return StepCase("tree_mask", arguments, {}, call)


@hs.composite
def _convert_cases(
    draw: hs.DrawFn, backend: Backend, max_batch: int, wanted: int | None
) -> StepCase:
    call = draw(calls(max_batch, wanted=wanted))
    mask = draw(st.masks(call, backend.mask_forms))
    arguments = {
        "mask": mask,
        "layout": call.layout,
        "form": draw(hs.sampled_from(backend.mask_forms)),
    }
    return StepCase("convert_mask", arguments, {}, call)


@hs.composite
def _accept_cases(
    draw: hs.DrawFn,
    _backend: Backend,
    max_batch: int,
    wanted: int | None,
    *,
    sampled: bool = False,
) -> StepCase:
    call = draw(calls(max_batch, wanted=wanted))
    horizon = spec.Horizon(int(call.tree.depths.max()) + draw(hs.integers(0, 2)))
    vocab = int(call.tree.token_ids.max()) + 2
    acceptance = draw(st.acceptances(call.tree, horizon))
    choices = liked_choices(call, acceptance, draw(hs.integers(0, vocab - 1)))
    arguments: dict[str, Any] = {"tree": call.tree, "target_ids": choices}
    if not sampled:
        return StepCase(
            "accept_greedy", {**arguments, "layout": call.layout, "horizon": horizon}, {}, call
        )
    rows = len(choices)
    generator = torch.Generator().manual_seed(draw(hs.integers(0, 2**16)))
    logits = torch.randn(rows, vocab, generator=generator)
    logits[torch.arange(rows), choices] += 3
    arguments = {
        "tree": call.tree,
        "target_logits": logits,
        "layout": call.layout,
        "horizon": horizon,
        "uniforms": torch.rand(rows, generator=generator, dtype=torch.float64),
    }
    options = {
        "temperature": draw(hs.sampled_from([1.0, 0.0, 0.5])),
        "top_k": draw(hs.none() | hs.integers(1, vocab)),
        "top_p": draw(hs.none() | hs.sampled_from([0.9, 0.5])),
    }
    return StepCase("accept_sampled", arguments, options, call)


@hs.composite
def _commit_cases(
    draw: hs.DrawFn, _backend: Backend, max_batch: int, wanted: int | None
) -> StepCase:
    call = draw(calls(max_batch, wanted=wanted))
    arguments = {
        "kv": paged_kv(call),
        "layout": call.layout,
        "acceptance": draw(st.acceptances(call.tree)),
    }
    return StepCase("commit_kv", arguments, {}, call)


def _step(function: str, statement: str, cases: Any, id: str = "", keyword: str = "") -> Property:  # noqa: A002 # the property's id
    return Property(id or function, function, statement, cases, step_difference, keyword)


PROPERTIES: tuple[Property, ...] = (
    _step("build_tree", "the same nodes in the same order", _draft_cases),
    _step("plan_verify", "every offset is the call's own", partial(_plan_cases, ragged=False)),
    _step(
        "plan_verify",
        "the same where requests differ in width",
        partial(_plan_cases, ragged=True),
        "plan_verify, ragged",
        "q_lens",
    ),
    _step("tree_mask", "real rows see prefix, self, ancestors", _mask_cases),
    _step("convert_mask", "every form says the same", _convert_cases),
    _attention("visible set", "each row sees just prefix, self, ancestors", option="oracle"),
    _attention(
        "visible set, fixed buffers",
        "the same in buffers larger than the call",
        option="oracle",
        execution="buffers",
    ),
    _attention(
        "visible set, replay",
        "the same in buffers that an earlier call was captured in",
        option="oracle",
        execution="replay",
    ),
    _attention("values, float32", "the reference's numbers", dtype=torch.float32),
    _attention("values, float16", "the same in half precision", dtype=torch.float16),
    _attention("values, bfloat16", "the same in bfloat16", dtype=torch.bfloat16),
    _attention(
        "any mask", "the mask alone decides, a tree's or not", option="open", execution=None
    ),
    _attention("window", "a window goes by depth, not by row", option="window", execution=None),
    _attention("softcap", "scores are capped before the mask", option="softcap", execution=None),
    _attention("sinks", "a sink takes weight and gives no value", option="sinks", execution=None),
    _attention("log-sum-exp", "the softmax's denominator", option="return_lse", execution=None),
    _step("accept_greedy", "the path along the target's choices", _accept_cases),
    _step(
        "accept_sampled",
        "the path along the samples of these uniforms",
        partial(_accept_cases, sampled=True),
    ),
    _step("commit_kv", "accepted entries, and no other, are kept", _commit_cases),
)
"""In the order of a round."""
