"""``torch.compile`` goes through every step without a break, and every operator keeps its promises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ddtree import impl, spec
from ddtree.decoding.paged import PagedTarget
from ddtree.impl.commit import move_rows
from ddtree.impl.layers import write_context
from ddtree.impl.layout import plan_blocks
from ddtree.impl.op import op
from ddtree.impl.products import norm_gate, norm_heads, product_add
from ddtree.impl.record import pack_record
from ddtree.invariants import InvariantViolation, debug
from ddtree.spec import (
    Budget,
    DraftTree,
    Horizon,
    PagedKV,
    QLen,
    Sampling,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.mask import Form
from ddtree.spec.public import set_observer
from ddtree.spec.round import Round
from tests.decoding.tiny import VOCAB, prompt, tiny_model
from tests.impl.cases import DEVICE

pytestmark = [  # what compilers warn of that concerns nothing here
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check. is deprecated"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]
BACKENDS = [
    pytest.param("aot_eager"),
    pytest.param("inductor", marks=pytest.mark.gpu),
]
BUDGET, HORIZON = Budget(6), Horizon(3)
SLOTS = 101


def inputs(batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """What the steps of a round read."""
    g = torch.Generator().manual_seed(seed)
    rows = batch * (BUDGET + 1)
    given = {
        "drafts": torch.randn(batch, HORIZON, VOCAB, generator=g).log_softmax(-1),
        "roots": torch.arange(batch),
        "prefix_lens": torch.arange(batch, dtype=torch.int32) * 2 + 3,
        "slots": torch.randperm(SLOTS, generator=g)[: batch * 13].view(batch, 13),
        "query": torch.randn(rows, 4, 64, generator=g),
        "key": torch.randn(rows, 2, 64, generator=g),
        "value": torch.randn(rows, 2, 64, generator=g),
        "key_pool": torch.randn(SLOTS, 2, 64, generator=g),
        "value_pool": torch.randn(SLOTS, 2, 64, generator=g),
        "uniforms": torch.rand(rows, dtype=torch.float64, generator=g),
        "logits": torch.randn(rows, VOCAB, generator=g),
    }
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


FORMS: tuple[Form, ...] = ("bits", "flat", "packed", "dense")
CHOICES: tuple[dict[str, Any], ...] = ({"top_p": 0.8}, {}, {"top_k": 5, "temperature": 0.7})


def steps(given: dict[str, Tensor], page_size: int, forms: int = 4, choices: int = 3) -> Any:
    """Every public step, in order, with so many forms and choices; nothing given is changed."""
    tree = impl.build_tree(given["drafts"], given["roots"], BUDGET)
    layout = impl.plan_verify(tree, given["prefix_lens"], given["slots"])
    masks = [impl.tree_mask(tree, layout, form) for form in FORMS[:forms]]
    bits = [impl.convert_mask(mask, layout, "bits") for mask in masks]
    attended = impl.verify_attention(
        given["query"], given["key"], given["value"], given["key_pool"], given["value_pool"],
        layout, bits[-1], softcap=3.0, window=4, value_scale=0.5, return_lse=True,
    )  # fmt: skip
    greedy = impl.accept_greedy(tree, given["logits"].argmax(-1), layout, HORIZON)
    sampled = [
        impl.accept_sampled(tree, given["logits"], layout, HORIZON, given["uniforms"], **options)
        for options in CHOICES[:choices]
    ]
    pools = ((given["key_pool"].clone(),), (given["value_pool"].clone(),))
    kv = PagedKV(*pools, given["slots"].clone(), page_size)
    commit = impl.commit_kv(kv, layout, greedy)
    return tree, layout.qo_indptr, layout.positions, masks, bits, attended, sampled, commit, kv


def leaves(value: Any) -> list[Tensor]:
    """All tensors in what a function gave."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return leaves(list(vars(value).values())) if hasattr(value, "__dict__") else []


def same(found: Any, expected: Any) -> None:
    """Hold two results to be equal, bit for bit."""
    pairs = list(zip(leaves(found), leaves(expected), strict=True))
    assert len(pairs) > 4
    for i, (one, other) in enumerate(pairs):
        assert one.dtype == other.dtype and torch.equal(one, other), i


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_steps_compile_into_one_graph(backend: str) -> None:
    """Fullgraph, and equal to the eager calls."""
    compiled = torch.compile(steps, fullgraph=True, backend=backend)
    same(compiled(inputs(), 4), steps(inputs(), 4))


