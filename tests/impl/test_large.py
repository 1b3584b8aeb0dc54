"""Sizes at which 32-bit offsets overflow: no kernel computes an address in 32 bits.

Each test has a small twin of the same code, which runs everywhere.
"""

import pytest
import torch
from torch import Tensor

from ddtree import impl, spec
from ddtree.impl.sampling import first_argmax, sample_rows
from ddtree.spec import Acceptance, Budget, PagedKV, sampling
from ddtree.spec.index import fits_int32
from tests.impl.cases import DEVICE, moved
from tests.impl.replays import same

CUTS: list[tuple[int | None, float | None]] = [(None, None), (20, None), (None, 0.9)]


@pytest.mark.parametrize(
    ("rows", "vocab"), [(5, 67), pytest.param(15409, 151936, marks=pytest.mark.gpu)]
)
def test_logits_past_two_to_the_31_are_read(rows: int, vocab: int) -> None:
    """The target's choice at the last rows is the reference's, where row * vocab passes 2**31."""
    assert DEVICE == "cpu" or rows < 99 or not fits_int32((rows - 1) * vocab)
    g = torch.Generator(DEVICE).manual_seed(3)
    logits = torch.empty(rows, vocab, dtype=torch.float16, device=DEVICE).normal_(0, 4, generator=g)
    uniforms = torch.rand(rows, dtype=torch.float64, device=DEVICE, generator=g)
    last, numbers = logits[-4:].cpu(), uniforms[-4:].cpu()
    same("argmax", first_argmax(logits)[-4:], sampling.first_argmax(last))
    for top_k, top_p in CUTS:
        expected = sampling.sample(sampling.target_distribution(last, 0.8, top_k, top_p), numbers)
        same("sample", sample_rows(logits, uniforms, 0.8, top_k, top_p)[-4:], expected)


@pytest.mark.parametrize(
    ("batch", "horizon", "vocab"),
    [(3, 2, 71), pytest.param(290, 31, 262144, marks=pytest.mark.gpu)],
)
def test_log_probs_past_two_to_the_31_are_read(batch: int, horizon: int, vocab: int) -> None:
    """The last requests' trees are the reference's."""
    assert batch < 99 or not fits_int32((batch - 2) * horizon * vocab)
    g = torch.Generator(DEVICE).manual_seed(5)
    shape = (batch, horizon, vocab)
    log_probs = torch.empty(shape, dtype=torch.float16, device=DEVICE).normal_(0, 4, generator=g)
    log_probs -= 30  # negative is all that matters
    roots = torch.arange(batch, device=DEVICE)
    found = impl.build_tree(log_probs, roots, Budget(16))
    known = spec.build_tree(log_probs[-2:].cpu(), roots[-2:].cpu(), Budget(16))
    for name, value in vars(known).items():
        same(name, getattr(found, name)[-2:], value)


def chain_of_pairs(batch: int, q_len: int) -> spec.DraftTree:
    """Trees in which node 2i + 1 and node 2i + 2 are children of node 2i."""
    node = torch.arange(q_len, dtype=torch.int32).expand(batch, -1)
    parents = ((node - 1) // 2 * 2).where(node > 0, torch.tensor(-1, dtype=torch.int32))
    depths = (node + 1) // 2
    return spec.DraftTree(
        node.long(), parents, depths, -depths.double(), torch.full((batch,), q_len).int()
    )


@pytest.mark.parametrize(
    ("prefix_len", "budget"), [(37, 6), pytest.param(600_000, 1023, marks=pytest.mark.gpu)]
)
def test_masks_longer_than_two_to_the_31_are_written(prefix_len: int, budget: int) -> None:
    """Every entry of every request's segment, prefix and tree, in the flat and the packed form."""
    batch, q_len = 4, budget + 1
    prefix_lens = prefix_len + torch.arange(batch, dtype=torch.int32)
    max_context = prefix_len + batch + q_len
    assert budget < 99 or not fits_int32(batch * q_len * prefix_len)
    tree = chain_of_pairs(batch, q_len)
    table = torch.arange(max_context).expand(batch, -1).contiguous()
    on_device = moved((tree, prefix_lens, table), DEVICE)
    layout = impl.plan_verify(*on_device)
    flat = impl.tree_mask(on_device[0], layout, "flat")
    packed = impl.tree_mask(on_device[0], layout, "packed")
    node = torch.arange(q_len)
    visible = (node[:, None] == node) | (
        (node % 2 == 0) & (node < node[:, None])  # all even nodes before it
    )
    for b in range(batch):
        prefix = int(prefix_lens[b])
        start, end = layout.mask_indptr[b : b + 2].tolist()
        assert end - start == q_len * (prefix + q_len)
        segment = flat.allowed[start:end].view(q_len, prefix + q_len)
        assert segment[:, :prefix].all()
        same("tree", segment[:, prefix:], visible)
        first = int(packed.byte_indptr[b])
        bits = packed.packed[first : int(packed.byte_indptr[b + 1])]
        assert torch.equal(unpacked(bits, end - start), flat.allowed[start:end])


def unpacked(packed: Tensor, length: int) -> Tensor:
    """Return the first ``length`` bits, LSB first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).bool().flatten()[:length]


@pytest.mark.parametrize(
    ("num_slots", "heads", "head_dim"),
    [(400, 2, 4), pytest.param(2_200_000, 8, 128, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_kv_past_two_to_the_31_elements_is_moved(
    num_slots: int, heads: int, head_dim: int, page_size: int
) -> None:
    """A commit in the pool's last slots keeps the accepted rows' KV there and touches no other."""
    assert num_slots < 999 or not fits_int32((num_slots - 400) * heads * head_dim)
    batch, q_len, context, base = 2, 9, 64, num_slots - 160
    tree = chain_of_pairs(batch, q_len)
    prefix_lens = torch.tensor([19, 40], dtype=torch.int32)
    order = torch.tensor([3, 7, 0, 5, 1, 6, 9, 2])
    table = (order[:, None] * 16 + torch.arange(16)).view(batch, context)
    layout = spec.plan_verify(tree, prefix_lens, table)
    nodes = torch.tensor([[0, 2, 4, 5, -1], [0, 1, -1, -1, -1]], dtype=torch.int32)
    acceptance = Acceptance(nodes, torch.tensor([4, 2]).int(), torch.tensor([7, 8]))

    g = torch.Generator().manual_seed(page_size)
    content = [torch.randn(160, heads, head_dim, generator=g).bfloat16() for _ in range(2)]
    pools = [
        torch.zeros(num_slots, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2)
    ]
    for pool, part in zip(pools, content, strict=True):
        pool[base:] = part.to(DEVICE)
    known = PagedKV((content[0],), (content[1],), table.clone(), page_size)
    found = PagedKV((pools[0],), (pools[1],), (table + base).to(DEVICE), page_size)
    spec.commit_kv(known, layout, acceptance)
    shifted = spec.plan_verify(tree, prefix_lens, table + base)
    impl.commit_kv(found, *moved((shifted, acceptance), DEVICE))
    same("slot table", found.slot_table - base, known.slot_table)
    for pool, part in zip(pools, content, strict=True):
        same("moved", pool[base:], part)
        assert not pool[:base].any()
