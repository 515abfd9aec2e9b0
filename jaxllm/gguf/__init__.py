"""Reading GGUF files: header, metadata, raw rows, and their values as float32."""

from jaxllm.gguf.dequant import dequantize_rows, iter_row_chunks, supported
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.reader import GGUFFile, TensorInfo, open_gguf, read_rows

__all__ = [
    "GGUFFile",
    "Metadata",
    "TensorInfo",
    "dequantize_rows",
    "iter_row_chunks",
    "open_gguf",
    "read_rows",
    "supported",
]