def test_sizes_may_be_symbols() -> None:
    """Traced once with dynamic shapes and numbers, called for two batches (sizes that no others equal)."""
    compiled = torch.compile(steps, fullgraph=True, backend="eager", dynamic=True)
    with torch.compiler.set_stance("default"):
        same(compiled(inputs(5), 1, 2, 1), steps(inputs(5), 1, 2, 1))
    with torch.compiler.set_stance("fail_on_recompile"):
        found = compiled(inputs(6), 1, 2, 1)
    same(found, steps(inputs(6), 1, 2, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("page_size", "sampling", "buffered"),
    [(1, None, True), (4, Sampling(0.8, 5, 0.9, seed=2**63 + 3), False)],
)
def test_a_whole_round_compiles_into_one_graph(
    backend: str, page_size: int, sampling: Sampling | None, buffered: bool
) -> None:
    """The model between the steps included; its logits round anew, and all else follows from them."""
    model = tiny_model("llama-64", torch.float32).to(DEVICE)
    options: dict[str, Any] = {"ragged": not buffered, "sampling": sampling}
    given, found, targets = inputs(), list[Any](), list[Any]()
    for compiles in (False, True):
        target = PagedTarget(model, max_batch=2, max_context=24, page_size=page_size)
        for request, length in enumerate((5, 3)):
            target.prefill(request, prompt(length))
        recorder = Recorder(target)
        buffers = impl.VerifyBuffers(2, QLen(8), 24, device=DEVICE) if buffered else None

        def run(
            given: dict[str, Tensor], recorder: Any = recorder, buffers: Any = buffers
        ) -> tuple[Any, Tensor]:
            one = impl.verify_round(
                given["drafts"], given["roots"], recorder.target.prefix_lens, recorder, BUDGET,
                buffers=buffers, **options,
            )  # fmt: skip
            return one, recorder.logits

        call = torch.compile(run, fullgraph=True, backend=backend) if compiles else run
        found.append(call(given))
        targets.append(target)
    (eager, eager_logits), (compiled, logits) = found
    rows = int(eager.layout.qo_indptr[-1])
    assert torch.allclose(logits[:rows], eager_logits[:rows], atol=1e-3)
    same([compiled.tree, compiled.layout.qo_indptr], [eager.tree, eager.layout.qo_indptr])
    known = Known(targets[0], logits)  # the eager steps once more, on the compiled model's logits
    targets[0].prefix_lens.copy_(eager.layout.kv_indptr[1:] - eager.layout.kv_indptr[:-1])
    targets[0].slot_table.copy_(torch.arange(48, device=DEVICE).view(2, 24))
    again = impl.verify_round(
        given["drafts"], given["roots"], targets[0].prefix_lens, known, BUDGET,
        buffers=impl.VerifyBuffers(2, QLen(8), 24, device=DEVICE) if buffered else None, **options,
    )  # fmt: skip
    same(
        [compiled.token_ids, compiled.acceptance, compiled.commit, targets[1].prefix_lens],
        [again.token_ids, again.acceptance, again.commit, targets[0].prefix_lens],
    )
    assert torch.equal(targets[1].slot_table, targets[0].slot_table)


class Recorder:
    """A target, with the logits of its last pass kept."""

    mask_form = "bits"

    def __init__(self, target: PagedTarget) -> None:
        self.target, self.slot_table, self.commit = target, target.slot_table, target.commit
        self.logits = torch.empty(0)

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: TreeMask) -> Tensor:
        self.logits = self.target.forward(tree, layout, mask)
        return self.logits


class Known(Recorder):
    """A target whose logits are known."""

    def __init__(self, target: PagedTarget, logits: Tensor) -> None:
        super().__init__(target)
        self.logits = logits

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: TreeMask) -> Tensor:
        return self.logits


Seen = dict[str, tuple[Any, list[tuple[Any, ...]]]]
"""Operators by name, each with the arguments of its calls."""


