"""Perplexity of a text, and how far its token probabilities are from another run's.

llama.cpp's method: the tokens are cut into chunks of `ctx`, the first token of each is replaced by
BOS where the vocabulary begins texts with one, each chunk is run from an empty cache, and the
tokens of its second half are scored, all of which have at least ctx / 2 earlier ones.

    nll    mean of -log p(token) over the tokens scored
    value  exp(nll)
    error  value * sqrt(var(nll) / (n - 1)), of n tokens scored; infinite for one

A base run (a file of `jaxllm.probabilities`) holds the log-probabilities of the whole vocabulary at
every token scored, so that a later run of the same text can be compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.errors import ModelError, OptionError, PromptError
from jaxllm.probabilities import BaseReader, BaseWriter

if TYPE_CHECKING:
    from jaxllm.llm import LLM

DEFAULT_CTX = 512
LEAST_CTX = 4


@dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence of a base run from this one, over the tokens scored, in nats;
    `top1` is the part of them for which both hold the same token likeliest."""

    mean: float
    error: float
    maximum: float
    top1: float
    base_value: float


@dataclass(frozen=True)
class Perplexity:
    """See the module's docstring; `chunk_nll` has one mean a chunk."""

    value: float
    error: float
    nll: float
    scored: int
    ctx: int
    chunk_nll: tuple[float, ...]
    divergence: Divergence | None = None

    def __str__(self) -> str:
        chunks, tokens = _counted(len(self.chunk_nll), "chunk"), _counted(self.scored, "token")
        lines = [f"perplexity {self.figure} over {chunks} of {self.ctx}, {tokens} scored"]
        if self.divergence is not None:
            other = self.divergence
            lines.append(
                f"base run: perplexity {other.base_value:.4f}, KL divergence mean"
                f" {other.mean:.6g}{_spread(other.error, '.2g')}, most {other.maximum:.6g}, same"
                f" likeliest token {100 * other.top1:.2f} %"
            )
        return "\n".join(lines)

    @property
    def figure(self) -> str:
        """Value and error in words."""
        return f"{self.value:.4f}{_spread(self.error, '.4f')}"


def _spread(error: float, form: str) -> str:
    return f" +- {error:{form}}" if math.isfinite(error) else ""


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


Report = Callable[[Perplexity], None]  # is told the value so far after every chunk


