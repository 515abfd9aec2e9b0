"""Text to token ids and back, and chat templates."""

from jaxllm.text.chat import render
from jaxllm.text.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer", "render"]
