"""Private names of torch and FlashAttention that only a GPU can show to do what we say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_videoscale.compat import flash_attn
from lightning_videoscale.compat.torch import attention, cuda, distributed, graphs, versions
from tests.compat.attention_products import CASES, SCALE, assert_as_products, gradient_handed_over, hiding, inputs
from tests.distributed.pool import ProcessPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("keys", [53, 64])  # 64 end in half a tile
@pytest.mark.parametrize(("kernel", "masked"), CASES)
def test_kernels_on_a_gpu_are_as_products_are(kernel: str, masked: bool, keys: int) -> None:
    bias = hiding(keys, "cuda", torch.float16) if masked else None
    assert_as_products(kernel, "cuda", torch.float16, keys, bias)


@pytest.mark.parametrize("generation", [2, 3, 4])
def test_flash_attention_is_as_products_are(generation: int) -> None:
    if (why := flash_attn.missing(generation)) is not None:
        pytest.skip(why)
    assert_as_products(f"flash_attn_{generation}", "cuda", torch.float16, 53, None)


def test_cudnn_has_gradients_of_rows_of_small_exponentials() -> None:
    q, k, v, grad = inputs("cuda", 64, torch.float16)
    q, k, bias = 16 * torch.ones_like(q), -torch.ones_like(k), hiding(64, "cuda", torch.float16)
    out, lse = attention.cudnn(q, k, v, SCALE, bias)
    assert lse.max() < -88
    assert all(x.isfinite().all() for x in attention.cudnn_backward(grad, q, k, v, out, lse, SCALE, bias))


def test_a_gradient_on_a_gpu_lies_with_tokens_first() -> None:
    assert gradient_handed_over(torch.ones(1, 2, 3, 4, device="cuda")).transpose(1, 2).is_contiguous()


def shared_memory() -> tuple[bool, list[int]]:
    device, rank, size = torch.device("cuda", torch.cuda.current_device()), dist.get_rank(), dist.get_world_size()
    named = distributed.symmetric_backend(device) in (None, "CUDA")
    storage = distributed.empty_symmetric(1 << 21, device)
    storage.fill_(rank + 1)
    torch.cuda.synchronize()
    store = PrefixStore("tests/compat", distributed.store_of(dist.group.WORLD))
    group = dist.ProcessGroup(store, rank, size)
    distributed.register_group("tests/compat/memory", group)
    handle = distributed.map_peers(storage, "tests/compat/memory")
    seen = [int(handle.get_buffer(peer, (1 << 21,), torch.uint8)[-1]) for peer in range(size)]
    dist.barrier()
    distributed.unregister_group("tests/compat/memory")
    return named and storage.dtype is torch.uint8 and storage.shape == (1 << 21,), seen


def test_the_memory_of_peers_is_mapped() -> None:
    pool = ProcessPool(2, share_gpu=True)
    try:
        assert pool.run(shared_memory) == [(True, [1, 2])] * 2
    finally:
        pool.stop()


def test_memory_is_shared_and_not_kept() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.zeros(4, 1 << 20, dtype=torch.bfloat16, device="cuda")[:, ::2]
    alias = graphs.alias(x)
    x.fill_(3)
    assert (alias.data_ptr(), alias.shape, alias.stride(), alias.dtype) == (x.data_ptr(), x.shape, x.stride(), x.dtype)
    assert bool((alias == 3).all())
    del x
    assert torch.cuda.memory_allocated() == before


def test_the_raw_stream_is_the_current_one() -> None:
    device = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert cuda.current_raw_stream(device) == torch.cuda.current_stream().cuda_stream != 0
    assert cuda.current_raw_stream(device) == torch.cuda.current_stream().cuda_stream


def test_autocast_widens_norms_where_we_say() -> None:
    x = torch.ones(2, 8, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        out = torch.nn.functional.rms_norm(x, (8,))
    assert (out.dtype is torch.float32) is versions.autocast_widens_norms()
