"""Memory that is given up and comes back; drivers that sleep beside a trainer and wake as if nothing had been."""

import copy
import ctypes
import functools
import gc
import itertools
import math
import re

import pytest
import torch

from cbexp.engine import CacheMemoryError, EngineError, memory
from tests.engine.driving import cache_of, check_cache_at_rest, drive

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_views_find_the_memory_again():
    held = memory.allocate(100, CPU)
    tensor = held.as_tensor()
    view = tensor.view(torch.int32)[5:]
    for _ in range(3):
        held.take_back()
        tensor.zero_()[20] = 7
        assert (view[0], held.is_held, tensor.untyped_storage().nbytes()) == (7, True, 100)
        for _ in range(2):
            held.give_up()
        assert (tensor.shape, held.is_held, tensor.untyped_storage().nbytes()) == ((100,), False, 0)
        held.take_back()
    with pytest.raises(CacheMemoryError, match="cpu has no room for"):
        memory.allocate(2**62, CPU)


# The CUDA driver's virtual memory, without a driver


class FakeCuda:
    """The driver's functions as far as they are called, and what is reserved, made and mapped.

    `codes`: results of the next calls, by name.
    """

    PAGE = 2**21

    def __init__(self):
        self.calls, self.codes = [], {}
        self.reserved, self.handles, self.mapped = {}, set(), {}
        self.numbers = itertools.count(1)

    def function(self, name):
        def call(*arguments):
            assert len(arguments) == len(memory._ARGUMENTS[name])
            self.calls.append(name)
            if self.codes.get(name) and (code := self.codes[name].pop(0)):
                return code
            getattr(self, re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())(*arguments)
            return 0

        return call

    def cu_get_error_name(self, code, name):
        name._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 1: b"CUDA_ERROR_INVALID_VALUE"}[code]

    def cu_mem_get_allocation_granularity(self, size, properties, option):
        properties = properties._obj
        asked = (properties.type, properties.requested_handle_types, properties.location.type)
        assert (*asked, properties.location.id, option) == (1, 0, 1, 0, 0)
        size._obj.value = self.PAGE

    def cu_mem_address_reserve(self, address, size, alignment, fixed, flags):
        assert (alignment, fixed, flags, size % self.PAGE) == (0, 0, 0, 0)
        address._obj.value = next(self.numbers) << 40
        self.reserved[address._obj.value] = size

    def cu_mem_address_free(self, address, size):
        assert self.reserved.pop(address) == size
        assert address not in self.mapped

    def cu_mem_create(self, handle, size, properties, flags):
        assert (size, flags) == (*self.reserved.values(), 0)
        handle._obj.value = next(self.numbers)
        self.handles.add(handle._obj.value)

    def cu_mem_release(self, handle):
        self.handles.remove(handle.value)

    def cu_mem_map(self, address, size, offset, handle, flags):
        assert (self.reserved[address], offset, flags) == (size, 0, 0)
        assert handle.value in self.handles
        assert address not in self.mapped
        self.mapped[address] = None

    def cu_mem_set_access(self, address, size, access, count):
        access = access._obj
        assert (access.location.type, access.location.id, count) == (1, 0, 1)
        assert (self.reserved[address]) == size
        self.mapped[address] = access.flags

    def cu_mem_unmap(self, address, size):
        assert self.reserved[address] == size
        del self.mapped[address]


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(memory, "_function", fake.function)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: fake.calls.append(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 80 * 2**30))
    return fake


def test_structs_are_those_of_the_header():
    """Of cuda.h 13.0, compiled with gcc on x86-64."""
    properties = memory._AllocationProperties
    sizes = map(ctypes.sizeof, (memory._Location, properties, memory._Access))
    offsets = properties.location.offset, properties.win32_handle_meta_data.offset, properties.usage.offset
    assert (*sizes, *offsets) == (8, 32, 12, 8, 16, 26)


