"""A digest of a file's weights that does not read them all: it tells models of one shape apart."""

from __future__ import annotations

import hashlib

from jaxllm.gguf.reader import GGUFFile, read_bytes

RUNS, RUN_BYTES = 4, 4096


def weights_digest(file: GGUFFile) -> str:
    """A hex digest of the name, type, shape and sampled bytes of every tensor, the same however
    they are ordered or spread over parts.

    Of a tensor of more than RUNS * RUN_BYTES bytes RUNS runs count, from its beginning to its end
    in equal distances; a smaller one counts whole. So the norms of a model do, and a file that was
    trained further or quantised otherwise differs, but for changes of a few values in between.

    Raises:
        GGUFError: where the file cannot be read.
    """
    found = hashlib.sha256()
    for name, info in sorted(file.tensors.items()):
        found.update(f"{name} {info.type.name} {info.shape} ".encode())
        for start, stop in _runs(info.nbytes):
            found.update(read_bytes(info, start, stop).data)
    return found.hexdigest()


def _runs(nbytes: int) -> list[tuple[int, int]]:
    """The ranges that count of a tensor of so many bytes."""
    if nbytes <= RUNS * RUN_BYTES:
        return [(0, nbytes)]
    starts = ((nbytes - RUN_BYTES) * i // (RUNS - 1) for i in range(RUNS))
    return [(start, start + RUN_BYTES) for start in starts]
