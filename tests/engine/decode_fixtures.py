"""Decode steps without an engine: tiny models in the engine's attention, and buffers with rows at given positions."""

import math

import torch

from cbexp.engine.attention import ATTENTION_NAME
from cbexp.engine.buffers import PagePool, allocate_buffers
from tests.engine.models import build_model

VOCAB_SIZE = 61
PAGE_SIZE = WINDOW = 8
TABLE_WIDTH = 3


def head_dim_on(device):
    """The kernel's smallest head size on a GPU."""
    return 8 if torch.device(device).type == "cpu" else 64


def build_decode_model(family="qwen3", device="cpu"):
    """A random model of three layers that runs the engine's attention."""
    shape = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 3, "head_dim": head_dim_on(device)}
    windows = {"sliding_window": WINDOW} if family == "gemma2" else {}
    model = build_model(family, **shape, **windows)
    model.config._attn_implementation = ATTENTION_NAME
    return model.to(device)


def build_pools(num_blocks, *, family="qwen3", device="cpu", dtype=torch.float32):
    """One allocation of random content, which pools share by sectors as in transformers' cache."""
    kinds = {
        "qwen3": {"full_attention": (0, 1, 2)},
        "gemma2": {"sliding_attention": (0, 2), "full_attention": (1,)},
    }[family]
    pages_per_sector = math.lcm(*(2 * len(layers) for layers in kinds.values()))
    num_sectors = 2 + sum(math.ceil(num_blocks * 2 * len(k) / pages_per_sector) for k in kinds.values())
    generator = torch.Generator().manual_seed(1)
    shape = (num_sectors * pages_per_sector, PAGE_SIZE, 2, head_dim_on(device))
    pages = torch.randn(shape, generator=generator)
    pages[:pages_per_sector] = 0
    pages = pages.to(device, dtype)
    return {
        name: PagePool(
            layers,
            pages,
            pages_per_block=2 * len(layers),
            trash_page=pages_per_sector,
            table_width=WINDOW // PAGE_SIZE if name == "sliding_attention" else TABLE_WIDTH,
            window=WINDOW if name == "sliding_attention" else 0,
        )
        for name, layers in kinds.items()
    }


def build_buffers(max_rows, *, pools=None, family="qwen3", max_burst=8, eos_token_ids=(7,), **options):
    """Buffers whose rows have blocks of their own and are all inactive."""
    pools = pools or build_pools(max_rows * TABLE_WIDTH, family=family, **options)
    device = next(iter(pools.values())).pages.device
    buffers = allocate_buffers(
        pools, max_rows=max_rows, max_burst=max_burst, eos_token_ids=eos_token_ids, device=device
    )
    first_page = 2 * next(iter(pools.values())).trash_page
    for name, pool in pools.items():
        shape = (max_rows, pool.table_width)
        blocks = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(2)).view(shape)
        buffers.block_tables[name].copy_(first_page + blocks * pool.pages_per_block)
        taken = math.ceil(blocks.numel() * pool.pages_per_block / pool.trash_page)
        first_page += taken * pool.trash_page
        assert first_page <= len(pool.pages)
    return buffers


def set_rows(buffers, positions, remaining=9):
    """Put rows at `positions`, the others to rest; the next burst begins."""
    num_rows = len(positions)
    buffers.step.zero_()
    buffers.outputs.fill_(-1)
    buffers.best_logits.zero_()
    buffers.positions.fill_(-1)
    buffers.positions[:num_rows].copy_(torch.tensor(positions, dtype=torch.int32))
    buffers.token_ids.copy_(torch.arange(buffers.max_rows) * 5 % VOCAB_SIZE)
    buffers.remaining.fill_(remaining)


def state_of(buffers):
    """All that steps may change, as copies: of `buffers.state()`, then of the pages."""
    pages = {layer.pages.data_ptr(): layer.pages for layer in buffers.layers}
    return [tensor.clone() for tensor in (*buffers.state(), *pages.values())]