def test_mapped_memory_keeps_its_address_and_leaves_nothing_behind(cuda):
    memory.reset_peak(CUDA)
    held = memory.allocate(3 * FakeCuda.PAGE - 1, CUDA)
    (address,) = cuda.reserved
    size, taken = (
        3 * FakeCuda.PAGE,
        ["synchronize", "cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess"],
    )
    assert cuda.calls[-5:] == taken
    for _ in range(3):
        interface = held.__cuda_array_interface__
        assert (interface["data"], interface["shape"]) == ((address, False), (size - 1,))
        assert (cuda.mapped, cuda.handles, memory.held_bytes(CUDA)) == ({address: 3}, set(), size)
        cuda.calls.clear()
        for _ in range(2):
            held.give_up()
        assert (cuda.calls, cuda.mapped, memory.held_bytes(CUDA)) == (["synchronize", "cuMemUnmap"], {}, 0)
        for _ in range(2):
            held.take_back()
        assert cuda.calls[2:] == taken
    del held, interface
    gc.collect()
    assert cuda.reserved == cuda.mapped == {}
    assert (memory.held_bytes(CUDA), memory.peak_held_bytes(CUDA)) == (0, size)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ({"cuMemCreate": [2]}, None),
        (
            {"cuMemCreate": [2, 2]},
            "cuda:0 has no room for 2.0 MiB, since 3.00 GiB are free. cuMemCreate failed with",
        ),
        ({"cuMemCreate": [1]}, "cuMemCreate failed with CUDA_ERROR_INVALID_VALUE (1)."),
        ({"cuMemMap": [1]}, "cuMemMap failed with CUDA_ERROR_INVALID_VALUE (1)."),
        ({"cuMemSetAccess": [2]}, "cuMemSetAccess failed with CUDA_ERROR_OUT_OF_MEMORY (2)."),
    ],
)
def test_what_fails_is_named_and_can_be_tried_again(cuda, codes, message):
    is_short = codes.get("cuMemCreate", [1])[0] == 2
    for is_new in (False, True):
        held = None if is_new else memory.allocate(100, CUDA)
        if held is not None:
            held.give_up()
        cuda.calls.clear()
        cuda.codes = copy.deepcopy(codes)
        take = functools.partial(memory.allocate, 100, CUDA) if held is None else held.take_back
        if message is not None:
            with pytest.raises(EngineError) as raised:
                take()
            assert str(raised.value).startswith(message)
            assert isinstance(raised.value, CacheMemoryError) is is_short
            del raised
            assert (cuda.mapped, cuda.handles, len(cuda.reserved)) == ({}, set(), 0 if is_new else 1)
        held = take() or held
        assert ("empty_cache" in cuda.calls, held.is_held) == (is_short, True)
        del held, take
        assert cuda.reserved == {}


# Drivers


def poison(driver):
    """What a broken round may have left behind: NaN in every block, and in what padding writes."""
    cache = cache_of(driver)
    cache.cache_tensor[cache.bytes_per_sector :].view(torch.float32).fill_(math.nan)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"num_blocks": 60, "allow_block_sharing": True}),
        ("gemma3", {}),
        ("llama", {"attn_implementation": "eager", "num_blocks": 60}),
        pytest.param("qwen3", {"num_blocks": 60, "compile_mode": "default"}, marks=pytest.mark.slow),
    ],
)
def test_a_driver_that_slept_has_an_empty_cache_and_says_the_same(check_drive, prompts, family, settings):
    driver = check_drive(family, prompts, max_requests_per_batch=4, **settings)
    engine = driver._engine
    programs = driver.compile_stats.get("programs")
    for wakes_by_itself in (False, True):
        poison(driver)
        for _ in range(2):
            driver.sleep()
            assert cache_of(driver).cache_tensor.untyped_storage().nbytes() == 0
        if not wakes_by_itself:
            for _ in range(2):
                driver.wake()
                check_cache_at_rest(driver)
            assert not cache_of(driver).cache_tensor.any()
        check_drive(family, prompts, driver=driver)
    assert driver._engine is engine
    assert driver.compile_stats.get("programs") == programs
    driver.sleep()


def test_what_needs_the_cache_wakes_the_driver(shared_model, make_driver, prompts):
    driver = make_driver(shared_model("qwen3"), num_blocks=40, max_requests_per_batch=4)
    for use in (driver.warmup, functools.partial(driver.time_decode_steps, 2, 9, 3, num_bursts=1)):
        driver.sleep()
        assert driver.resolved["num_blocks"] == 40
        driver.add_requests(prompts)
        assert not driver._engine.batcher.held_bytes
        use()
        check_cache_at_rest(driver)
        assert driver._engine.batcher.held_bytes
    driver.sleep()
    driver.close()
    for method in (driver.sleep, driver.wake):
        with pytest.raises(EngineError, match=f"{method.__name__}\\(\\) was called on a closed SyncCBDriver"):
            method()


