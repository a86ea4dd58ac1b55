"""Memory that can be given up for a while and comes back where it was, so that captured graphs stay valid."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor

from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.sizing import format_gib
from cbexp.engine.types import CacheMemoryError, EngineError

# Of cuda.h: CUresult, CUmemAllocationType, CUmemLocationType, CUmemAccess_flags, CUmemAllocationGranularity_flags.
CUDA_ERROR_OUT_OF_MEMORY = 2
ALLOCATION_TYPE_PINNED = 1
LOCATION_TYPE_DEVICE = 1
ACCESS_READ_WRITE = 3
GRANULARITY_MINIMUM = 0


class ReleasableMemory(Protocol):
    """A range of `num_bytes` on a device, held from its construction on; freed with the last tensor on it.

    Either call is harmless when nothing is to be done, and waits for the device.
    """

    num_bytes: int

    @property
    def is_held(self) -> bool:
        """Whether it is there, to be read and written."""

    def as_tensor(self) -> Tensor:
        """All of it, uint8 [num_bytes]; it must be held now. While it is given up, nothing may touch the tensor."""

    def give_up(self) -> None:
        """Let others have the memory. What is in it is lost."""

    def take_back(self) -> None:
        """Have memory again, with anything in it: on CUDA at the same address, elsewhere where tensors find it.

        Raises `CacheMemoryError` when the device has none; nothing is changed then.
        """


def allocate(num_bytes: int, device: torch.device) -> ReleasableMemory:
    """Memory on `device`, with anything in it; raises `CacheMemoryError` when the device has none."""
    return _MappedMemory(num_bytes, device) if device.type == "cuda" else _StorageMemory(num_bytes, device)


# Of all CUDA devices by index: PyTorch's own figures do not know of this memory.
_held_bytes: Counter[int] = Counter()
_peak_bytes: Counter[int] = Counter()


def held_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that are held now, beside those that PyTorch has."""
    return _held_bytes[_index(device)]


def peak_held_bytes(device: torch.device) -> int:
    """The most that `held_bytes` has been since `reset_peak`."""
    return _peak_bytes[_index(device)]


def reset_peak(device: torch.device) -> None:
    """Begin anew with the peak of a CUDA device."""
    _peak_bytes[_index(device)] = held_bytes(device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class _StorageMemory:
    """A storage that is emptied: tensors on it keep it, and find the new bytes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._storage = torch.UntypedStorage(0, device=device)
        self.take_back()

    @property
    def is_held(self) -> bool:
        return self._storage.nbytes() > 0

    def as_tensor(self) -> Tensor:
        tensor = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return tensor.set_(self._storage, 0, (self.num_bytes,), (1,))

    def give_up(self) -> None:
        self._storage.resize_(0)

    def take_back(self) -> None:
        if self.is_held:
            return
        try:
            self._storage.resize_(self.num_bytes)
        except RuntimeError as error:
            raise CacheMemoryError(
                f"{self._storage.device} has no room for {format_gib(self.num_bytes)} ({error})."
            ) from error


class _Location(Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationProperties(Structure):
    """CUmemAllocationProp, with its inner struct of flags spread out, which needs no padding."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", _Location),
        ("win32_handle_meta_data", c_void_p),
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


# The driver's functions that are called, all of which return a CUresult. Addresses and handles are 64 bits wide.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_AllocationProperties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class _DriverError(EngineError):
    """A call of the CUDA driver failed; `code` is its CUresult."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed with {_error_name(code)} ({code}).")
        self.code = code


@functools.cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = _ARGUMENTS[name], c_int
    return function


def _call(name: str, *arguments: Any) -> None:
    code = _function(name)(*arguments)
    if code != 0:
        raise _DriverError(name, code)


def _error_name(code: int) -> str:
    name = c_char_p()
    _function("cuGetErrorName")(code, byref(name))
    return "an unknown error" if name.value is None else name.value.decode()


class _MappedMemory:
    """Addresses that are reserved for good, with memory of the device behind them while it is held.

    PyTorch takes it for a tensor's, and keeps it as long as there is one (`__cuda_array_interface__`).
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = torch.device("cuda", _index(device))
        self._address = self._size = 0
        self.is_held = False
        location = _Location(LOCATION_TYPE_DEVICE, self._device.index)
        self._properties = _AllocationProperties(type=ALLOCATION_TYPE_PINNED, location=location)
        self._access = _Access(location, ACCESS_READ_WRITE)
        page, address = c_size_t(), c_uint64()
        with self._at_rest():
            _call("cuMemGetAllocationGranularity", byref(page), byref(self._properties), GRANULARITY_MINIMUM)
            self._size = math.ceil(num_bytes / page.value) * page.value
            _call("cuMemAddressReserve", byref(address), self._size, 0, 0, 0)
            self._address = address.value
        self.take_back()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def as_tensor(self) -> Tensor:
        tensor = torch.as_tensor(self, device=self._device)
        assert tensor.data_ptr() == self._address, "a copy"
        return tensor

    def give_up(self) -> None:
        if not self.is_held:
            return
        with self._at_rest():
            _call("cuMemUnmap", self._address, self._size)
            self.is_held = False
            _held_bytes[self._device.index] -= self._size

    def take_back(self) -> None:
        if self.is_held:
            return
        with self._at_rest():
            handle = self._create()
            try:
                _call("cuMemMap", self._address, self._size, 0, handle, 0)
            finally:
                _call("cuMemRelease", handle)  # the mapping alone keeps the memory from here on
            try:
                _call("cuMemSetAccess", self._address, self._size, byref(self._access), 1)
            except EngineError:
                _call("cuMemUnmap", self._address, self._size)
                raise
            self.is_held = True
            index = self._device.index
            _held_bytes[index] += self._size
            _peak_bytes[index] = max(_peak_bytes[index], _held_bytes[index])

    def _create(self) -> c_uint64:
        """A handle of the memory. PyTorch gives back what it keeps unused if there is not enough without."""
        handle = c_uint64()
        arguments = byref(handle), self._size, byref(self._properties), 0
        try:
            _call("cuMemCreate", *arguments)
        except _DriverError as error:
            if error.code != CUDA_ERROR_OUT_OF_MEMORY:
                raise
            torch.cuda.empty_cache()
            try:
                _call("cuMemCreate", *arguments)
            except _DriverError as again:
                free_bytes, _ = torch.cuda.mem_get_info(self._device)
                raise CacheMemoryError(
                    f"{self._device} has no room for {format_gib(self._size)}, since {format_gib(free_bytes)} are "
                    f"free. {again}"
                ) from again
        return handle

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Wait for all that the device was given to do. In the body its context is this thread's, and Ctrl-C waits."""
        with deferring_interrupts(), torch.cuda.device(self._device):
            torch.cuda.synchronize()
            yield

    # Bound here: at the interpreter's end the module's names may be gone.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._address and not is_finalizing():
            self.give_up()
            _call("cuMemAddressFree", self._address, self._size)
