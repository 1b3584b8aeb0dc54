"""Programs that work under another default device, as engines do: what is made beside their tensors is not
made there."""

from typing import Any

import pytest
import torch

from ddtree import check, debug, impl, spec
from ddtree.invariants import Call, InvariantViolation
from ddtree.spec import Budget, Horizon
from tests.impl.cases import DEVICE


@pytest.mark.parametrize("package", [spec, impl])
@pytest.mark.parametrize("level", ["off", "cheap", "full", "shadow"])
def test_every_step_works_and_is_checked(package: Any, level: str) -> None:
    """A round gives what it gives under no default; "meta" stands for a device of no values."""
    device = DEVICE if package is impl else "cpu"
    log_probs = torch.randn(2, 4, 11).log_softmax(-1).to(device)
    roots, prefixes = torch.tensor([3, 5], device=device), torch.tensor([4, 0], device=device)
    table = torch.arange(40, device=device).view(2, 20)
    choices = torch.randint(0, 11, (14,), device=device)
    uniforms = torch.rand(14, dtype=torch.float64, device=device)
    logits = torch.randn(14, 11, device=device)

    def run() -> list[torch.Tensor]:
        tree = package.build_tree(log_probs, roots, Budget(6))
        layout = package.plan_verify(tree, prefixes, table)
        masks = [package.tree_mask(tree, layout, form) for form in ("flat", "packed", "bits")]
        greedy = package.accept_greedy(tree, choices, layout, Horizon(4))
        sampled = package.accept_sampled(tree, logits, layout, Horizon(4), uniforms)
        pool = torch.arange(80.0, device=device).view(40, 1, 2)
        kv = spec.PagedKV((pool,), (pool.clone(),), table.clone(), 1)
        commit = package.commit_kv(kv, layout, greedy)
        parts = [*vars(tree).values(), layout.positions, layout.out_cache_loc, masks[2].words]
        parts += [
            layout.kv_indices[: layout.kv_indptr[-1]],
            masks[0].allowed[: layout.mask_indptr[-1]],
        ]
        parts += [masks[1].packed[: masks[1].byte_indptr[-1]]]
        parts += [part for made in (greedy, sampled, commit) for part in vars(made).values()]
        return [*parts, pool, kv.slot_table]

    expected = run()
    if level == "off":
        with torch.device("meta"):
            found = run()
    else:
        with debug(level=level), torch.device("meta"):
            found = run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_violations_are_the_same_with_their_hints() -> None:
    """The founding bug's offsets, named with their cause."""
    call = Call(
        qo_indptr=torch.tensor([0, 17, 34]), kv_indptr=torch.tensor([0, 5, 8]),
        mask_indptr=torch.tensor([0, 104, 192]), q_lens=torch.tensor([17, 17]),
        prefix_lens=torch.tensor([5, 3]),
    )  # fmt: skip
    told = []
    for device in ("cpu", "meta"):
        with torch.device(device), pytest.raises(InvariantViolation) as caught:
            check(call=call)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "374" in told[0] and "fits width 8" in told[0]
