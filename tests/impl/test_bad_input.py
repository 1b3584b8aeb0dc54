# ruff: noqa: E501 (a case and its message stand on one line, as a table)
"""Bad input to the launchers: an InputError with the numbers, before anything is launched.

Only what the host knows is refused here, as sizes and strides; what lies on the device is trusted.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree import impl, spec
from ddtree.impl.rank import MAX_KEPT
from ddtree.impl.sampling import first_argmax, row_uniforms
from ddtree.impl.tree import MAX_HORIZON
from ddtree.spec import Budget, Horizon, InputError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# One good call, from which each bad one differs in one thing: two requests, prefixes 5 and 3,
# budget 3, horizon 2, vocab 3.
DRAFT = torch.full((2, 2, 3), 1 / 3, device=DEVICE).log()
ROOTS = torch.tensor([1, 2], device=DEVICE)
LENS = torch.tensor([5, 3], dtype=torch.int32, device=DEVICE)
TABLE = torch.arange(24, device=DEVICE).reshape(2, 12)
_TREE = spec.build_tree(DRAFT.cpu(), ROOTS.cpu(), Budget(3))
_LAYOUT = spec.plan_verify(_TREE, LENS.cpu(), TABLE.cpu())


def on_device(made: Any) -> Any:
    """A contract object with its tensors on the device."""
    return replace(
        made, **{k: v.to(DEVICE) for k, v in vars(made).items() if isinstance(v, Tensor)}
    )


TREE, LAYOUT = on_device(_TREE), on_device(_LAYOUT)
ACCEPTANCE = on_device(
    spec.accept_greedy(_TREE, torch.zeros(8, dtype=torch.int64), _LAYOUT, Horizon(2))
)
ONE_REQUEST = replace(LAYOUT, qo_indptr=LAYOUT.qo_indptr[:2])
H = Horizon(2)
IDS = torch.zeros(8, dtype=torch.int64, device=DEVICE)
LOGITS = torch.zeros(8, 3, device=DEVICE)
UNIFORMS = torch.zeros(8, dtype=torch.float64, device=DEVICE)


def draft(**changed: Any) -> Callable[[], object]:
    """A call of build_tree."""
    good: dict[str, Any] = {
        "draft_log_probs": DRAFT,
        "root_token_ids": ROOTS,
        "budget": 3,
        "topk": None,
    }
    return lambda: impl.build_tree(**(good | changed))


def plan(**changed: Any) -> Callable[[], object]:
    """A call of plan_verify."""
    good: dict[str, Any] = {"tree": TREE, "prefix_lens": LENS, "slot_table": TABLE}
    return lambda: impl.plan_verify(**(good | changed))


def choose(**changed: Any) -> Callable[[], object]:
    """A call of accept_sampled."""
    good: dict[str, Any] = {
        "tree": TREE, "target_logits": LOGITS, "layout": LAYOUT, "horizon": H, "uniforms": UNIFORMS,
    }  # fmt: skip
    return lambda: impl.accept_sampled(**(good | changed))


def pool(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A pool of zeros."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def keep(layout: spec.VerifyLayout = LAYOUT, **changed: Any) -> Callable[[], object]:
    """A call of commit_kv on pages of 4 slots."""
    good: dict[str, Any] = {
        "keys": (pool(24, 1, 2),),
        "values": (pool(24, 1, 2),),
        "slot_table": TABLE,
        "page_size": 4,
    }
    return lambda: impl.commit_kv(spec.PagedKV(**(good | changed)), layout, ACCEPTANCE)


CASES: list[tuple[Callable[[], object], str]] = [
    (draft(budget=-1), "budget is -1; the fewest is 0"),
    (draft(topk=0), "topk is 0; the fewest is 1"),
    (draft(draft_log_probs=DRAFT[0]), "draft_log_probs has shape [2, 3]; expected [batch, horizon, vocab]"),
    (draft(draft_log_probs=DRAFT[:, :, :0]), "draft_log_probs has an empty vocabulary"),
    (draft(root_token_ids=ROOTS[:1]), "root_token_ids has shape [1]; expected [2]"),
    (draft(budget=MAX_KEPT + 1), f"budget is {MAX_KEPT + 1} and horizon 2; the kernels are made for at most {MAX_KEPT} and {MAX_HORIZON}"),
    (draft(draft_log_probs=pool(2, MAX_HORIZON + 1, 3)), f"budget is 3 and horizon {MAX_HORIZON + 1}; the kernels are made for"),
    (plan(tree=replace(TREE, **{name: part[:0] for name, part in vars(TREE).items()})), "the tree has 0 requests"),
    (plan(prefix_lens=LENS[:1]), "prefix_lens has shape [1]; the tree has 2 requests"),
    (plan(slot_table=TABLE[0]), "slot_table has shape [12]; expected [2, max_context]"),
    (plan(slot_table=TABLE[:1]), "slot_table has shape [1, 12]; expected [2, max_context]"),
    (plan(slot_table=TABLE.T.contiguous().T), "slot_table has strides (1, 2); its entries must lie side by side"),
    (plan(q_lens=LENS[:1]), "q_lens has shape [1]; the tree has 2 requests"),
    (plan(slot_table=torch.empty(2, 2**30, dtype=torch.int64, device="meta")), "2 requests of 1073741824 entries and 4 rows overflow int32's 2147483647: split the batch"),
    (lambda: impl.tree_mask(TREE, ONE_REQUEST), "the layout has 1 requests, the tree 2"),
    (lambda: impl.tree_mask(TREE, LAYOUT, "bit"), "form is 'bit'; known are"),  # type: ignore[call-overload]
    (lambda: impl.accept_greedy(TREE, IDS, LAYOUT, Horizon(-1)), "horizon is -1; the least is 0"),
    (lambda: impl.accept_greedy(TREE, IDS, replace(LAYOUT, qo_indptr=LAYOUT.qo_indptr[:1]), H), "the layout has 0 requests, the tree 2"),
    (lambda: impl.accept_greedy(TREE, IDS, ONE_REQUEST, H), "the layout has 1 requests, the tree 2"),
    (lambda: impl.accept_greedy(TREE, IDS[None], LAYOUT, H), "target_ids has shape [1, 8]; expected one choice a query row"),
    (choose(target_logits=LOGITS[0]), "target_logits has shape [3]; expected [T, vocab]"),
    (choose(uniforms=UNIFORMS[:7]), "uniforms has shape [7]; target_logits has 8 rows"),
    (choose(temperature=-0.5), "temperature is -0.5; it must be finite and at least 0"),
    (choose(temperature=float("inf")), "temperature is inf; it must be finite and at least 0"),
    (choose(top_k=0), "top_k is 0; the least is 1"),
    (choose(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
    (choose(top_p=1.5), "top_p is 1.5; it must be above 0 and at most 1"),
    (choose(target_logits=pool(3, 8).T), "logits have strides (1, 8); a row's logits must lie side by side"),
    (choose(target_logits=LOGITS[:, :0]), "logits have shape [8, 0]; expected [rows, vocab]"),
    (lambda: first_argmax(LOGITS[:, :0]), "logits have shape [8, 0]; expected [rows, vocab]"),
    (lambda: row_uniforms(spec.Sampling(seed=2**64 - 1), LAYOUT, 2), "seed is 18446744073709551616; it must be from 0 to 2**64 - 1"),
    (keep(page_size=0), "page_size is 0; the least is 1"),
    (keep(keys=()), "0 key pools, 1 value pools"),
    (keep(slot_table=TABLE[:1]), "slot_table has 1 requests, the acceptance 2"),
    (keep(slot_table=TABLE.T.contiguous().T), "slot_table has strides (1, 2)"),
    (keep(layout=replace(LAYOUT, qo_indptr=LAYOUT.qo_indptr[:1])), "the layout has 0 requests, the acceptance 2"),
    (keep(layout=ONE_REQUEST), "the layout has 1 requests, the acceptance 2"),
    (keep(values=(pool(24, 2, 2),)), "one pool has rows of [1, 2] torch.float32, another of [2, 2] torch.float32"),
    (keep(values=(pool(24, 1, 2, dtype=torch.float16),)), "one pool has rows of [1, 2] torch.float32, another of [1, 2] torch.float16"),
    (keep(values=(pool(24, 2, 2)[:, :1],)), "a pool of shape [24, 1, 2] has strides (4, 2, 1); pools must be contiguous"),
    (keep(keys=(pool(24, 1, 1, dtype=torch.float16),), values=(pool(24, 1, 1, dtype=torch.float16),)), "a slot's row takes 2 bytes; it must be a whole number of 4-byte words"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_bad_input_is_refused_with_its_numbers(call: Callable[[], object], message: str) -> None:
    """Each refusal names what is wrong and the two numbers."""
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_the_calls_that_they_spoil_are_good() -> None:
    """Without the change each call runs, and the layout is marked as larger than the call."""
    made = plan()()
    assert isinstance(made, spec.VerifyLayout)
    assert made.is_captured
    for call in (draft(), choose(), keep(), keep(page_size=1)):
        assert call() is not None
