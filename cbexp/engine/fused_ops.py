"""The fused steps of a decoder layer as operators of torch: Triton kernels on CUDA, plain torch elsewhere.

Operators, so that torch.compile takes a forward made of them as one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbexp.engine import fused_reference as reference
from cbexp.engine.operators import operator
from cbexp.engine.paged_attention_op import paged_decode_attention

# Rows up to which the own kernels, made for reading weights, beat the matrix products of the vendor's library.
MAX_SKINNY_ROWS = 64


@operator("embed_norm")
def embed_norm(token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `fused_reference.embed_norm`."""
    if not table.is_cuda:
        return reference.embed_norm(token_ids, table, weight, eps)
    from cbexp.engine.kernels import decode_norms

    return decode_norms.embed_norm(token_ids, table, weight, eps)


@embed_norm.register_fake
def _(token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shape = (token_ids.shape[0], table.shape[1])
    return table.new_empty(shape), table.new_empty(shape)


@operator("rotated_projection")
def rotated_projection(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """As `fused_reference.rotated_projection`."""
    if not x.is_cuda:
        return reference.rotated_projection(
            x, weight, bias, positions, cos, sin, q_norm, k_norm, eps, num_heads, num_kv_heads
        )
    from cbexp.engine.kernels import projected_heads

    return projected_heads.norm_and_rotate(
        _project(x, weight, bias),
        positions,
        None if cos is None or sin is None else (cos, sin),
        None if q_norm is None or k_norm is None else (q_norm, k_norm),
        eps=eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=x.dtype,
    )


@rotated_projection.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    all_heads = num_heads + 2 * num_kv_heads
    return x.new_empty((x.shape[0], all_heads, weight.shape[0] // all_heads))


@operator("attend_new_token", mutates_args={"pages", "arrivals"})
def attend_new_token(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    pages: Tensor,
    block_table: Tensor,
    page_offset: Tensor,
    arrivals: Tensor,
    eps: float,
    scaling: float,
    window: int,
    num_heads: int,
) -> Tensor:
    """`rotated_projection` of x [rows, hidden], then paged decode attention: [rows, num_heads * head_dim].

    `arrivals`: int32 zeros [at least rows * num_kv_heads] for the kernels, which leave zeros.
    """
    num_rows, page_size, num_kv_heads, head_dim = x.shape[0], *pages.shape[1:]
    if _attends_in_one_kernel(x, head_dim):
        from cbexp.engine.kernels import rotated_attention, tiles
        from cbexp.engine.kernels.attention_tiles import device_limits

        limits, num_programs = device_limits(pages.device), num_rows * num_kv_heads
        num_slots = window or block_table.shape[1] * page_size
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        out = rotated_attention.rotated_paged_attention(
            _project(x, weight, bias),
            positions,
            cos,
            sin,
            norms,
            pages,
            block_table,
            page_offset,
            arrivals,
            eps=eps,
            scaling=scaling,
            window=window,
            num_heads=num_heads,
            tile=tiles.choose_rotated_attention_tile(num_programs, head_dim, pages.itemsize, limits),
            chunk=tiles.choose_attention_chunk(num_programs, num_slots, limits),
        )
        return out.view(num_rows, -1)
    qkv = rotated_projection(
        x, weight, bias, positions, cos, sin, q_norm, k_norm, eps, num_heads, num_kv_heads
    )
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    attended: Tensor = paged_decode_attention(
        query, key, value, pages, block_table, positions, page_offset, scaling=scaling, window=window
    )
    return attended.reshape(num_rows, -1)


@attend_new_token.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    pages: Tensor,
    block_table: Tensor,
    page_offset: Tensor,
    arrivals: Tensor,
    eps: float,
    scaling: float,
    window: int,
    num_heads: int,
) -> Tensor:
    return x.new_empty((x.shape[0], num_heads * pages.shape[3]))


def _attends_in_one_kernel(x: Tensor, head_dim: int) -> bool:
    """Whether heads are vectors of Triton, whose sizes are powers of two."""
    return x.is_cuda and head_dim & (head_dim - 1) == 0


@operator("project_add_norm")
def project_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `fused_reference.project_add_norm`."""
    if not x.is_cuda:
        return reference.project_add_norm(x, weight, bias, residual, norm_weight, eps)
    from cbexp.engine.kernels import decode_norms

    return decode_norms.add_norm(_project(x, weight, bias), residual, norm_weight, eps)


@project_add_norm.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


@operator("gated_projection")
def gated_projection(x: Tensor, weight: Tensor) -> Tensor:
    """As `fused_reference.gated_projection`."""
    if not x.is_cuda:
        return reference.gated_projection(x, weight)
    from cbexp.engine.kernels import decode_linear, gated_silu, tiles
    from cbexp.engine.kernels.attention_tiles import device_limits

    if x.shape[0] > MAX_SKINNY_ROWS:
        return gated_silu.silu_product(torch.nn.functional.linear(x, weight))
    tile = tiles.choose_gated_tile(x.shape[0], x.itemsize, device_limits(x.device))
    return decode_linear.gate_up_silu(x, weight, tile)


@gated_projection.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


@operator("best_tokens")
def best_tokens(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `fused_reference.best_tokens`."""
    if not x.is_cuda:
        return reference.best_tokens(x, weight)
    from cbexp.engine.kernels import decode_finish, decode_linear, tiles
    from cbexp.engine.kernels.attention_tiles import device_limits

    if x.shape[0] > MAX_SKINNY_ROWS:
        return decode_finish.largest_logit(torch.nn.functional.linear(x, weight))
    tile = tiles.choose_head_tile(x.shape[0], x.itemsize, device_limits(x.device))
    return decode_finish.best_token(*decode_linear.head_maxima(x, weight, tile))


@best_tokens.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0],)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The projection as parts [splits, rows, out_features]: float32 of the own kernel, or one in x's dtype."""
    from cbexp.engine.kernels import decode_linear, tiles
    from cbexp.engine.kernels.attention_tiles import device_limits

    if x.shape[0] > MAX_SKINNY_ROWS:
        return _project_many(x, weight, bias)
    tile = tiles.choose_split_tile(x.shape[0], weight.shape, x.itemsize, device_limits(x.device))
    return decode_linear.split_linear(x, weight, bias, tile)


def _project_many(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`_project` by the vendor's library, in two parts where one product of all columns leaves the device half idle.

    The library splits such products too, but sums the parts in a kernel of its own, where the next one does it anyway.
    """
    from cbexp.engine.kernels import tiles
    from cbexp.engine.kernels.attention_tiles import device_limits

    num_rows, num_columns = x.shape[0], weight.shape[0]
    is_half = x.itemsize == 2
    if (
        bias is None
        and is_half
        and tiles.splits_large_product(num_rows, weight.shape, device_limits(x.device))
    ):
        halves = x.view(num_rows, 2, -1).transpose(0, 1)
        weight_halves = weight.view(num_columns, 2, -1).permute(1, 2, 0)
        return torch.bmm(halves, weight_halves, out_dtype=torch.float32)
    return torch.nn.functional.linear(x, weight, bias)[None]