def perplexity(
    llm: LLM,
    ids: Sequence[int],
    ctx: int = DEFAULT_CTX,
    *,
    chunks: int | None = None,
    save_base: str | PathLike[str] | None = None,
    base: str | PathLike[str] | None = None,
    report: Report | None = None,
) -> Perplexity:
    """The perplexity of a text given as token ids; `llm` has a context of `ctx` at least.

    Args:
        chunks: how many to run at most; None for all whole ones.
        save_base: write a base run to this file: 4 bytes for each token scored and each of the
            vocabulary.
        base: compare with the base run of this file.

    Raises:
        OptionError: for a chunk that does not fit, no whole chunk, and a base of another text.
        ModelError: for a model without a causal mask, which sees what it would be asked for, and
            for one with an encoder.
    """
    if llm.config.encoder:
        raise ModelError(
            f"{llm.config.architecture} has an encoder, and a text has no parts for it and for the "
            "decoder; give a model without"
        )
    if not llm.config.causal:
        raise ModelError(
            f"{llm.config.architecture} has no causal mask and sees the tokens that it would be "
            "asked for; give a model that has one"
        )
    cut = _cut(llm, ids, ctx, chunks)
    seen = _Sums(ctx)
    writer = reader = None
    if base is not None:
        reader = BaseReader(Path(base), cut, llm.config.vocab)
        seen.base = _BaseSums()
    if save_base is not None:
        writer = BaseWriter(Path(save_base), cut, llm.config.vocab)
    try:
        for number, chunk in enumerate(cut):
            for first, logp in _scored(llm, chunk):
                following = chunk[first + 1 : first + 1 + len(logp)]
                seen.add(logp, following)
                if writer is not None:
                    writer.add(logp)
                if reader is not None and seen.base is not None:
                    seen.base.add(reader.read(number, first - ctx // 2, len(logp)), logp, following)
            seen.end_chunk()
            if report is not None:
                report(seen.result())
        if writer is not None:
            writer.finish()
    finally:
        if writer is not None:
            writer.close()
    return seen.result()


def check_chunks(ctx: int, chunks: int | None) -> None:
    """OptionError for chunks of too few tokens, and for less than one chunk."""
    if ctx < LEAST_CTX:
        raise OptionError(f"chunks (-c) have {ctx} tokens; they need at least {LEAST_CTX}")
    if chunks is not None and chunks < 1:
        raise OptionError(f"--chunks is {chunks}; it must be at least 1")


def count_chunks(tokens: int, ctx: int, chunks: int | None) -> int:
    """How many chunks a text of so many tokens has, `chunks` at most.

    Raises:
        OptionError: for a size or number out of range, and for none.
    """
    check_chunks(ctx, chunks)
    whole = tokens // ctx
    if not whole:
        raise OptionError(
            f"the text has {tokens} tokens and a chunk (-c) {ctx}; give a longer text or a smaller"
            " chunk"
        )
    return whole if chunks is None else min(whole, chunks)


def _cut(llm: LLM, ids: Sequence[int], ctx: int, chunks: int | None) -> np.ndarray:
    """int32 [chunks, ctx], each beginning with BOS where the vocabulary adds one."""
    if llm.plan.options.ctx < ctx:
        raise OptionError(
            f"chunks have {ctx} tokens and the model's context {llm.plan.options.ctx}; load it with"
            " a larger ctx"
        )
    whole = count_chunks(len(ids), ctx, chunks)
    try:
        cut = np.array(ids[: whole * ctx], np.int32).reshape(whole, ctx)
    except (TypeError, ValueError, OverflowError):
        raise PromptError("a text is a list of token ids (whole numbers)") from None
    tokenizer = llm.tokenizer
    if tokenizer is not None and tokenizer.add_bos and tokenizer.bos is not None:
        cut[:, 0] = tokenizer.bos
    return cut


def _scored(llm: LLM, chunk: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Log-probabilities of what follows the tokens of the second half but the last: (index of the
    first token, float32 [n, V]) in order."""
    at = len(chunk) // 2
    for logits in llm.logit_blocks(chunk[:-1].tolist(), at):
        logp = logits - logits.max(axis=-1, keepdims=True)
        logp -= np.log(np.exp(logp).sum(axis=-1, keepdims=True, dtype=np.float64))
        yield at, logp
        at += len(logits)


def _of(logp: np.ndarray, following: np.ndarray) -> np.ndarray:
    """-log p of the tokens that follow, float64 [n]."""
    return -logp[np.arange(len(following)), following].astype(np.float64)


def _error(values: np.ndarray) -> float:
    """Of the mean of values."""
    return math.sqrt(values.var() / (len(values) - 1)) if len(values) > 1 else math.inf


class _BaseSums:
    """What is compared with a base run."""

    def __init__(self) -> None:
        self._kl: list[np.ndarray] = []
        self._same: list[np.ndarray] = []
        self._nll: list[np.ndarray] = []

    def add(self, base: np.ndarray, logp: np.ndarray, following: np.ndarray) -> None:
        self._kl.append((np.exp(base) * (base - logp)).sum(axis=-1, dtype=np.float64))
        self._same.append(base.argmax(axis=-1) == logp.argmax(axis=-1))
        self._nll.append(_of(base, following))

    def result(self) -> Divergence:
        kl, same, nll = map(np.concatenate, (self._kl, self._same, self._nll))
        return Divergence(
            mean=float(kl.mean()),
            error=_error(kl),
            maximum=float(kl.max()),
            top1=float(same.mean()),
            base_value=float(np.exp(nll.mean())),
        )


class _Sums:
    """What a run has scored so far."""

    def __init__(self, ctx: int) -> None:
        self._ctx = ctx
        self._chunks: list[np.ndarray] = []
        self._open: list[np.ndarray] = []
        self.base: _BaseSums | None = None

    def add(self, logp: np.ndarray, following: np.ndarray) -> None:
        self._open.append(_of(logp, following))

    def end_chunk(self) -> None:
        self._chunks.append(np.concatenate(self._open))
        self._open = []

    def result(self) -> Perplexity:
        nll = np.concatenate(self._chunks)
        if not np.isfinite(nll).all():
            raise PromptError(
                "a token of the text has no probability: the model's logits are not finite there;"
                " try dtype float32"
            )
        value = float(np.exp(nll.mean()))
        return Perplexity(
            value=value,
            error=value * _error(nll),
            nll=float(nll.mean()),
            scored=len(nll),
            ctx=self._ctx,
            chunk_nll=tuple(float(chunk.mean()) for chunk in self._chunks),
            divergence=None if self.base is None else self.base.result(),
        )
