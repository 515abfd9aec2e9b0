"""Host memory that a device's weights are read into."""

from __future__ import annotations

import math
import mmap
from threading import Lock

import numpy as np

from jaxllm.models.layers import Device

ALIGNMENT = 64  # bytes; the CPU backend takes such an array over without a copy
HUGE_PAGE = 2 << 20


class Arena:
    """Zeroed arrays of one device's weights.

    On a CPU device the arrays are the weights themselves and lie in one mapping that the kernel
    may back with huge pages: a decode step reads all of it, and looks up far fewer addresses.
    Elsewhere each array only waits to be copied and is freed on its own.
    """

    def __init__(self, target: Device, nbytes: int, arrays: int):
        self._lock, self._next = Lock(), 0
        self._room: np.ndarray | None = None
        size = nbytes + arrays * ALIGNMENT
        if target.platform == "cpu" and size > HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
            mapping.madvise(mmap.MADV_HUGEPAGE)
            room = np.frombuffer(mapping, np.uint8)
            self._room = room[-room.ctypes.data % HUGE_PAGE :]

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of zeros; from any thread."""
        size = math.prod(shape) * dtype.itemsize
        if self._room is None:
            raw = np.zeros(size + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
        else:
            raw = self._room
            with self._lock:
                start = self._next
                self._next += -(-size // ALIGNMENT) * ALIGNMENT
        return raw[start : start + size].view(dtype).reshape(shape)