def test_nobody_sleeps_inside_a_drive(shared_model, make_driver, prompts, references):
    refused = []

    def sleep_and_wake(index, info):
        for method in (driver.sleep, driver.wake):
            with pytest.raises(EngineError, match=f"{method.__name__}\\(\\) was called inside a drive"):
                method()
            refused.append(index)

    driver = make_driver(shared_model("qwen3"), on_step=sleep_and_wake)
    driver.wake()
    driver.sleep()  # without a cache there is nothing to give up
    assert drive(driver, prompts) == references("qwen3", prompts)
    assert len(refused) == 2 * len(driver.steps)


def test_without_memory_a_driver_sleeps_on(shared_model, make_driver, prompts, references, monkeypatch):
    driver = make_driver(shared_model("qwen3"), num_blocks=60)
    driver.sleep()

    def fail(held):
        raise CacheMemoryError("cuda:0 has no room for 29.30 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(memory._StorageMemory, "take_back", fail)
        for use in (driver.wake, functools.partial(drive, driver, prompts), driver.warmup):
            with pytest.raises(
                CacheMemoryError, match=r"no room for 29.30 GiB\. The driver still sleeps: free"
            ):
                use()
            assert not driver._engine.batcher.held_bytes
    assert drive(driver, prompts) == references("qwen3", prompts)


def test_a_cache_that_sleeps_gives_way_to_a_larger_one(check_drive, prompts):
    driver = check_drive("qwen3", prompts[:2], 3)
    driver.sleep()
    small = driver._engine
    check_drive("qwen3", prompts, driver=driver)
    assert driver._engine.size.num_blocks > small.size.num_blocks
    driver.sleep()
    large = driver._engine
    check_drive("qwen3", prompts[:2], 3, driver=driver)
    assert driver._engine is large


# On a GPU


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_fp32")
@pytest.mark.parametrize(
    "settings",
    [
        {"compile_mode": "cuda_graph", "fusion": "layers"},
        {"compile_mode": "cuda_graph", "allow_block_sharing": True},
        {"compile_mode": "reduce_overhead"},
        {"compile_mode": "eager", "fusion": "projections"},
    ],
    ids=str,
)
def test_graphs_find_the_cache_again(new_model, make_driver, prompts, greedy, settings):
    """A gibibyte of cache; what lies at its addresses meanwhile is nobody's."""
    model = new_model("qwen3", head_dim=16).cuda()
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    num_blocks = 2**30 // (8 * 2 * 2 * 2 * 16 * 4)
    driver = make_driver(model, num_blocks=num_blocks, max_requests_per_batch=8, **settings)
    assert drive(driver, prompts) == expected
    address, stats = cache_of(driver).cache_tensor.data_ptr(), driver.compile_stats
    after = []
    for cycle in range(20):
        poison(driver)
        awake = free_bytes()
        driver.sleep()
        assert free_bytes() - awake > 0.99 * 2**30
        trainers = torch.full((2**28,), math.nan, device="cuda")
        del trainers
        if cycle % 2:
            driver.wake()
            check_cache_at_rest(driver)
            assert not cache_of(driver).cache_tensor.any()
        assert drive(driver, prompts) == expected
        assert cache_of(driver).cache_tensor.data_ptr() == address
        after.append((free_bytes(), torch.cuda.memory_allocated()))
    free, allocated = zip(*after[2:], strict=True)
    assert max(free) - min(free) <= 2**21
    assert max(allocated) - min(allocated) <= 2**20
    for name in ("graphs", "recompiles", "programs"):
        assert driver.compile_stats[name] == stats[name]


@pytest.mark.gpu
def test_a_full_gpu_lets_nobody_wake(new_model, make_driver, prompts):
    model = new_model("qwen3").cuda()
    num_blocks = 2**31 // (8 * 2 * 2 * 2 * 8 * 4)
    driver = make_driver(model, num_blocks=num_blocks, max_requests_per_batch=4, compile_mode="cuda_graph")
    expected = drive(driver, prompts)
    driver.sleep()
    trainers = torch.empty(free_bytes() - 2**30, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        with pytest.raises(CacheMemoryError, match=r"has no room for 2.\d+ GiB.* The driver still sleeps"):
            driver.wake()
    del trainers  # PyTorch keeps it, until it is asked
    assert drive(driver, prompts) == expected