class Calls(TorchDispatchMode):
    """Records each operator of ours with the arguments that it gets."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Seen = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ddtree":
            copied = tree_map_only(Tensor, lambda t: t.clone(), args)
            self.seen.setdefault(str(func), (func, []))[1].append(copied)
        return func(*args, **(kwargs or {}))


def of_a_loop(roots: Tensor, done: Round) -> None:
    """What the loop and its drafter launch beside a round."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    lens, table = roots.int(), torch.arange(16, device=DEVICE).view(2, 8)
    plan_blocks(lens, lens + 1, table, roots, torch.zeros(2, 3, dtype=torch.int64, device=DEVICE))
    for logits in (None, random(done.layout.positions.numel(), 11)):
        pack_record(done.tree, done.layout, done.acceptance, logits)
    move_rows([random(64, 1, 4)], done.commit)
    angles, at = random(9, 64), torch.tensor([1, 0], device=DEVICE)
    pools = random(2, 2, 5, 1, 64)
    write_context(random(2, 2, 128), (angles, angles), at, random(2, 64), 0.1, pools, at - 1)
    x, norm = random(2, 5), random(5)
    norm_heads(x, norm, 0.1, random(192, 5), None, (angles, angles), at, (1, 1))
    product_add(norm_gate(x, norm, 0.1, random(6, 5)), random(5, 3), None, x)


@pytest.fixture(scope="module")
def calls() -> Seen:
    """Every operator, with the calls that two rounds and all forms make."""
    target, fused = (
        PagedTarget(
            tiny_model("llama-64", torch.float32).to(DEVICE),
            max_batch=2,
            max_context=24,
            fused=fused,
        )
        for fused in (False, True)
    )
    buffers = impl.VerifyBuffers(2, QLen(8), 24, device=DEVICE)
    calls = Calls()
    with calls:
        steps(inputs(), 4)
        given = inputs()
        impl.verify_round(
            given["drafts"], given["roots"], target.prefix_lens, target, BUDGET,
            sampling=Sampling(0.8), buffers=buffers,
        )  # fmt: skip
        done = impl.verify_round(given["drafts"], given["roots"], fused.prefix_lens, fused, BUDGET)
        of_a_loop(given["roots"], done)
    seen: Seen = calls.seen
    return seen


OPERATORS = sorted(
    name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ddtree::")
)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_keep_their_promises(name: str, calls: Any) -> None:
    """Torch's own check: schema, what is written, results without content, ahead-of-time dispatch."""
    function, arguments = calls[name.replace("::", ".") + ".default"]
    for args in arguments[:3]:
        opcheck(function, args)


def test_an_operator_that_writes_in_secret_is_noticed() -> None:
    """The check above fails for an operator whose declaration leaves out what it writes."""

    @op("secret_writer")
    def write(into: Tensor) -> None:
        into.add_(1)

    del write
    with pytest.raises(Exception, match="mutat"):
        opcheck(torch.ops.ddtree.secret_writer.default, (torch.zeros(3),))


def test_debug_mode_sees_compiled_calls() -> None:
    """On, calls leave the graph and are checked; off, the graph is whole again."""

    def plan(depths: Tensor, prefix_lens: Tensor) -> Tensor:
        given = inputs()
        tree = impl.build_tree(given["drafts"], given["roots"], BUDGET)
        tree = spec.DraftTree(tree.token_ids, tree.parents, depths, tree.scores, tree.num_nodes)
        return impl.plan_verify(tree, prefix_lens, given["slots"]).positions * 2

    given = inputs()
    depths = impl.build_tree(given["drafts"], given["roots"], BUDGET).depths
    arguments = (depths, given["prefix_lens"])
    compiled = torch.compile(plan, backend="eager")
    expected = plan(*arguments)
    assert torch.equal(compiled(*arguments), expected)
    names: list[str] = []

    def observe(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        names.append(function.__name__)
        return function(*args, **kwargs)

    before = set_observer(observe)
    try:
        assert torch.equal(compiled(*arguments), expected)
    finally:
        set_observer(before)
    assert names == ["build_tree", "plan_verify"]
    with debug():
        assert torch.equal(compiled(*arguments), expected)
        with pytest.raises(InvariantViolation):
            compiled(depths + 1, given["prefix_lens"])
    whole = torch.compile(plan, backend="eager", fullgraph=True)
    assert torch.equal(whole(*arguments), expected)
