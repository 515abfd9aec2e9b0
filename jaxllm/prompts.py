"""Prompts of a call, checked against a model and its plan before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.arguments import token_ids
from jaxllm.engine.generate import Request
from jaxllm.engine.sampling import SamplingParams
from jaxllm.errors import ModelError, OptionError, PromptError
from jaxllm.models.config import ModelConfig
from jaxllm.text import Tokenizer
from sharding import PlanOptions

Ids = Sequence[int]
Prompt = str | Ids


@dataclass(frozen=True)
class Prompts:
    """What a model reads; every method raises a `PromptError`, `OptionError` or `ModelError` of one
    sentence for what it cannot."""

    cfg: ModelConfig
    tokenizer: Tokenizer | None
    options: PlanOptions

    def request(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        """A completion to be made, the number-th of its call."""
        if not self.cfg.causal:
            raise ModelError(
                f"{self.cfg.architecture} generates by diffusion, which is not supported; use "
                "llm.logits for those of a prompt"
            )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError("the model has no tokenizer; give the prompt as token ids")
            if not prompt:
                raise PromptError("the prompt is empty; give some text")
            prompt = self.tokenizer.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise OptionError("stop texts need a tokenizer, and the model has none")
        eog = self.tokenizer.eog if self.tokenizer else frozenset()
        source, own = self.inputs(prompt, None)
        return Request(number, own, params, eog, source)

    def inputs(self, ids: Ids, decoder_input_ids: Ids | None) -> tuple[list[int], list[int]]:
        """What the encoder reads, nothing where there is none, and what the decoder does."""
        given, ubatch = self.ids(ids), self.options.ubatch
        if (self.cfg.encoder or not self.cfg.causal) and len(given) > ubatch:
            raise PromptError(
                f"the prompt has {len(given)} tokens and {self.cfg.architecture} reads all in "
                f"one step of at most {ubatch}; raise ubatch (-ub)"
            )
        if self.cfg.encoder:
            begun = [self.cfg.start] if decoder_input_ids is None else decoder_input_ids
            return given, self.ids(begun, "decoder_input_ids")
        if decoder_input_ids is not None:
            raise OptionError(
                f"{self.cfg.architecture} has no encoder; drop decoder_input_ids, and give all "
                "tokens as ids"
            )
        return [], given

    def ids(self, ids: Ids, what: str = "the prompt") -> list[int]:
        """Token ids that are of the vocabulary and fit the context; `what` they are."""
        ids = token_ids(ids)
        ctx, vocab = self.options.ctx, self.cfg.vocab
        if not ids:
            raise PromptError(f"{what} is empty; give at least one token")
        if len(ids) > ctx:
            raise PromptError(
                f"{what} has {len(ids)} tokens and the context {ctx}; raise ctx (-c) or "
                f"shorten {what}"
            )
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise PromptError(f"token id {wrong} is outside the vocabulary of {vocab} tokens")
        return ids

    def check_no_encoder(self, what: str) -> None:
        """Refuse what is of a decoder alone."""
        if self.cfg.encoder:
            raise OptionError(
                f"{what} is of a decoder alone, and {self.cfg.architecture} has an encoder; use "
                "generate, or logits with decoder_input_ids"
            )
