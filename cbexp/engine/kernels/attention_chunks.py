"""Attention over one row in chunks: what each keeps, which of them is the last, and what all come to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_chunk(best, total, acc, row_acc, row_sums, chunk, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store the softmax of one chunk among those of its row."""
    lane, dim = tl.arange(0, acc.shape[0]), tl.arange(0, HEAD_DIM)
    in_group = lane < GROUP
    pointers = row_acc + (chunk * GROUP + lane)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(pointers, acc, mask=in_group[:, None])
    sums = row_sums + chunk * 2 * GROUP + lane
    tl.store(sums, best, mask=in_group)
    tl.store(sums + GROUP, total, mask=in_group)


@triton.jit
def is_last_to_arrive(arrivals, num_chunks):
    """Whether all other chunks of the row have been kept; leaves the count of arrivals at zero for the next kernel."""
    # All threads have stored before one of them tells: release, and acquire for the program that combines.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == num_chunks - 1
    tl.store(arrivals, 0, mask=is_last)
    return is_last


@triton.jit
def combine_chunks(
    row_acc,
    row_sums,
    num_chunks,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The softmax over a row, in the order of its chunks, whichever of them came last."""
    lane, dim = tl.arange(0, GROUP_ROWS), tl.arange(0, HEAD_DIM)
    in_group = lane < GROUP
    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32)
    for chunk in range(num_chunks):
        # Past the first-level cache: other multiprocessors wrote them.
        sums = row_sums + chunk * 2 * GROUP + lane
        chunk_best = tl.load(sums, mask=in_group, other=0.0, cache_modifier=".cg")
        chunk_total = tl.load(sums + GROUP, mask=in_group, other=1.0, cache_modifier=".cg")
        pointers = row_acc + (chunk * GROUP + lane)[:, None] * HEAD_DIM + dim[None, :]
        chunk_acc = tl.load(pointers, mask=in_group[:, None], other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, chunk_best)
        shrink, grow = tl.exp2(best - new_best), tl.exp2(chunk_best - new_best)
        acc = acc * shrink[:, None] + chunk_acc * grow[:, None]
        total = total * shrink + chunk_total * grow
        best = new_best
    return acc / total[:, None]
