"""`LLM`: a model, its plan and its engine behind one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from os import PathLike
from threading import Lock
from typing import Any, cast

import numpy as np

from jaxllm import hub, session
from jaxllm.arguments import check_switch, is_prompt, path_of, sampling_params
from jaxllm.engine.base import Engine
from jaxllm.engine.build import PlannedModel, build_engine
from jaxllm.engine.drafting import DraftingEngine
from jaxllm.engine.forward import empty_cache, pure_step
from jaxllm.engine.fused import FusedEngine
from jaxllm.engine.generate import Request, generate
from jaxllm.engine.prefill import LOGIT_PLACES, encode, places, prefill
from jaxllm.engine.prefixes import Held, Rows
from jaxllm.engine.quantising import type_named, types_of
from jaxllm.engine.sampling import SamplingParams
from jaxllm.engine.stopping import StopFilter
from jaxllm.engine.warmup import warm_up
from jaxllm.errors import OptionError, PromptError, SessionError
from jaxllm.gguf.reader import open_gguf
from jaxllm.models.block import Block
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.layers import Device
from jaxllm.models.sources import GGUFSource, RandomSource
from jaxllm.models.weights import Progress, Source, slots
from jaxllm.planning import check_names, plan_config, plan_gguf
from jaxllm.prompts import Ids, Prompt, Prompts
from jaxllm.results import Completion, Piece, StepFn
from jaxllm.runtime import keep_compiled_programs
from jaxllm.text import StreamDecoder, Tokenizer, load_tokenizer
from sharding import Mesh, Plan, ensure_devices
from sharding.memory import memory_of

Devices = int | Sequence[Device] | None


class LLM:
    """A language model spread over devices by a plan.

    Make one with `LLM.from_gguf` or `LLM.from_config`. Arguments of both, named as llama.cpp's
    options where it has them:

        devices       a number, a list of jax devices of any platforms, or None: all of the default
        split_mode    "none", "layer" or "tensor" (-sm); "layer" for several devices
        tensor_split  a share a device for the weights (-ts), as "3,1" or (3, 1)
        attn_split    a share a device for attention heads and their cache (-as); as tensor_split
        kv            "device", or "host": the cache in host memory, streamed (-nkvo)
        kv_gpu_layers    of a host cache, layers that stay on the devices (-kvgl)
        kv_gpu_layers_draft  the same of a draft's cache (-kvgld)
        kv_device_bytes  of a host cache, bytes that stay on each device (2**30, "1.5G"), or "auto"
        kv_pinned     of a host cache, whether it is in pinned memory (default: where there is)
        recurrent_state  "device", or "host": where states of recurrent layers are between steps
        link_gbps     1e9 bytes a second from host memory to each device, as "24.2,3.3"
        cache_type_k, cache_type_v   "f32", "f16", "bf16", "q8_0" or "q4_0" (-ctk, -ctv)
        kv_rotate     rotate what a quantised cache stores; see `sharding.PlanOptions`
        dtype         of weights and activations: "float32", "bfloat16" or "float16"
        weights       "dequantised" to dtype, or "quantised": as the file has them (or as
                      random_type says), if it can be
        impl          of attention: "jnp", or "kernel", the default on Hopper GPUs
        ctx           positions a sequence may have (-c)
        parallel      sequences that run at once (-np); more prompts wait for a free one
        ubatch        tokens of a prefill chunk, a power of two (-ub)
        batch         tokens of prompts that are computed, in whole chunks, between two steps of
                      sequences that run (-b)
        engine        "auto", "fused" or "staged"
        prefix_cache  keep what rows hold, so that a prompt that begins alike computes only the
                      rest; changes no bit of a result
        spec_type     "none", or "draft-mtp": the layer that predicts tokens ahead drafts tokens of
                      greedy requests, which are verified several at a time; no result changes
        spec_draft_n_max  tokens drafted at a time (default 3)
        fit           choose split, shares, place and type of the cache, ubatch and prefetch by a
                      cost model, from this machine's measured rates; see docs/fit.md
        page, group_pages, prefetch  positions of a page, pages of a copy, copies in flight
        tail_pages    full pages that leave a device together; fewer stay there
        rounding, dither, kv_replicate   how heads are cut; see `sharding.PlanOptions`
    """

    def __init__(
        self,
        model: PlannedModel,
        source: Source,
        tokenizer: Tokenizer | None,
        progress: Progress | None = None,
        place: Callable[..., Any] | None = None,
        prefix_cache: bool = True,
    ):
        self.model, self.tokenizer = model, tokenizer
        self._idle = Lock()
        options = model.plan.options
        # What a row holds of a decoder is of no use to a prompt that the encoder reads.
        keep = prefix_cache and not model.whole.cfg.encoder
        self._rows = Rows(options.slots, max(options.page, options.ubatch), keep)
        self.engine: Engine = build_engine(model, source, progress, place)
        self._origin = session.Origin(model.whole.cfg, model.block, source.digest())

    @classmethod
    def from_gguf(
        cls,
        path: str | PathLike[str],
        *,
        devices: Devices = None,
        progress: bool = True,
        prefix_cache: bool = True,
        **arguments: Any,
    ) -> LLM:
        """Load a GGUF file: a path, `hf:owner/repo/file.gguf`, or a name from `jaxllm models`."""
        from jaxllm.progress import loading

        path_of(path)
        check_names(arguments, ("path", "devices", "prefix_cache"))
        check_switch("prefix_cache", prefix_cache)
        keep_compiled_programs()
        mesh = open_mesh(devices)
        file = open_gguf(hub.resolve(str(path), progress=progress))
        model = plan_gguf(file, mesh, progress=progress, **arguments)
        with loading(model.plan, show=progress) as report:
            source = GGUFSource(file, model.whole.cfg)
            tokenizer = load_tokenizer(file)
            return cls(model, source, tokenizer, report, prefix_cache=prefix_cache)

    @classmethod
    def from_config(
        cls,
        cfg: ModelConfig,
        *,
        block: type[Block] = DecoderBlock,
        devices: Devices = None,
        seed: int = 0,
        random_type: str | None = None,
        place: Callable[..., Any] | None = None,
        prefix_cache: bool = True,
        **arguments: Any,
    ) -> LLM:
        """A model of random weights, the same under every plan; prompts are token ids.

        random_type, "Q4_K" say, makes all matrices random blocks of a type that a file may have, as
        a quantiser would; they are held so with weights="quantised".
        place(device, layer, first position) -> "device", "pinned" or "pageable" puts each full
        page of a staged engine somewhere of its own.
        """
        check_names(arguments, ("block", "devices", "seed", "random_type", "place", "prefix_cache"))
        check_switch("prefix_cache", prefix_cache)
        stored = None if random_type is None else type_named(random_type)
        mesh = open_mesh(devices)
        model = plan_config(block, cfg, mesh, stored=stored, **arguments)
        types = {} if stored is None else types_of(slots(model.whole), stored)
        source = RandomSource(model.whole.cfg, seed, stored=types)
        return cls(model, source, None, place=place, prefix_cache=prefix_cache)

    @property
    def plan(self) -> Plan:
        """Which device holds what; prints as a table."""
        return self.model.plan

    @property
    def config(self) -> ModelConfig:
        """The model's sizes (with KV heads repeated where the plan replicates them)."""
        return self.model.whole.cfg

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """A completion for every prompt, in their order. A prompt is text or token ids; where the
        model has an encoder that reads it, and the decoder begins with `config.start`."""
        many = cast(Sequence[Prompt], [prompts] if is_prompt(prompts) else prompts)
        params = sampling_params(params)
        requests = [self._prompts.request(i, p, params) for i, p in enumerate(many)]
        filters = [StopFilter(self._decoder(), params.stop) for _ in requests]
        texts = ["" for _ in requests]
        done: dict[int, Completion] = {}
        sent = self.engine.link_bytes()
        for request, token in self._run(requests):
            i = request.index
            if token is None:
                texts[i] += filters[i].flush()
                done[i] = self._completion(request, texts[i], filters[i], sent)
                continue
            texts[i] += filters[i].push(token)
            request.cancelled = filters[i].stopped
        return [done[i] for i in range(len(requests))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Text as it comes, never part of a character nor of a stop text; the last piece has the
        finish reason and the whole `Completion`. Closing the iterator ends the request."""
        params = sampling_params(params)
        request = self._prompts.request(0, prompt, params)
        return self._pieces(request, StopFilter(self._decoder(), params.stop))

    def _pieces(self, request: Request, filtered: StopFilter) -> Iterator[Piece]:
        held: list[int] = []
        whole = ""
        sent = self.engine.link_bytes()
        for _, token in self._run([request]):
            if token is None:
                text = filtered.flush()
                done = self._completion(request, whole + text, filtered, sent)
                yield Piece(text, tuple(held), done.finish_reason, done)
                return
            held.append(token)
            text = filtered.push(token)
            whole += text
            request.cancelled = filtered.stopped
            if text:
                yield Piece(text, tuple(held))
                held = []

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Completion:
        """The answer to a conversation, by the model's own chat template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation, ready for the answer."""
        if self.tokenizer is None:
            raise PromptError("the model has no tokenizer, so no chat; give token ids to generate")
        return self.tokenizer.encode_chat(messages)

    def logits(self, ids: Ids | Sequence[Ids], decoder_input_ids: Any = None) -> Any:
        """float32 [T, V]: row t is the logits after token t. A list of lists gives a list. Takes an
        empty row or, where there is none, that of the sequence that finished longest ago.

        The encoder of a model that has one reads `ids`, and rows are those of the decoder's tokens:
        `decoder_input_ids`, a list for each of several prompts, or by default `config.start` alone.
        """
        if is_prompt(ids) or len(ids) == 0:
            blocks = self.logit_blocks(cast(Ids, ids), decoder_input_ids=decoder_input_ids)
            return np.concatenate(list(blocks))
        many = [None] * len(ids) if decoder_input_ids is None else decoder_input_ids
        if len(many) != len(ids):
            raise PromptError(
                f"there are {len(many)} lists of decoder_input_ids for {len(ids)} prompts; give "
                "each its own"
            )
        return [self.logits(a, b) for a, b in zip(cast(Sequence[Ids], ids), many, strict=True)]

    def logit_blocks(
        self, ids: Ids, first: int = 0, decoder_input_ids: Ids | None = None
    ) -> Iterator[np.ndarray]:
        """The rows of `logits` from token `first` on, float32 [n, V] at a time: those of a long
        text may take more memory than there is."""
        source, prompt = self._prompts.inputs(ids, decoder_input_ids)
        before, ubatch = 0, self.plan.options.ubatch
        with self._engine_to_itself(), self._spare_row() as row:
            if source:
                encode(self.engine, row, source, ubatch)
            for hidden, used, size in prefill(self.engine, row, prompt, ubatch):
                for at in places(size, used):
                    skip = max(0, first - before - int(at[0]))
                    if skip < min(len(at), used - int(at[0])):
                        rows = cast(np.ndarray, self.engine.logits(hidden, at[None], 0))
                        yield rows[skip : used - int(at[0])]
                before += used

    def draft_logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [T, V]: row t is the draft's logits after token t, of the token at t + 2 where
        those of `logits` are of t + 1. For a model loaded with spec_type "draft-mtp"."""
        prompt, engine, found = self._prompts.ids(ids), self._drafting(), []
        with self._engine_to_itself(), self._spare_row() as row:
            for hidden, used, size in prefill(engine, row, prompt, self.plan.options.ubatch):
                for at in places(size, used):
                    rows = engine.draft.logits(hidden.draft, at[None], 0)
                    found.append(cast(np.ndarray, rows)[: used - int(at[0])])
        return np.concatenate(found)

    def _drafting(self) -> DraftingEngine:
        if not isinstance(self.engine, DraftingEngine):
            raise OptionError('there is no draft; load the model with spec_type="draft-mtp"')
        return self.engine

    def warmup(self) -> None:
        """Compile every program that prompts and batches of any length up to the context need."""
        self.forget()
        with self._engine_to_itself():
            warm_up(self.engine, self.plan, LOGIT_PLACES)

    def forget(self) -> None:
        """Drop what rows keep of finished sequences, and the memory that full pages take."""
        with self._engine_to_itself():
            self._empty_rows()

    def _empty_rows(self) -> None:
        for row in self._rows.holding():
            self._rows.forget(row)
            self.engine.release(row)

    def save_session(self, path: str | PathLike[str]) -> None:
        """Write the sequence that finished last, its tokens and its cache, to a file for
        `load_session`, under this or any other plan of the model with the same cache types."""
        self._prompts.check_no_encoder("a session")
        with self._engine_to_itself():
            latest = self._rows.latest()
            if latest is None:
                raise SessionError(
                    "there is no session to save: no row holds a finished sequence; generate "
                    "first, without prefix_cache=False"
                )
            row, held = latest
            if self.config.stateful:
                held = self._rewind(row, held)
            layers = self.engine.read_row(row, held.cached)
            whole = session.Session(held, layers, self.engine.read_states(row))
            session.save(path_of(path), self._origin, whole)

    def _rewind(self, row: int, held: Held) -> Held:
        """Let a row of a model with recurrent layers hold the longest part of its sequence that a
        prompt may go on from: states are of one position alone, so it is computed anew."""
        length = held.cached // self._rows.step * self._rows.step or held.cached
        self._rows.forget(row)
        self.engine.release(row)
        for _ in prefill(self.engine, row, held.tokens[:length], self.plan.options.ubatch):
            pass
        self.engine.park(row)
        held = replace(held, cached=length, prefilled=length)
        self._rows.hold(row, held)
        return held

    def load_session(self, path: str | PathLike[str]) -> list[int]:
        """Put the sequence of a file into a row, as if it had just finished there; returns its
        token ids. A prompt that begins with them goes on from it."""
        self._prompts.check_no_encoder("a session")
        if not self._rows.keep:
            raise OptionError("a session needs prefix_cache=True to be of use; load the model so")
        found = session.load(path_of(path), self._origin, self.plan.options.ctx)
        with self._engine_to_itself(), self._spare_row(keep=True) as row:
            self.engine.write_row(row, found.layers, found.held.cached, found.states)
            self.engine.park(row)
            self._rows.hold(row, found.held)
        return list(found.held.tokens)

    def step_fn(self) -> StepFn:
        """A pure step (fn, params, cache) for use inside jax.jit and scan.

        fn(params, cache, tokens [B, T], starts [B]) -> (logits float32 [B, T, V], cache) runs all
        `parallel` rows; B and T of int32 tokens may be any as long as start mod ubatch + T stays
        within ubatch and start + T within the context; a row's logits are NaN where they do not,
        and where one of its tokens is outside the vocabulary. The cache given is an empty one of
        its own. One device, fused engine.
        """
        self._prompts.check_no_encoder("step_fn")
        engine = self.engine
        if not isinstance(engine, FusedEngine) or engine.mesh is not None:
            raise OptionError(
                "step_fn needs the fused engine on one device; load the model with devices=1, and "
                'with cache and recurrent states on it (kv="device", recurrent_state="device")'
            )
        fn = pure_step(engine.model, self.plan.options.ctx, self.plan.options.ubatch)
        with memory_of(self.plan):
            return StepFn(fn, engine.leaves, empty_cache(self.plan, engine.model, engine.same))

    def _run(self, requests: list[Request]) -> Iterator[tuple[Request, int | None]]:
        with self._engine_to_itself():
            yield from generate(self.engine, requests, self._rows, self.plan.options)

    @contextmanager
    def _engine_to_itself(self) -> Iterator[None]:
        """Rows belong to one call at a time: two would write over each other's cache."""
        if not self._idle.acquire(blocking=False):
            raise OptionError(
                "this model is in the middle of another call; finish or close that stream first, "
                "or give all prompts to one generate call"
            )
        try:
            yield
        except (Exception, KeyboardInterrupt):
            # What was donated to a step is gone, if its result is not there or not yet kept.
            with memory_of(self.plan):
                lost = self.engine.recover()
            if lost:
                self._empty_rows()
            raise
        finally:
            self._idle.release()

    @contextmanager
    def _spare_row(self, keep: bool = False) -> Iterator[int]:
        """An empty row, made so if there is none; empty again at the end, or after an error."""
        row = self._rows.spare(range(self.plan.options.slots))
        self._rows.forget(row)
        self.engine.release(row)
        done = False
        try:
            yield row
            done = True
        finally:
            if not (keep and done):
                self.engine.release(row)

    @property
    def _prompts(self) -> Prompts:
        return Prompts(self.config, self.tokenizer, self.plan.options)

    def _decoder(self) -> StreamDecoder | None:
        whole = self.config.encoder > 0
        return StreamDecoder(self.tokenizer, whole=whole) if self.tokenizer else None

    def _completion(
        self, request: Request, text: str, filtered: StopFilter, sent: list[int]
    ) -> Completion:
        labels = [d.label for d in self.plan.mesh.devices]
        now = zip(labels, sent, self.engine.link_bytes(), strict=False)
        return Completion.of(request, text, filtered.stopped, {n: b - a for n, a, b in now})


def open_mesh(devices: Devices) -> Mesh:
    """The mesh of `devices`; starts JAX's backend, with virtual CPU devices where it must."""
    if isinstance(devices, Integral):
        ensure_devices(int(devices) if not isinstance(devices, bool) else devices)
    return Mesh.from_jax(devices)
