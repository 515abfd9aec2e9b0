"""From logits to a token, one request at a time, in llama.cpp's order of samplers.

penalties -> top-k -> top-p -> min-p -> temperature -> draw. Numbers are numpy float64 on the host;
the devices have already reduced the vocabulary to the largest logits where the settings allow it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np

from jaxllm.engine.base import Logits
from jaxllm.engine.local import Top
from jaxllm.errors import ModelError, OptionError

NO_NUMBERS = "the model's logits are not numbers; its file may be damaged"

TOPS = (1, 64)  # numbers of largest logits that programs exist for; 0 asks for all


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. Defaults are llama.cpp's.

    temperature 0 is greedy. logprobs None: not kept; n: of the token and of the n most likely ones,
    before any sampler. stop: texts that end the completion and are not part of it.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40  # 0: all
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens that penalties look at; -1: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) for s in stop):
            raise OptionError(f"stop must be a text or a list of texts, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        for name, low, high in (
            ("max_tokens", 1, math.inf),
            ("top_k", 0, math.inf),
            ("repeat_last_n", -1, math.inf),
            ("logprobs", 0, TOPS[-1]),
            ("seed", 0, math.inf),
        ):
            self._check(name, int, low, high, optional=name in ("logprobs", "seed"))
        for name, low, high in (
            ("temperature", 0, math.inf),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repeat_penalty", 0, math.inf),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
        ):
            self._check(name, float, low, high)
        if self.repeat_penalty <= 0:
            raise OptionError(f"repeat_penalty must be above 0, not {self.repeat_penalty}")
        if not all(self.stop):
            raise OptionError("a stop text must not be empty")

    def _check(
        self,
        name: str,
        kind: type[int] | type[float],
        low: float,
        high: float,
        optional: bool = False,
    ) -> None:
        given = getattr(self, name)
        if given is None and optional:
            return
        kinds = Integral if kind is int else Real  # numpy's numbers are of these kinds, too
        value = None
        if isinstance(given, kinds) and not isinstance(given, bool):
            with suppress(OverflowError):
                value = kind(given)  # pyright: ignore[reportArgumentType]
        if value is None or not math.isfinite(value):
            what = "a whole number" if kind is int else "a finite number"
            raise OptionError(f"{name} must be {what}, not {given!r}")
        if not low <= value <= high:
            until = "" if high == math.inf else f" and at most {high}"
            raise OptionError(f"{name} must be at least {low}{until}, not {given}")
        object.__setattr__(self, name, value)

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        changed = self.repeat_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(changed) and self.repeat_last_n != 0

    @property
    def plainly_greedy(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        return self.temperature == 0 and not self.penalised and self.logprobs is None

    @property
    def top(self) -> int:
        """The smallest of `TOPS` that holds all that this request can look at, 0 if none does."""
        need = 1 if self.temperature == 0 else self.top_k
        if self.penalised or need == 0:
            return 0
        if self.logprobs is not None:
            need = max(need, self.logprobs, 2)
        return next((top for top in TOPS if top >= need), 0)


@dataclass(frozen=True)
class Logprob:
    """Natural log probability of a token, and of the most likely tokens at that place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def common_top(requests: Sequence[SamplingParams]) -> int:
    """One reduction that serves all of these."""
    tops = [r.top for r in requests]
    return 0 if 0 in tops else max(tops)


class Sampler:
    """Draws the tokens of one request; holds its generator and what penalties look at."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]):
        self.params = params
        self.history = list(prompt)
        self.random = np.random.default_rng(params.seed)

    def next(self, logits: Logits, row: int) -> tuple[int, Logprob | None]:
        """The next token of row `row` of a step's logits."""
        if isinstance(logits, Top):
            values, ids = logits.values[row].astype(np.float64), logits.ids[row]
            lse = 0.0 if logits.lse is None else float(logits.lse[row])
        else:
            whole = logits[row].astype(np.float64)
            lse = float(np.logaddexp.reduce(whole)) if self.params.logprobs is not None else 0.0
            values, ids = _sorted(self._penalise(whole), self._enough())
        if not np.isfinite(values[:1]).all():
            raise ModelError(NO_NUMBERS)
        token = int(ids[self._draw(values)])
        self.history.append(token)
        return token, self._logprob(logits, row, token, lse)

    def _enough(self) -> int:
        return 1 if self.params.temperature == 0 else self.params.top_k

    def _penalise(self, logits: np.ndarray) -> np.ndarray:
        p = self.params
        if not p.penalised:
            return logits
        logits = logits.copy()
        recent = self.history if p.repeat_last_n < 0 else self.history[-p.repeat_last_n :]
        for token, count in Counter(recent).items():
            value = logits[token]
            value = value * p.repeat_penalty if value <= 0 else value / p.repeat_penalty
            logits[token] = value - count * p.frequency_penalty - p.presence_penalty
        return logits

    def _draw(self, values: np.ndarray) -> int:
        """An index into values, which are sorted from large to small."""
        p = self.params
        if p.temperature == 0:
            return 0
        if p.top_k:
            values = values[: p.top_k]
        if p.top_p < 1:
            mass = np.cumsum(_softmax(values))
            values = values[: int(np.searchsorted(mass, p.top_p)) + 1]
        if p.min_p > 0:
            values = values[values >= values[0] + math.log(p.min_p)]
        with np.errstate(over="ignore"):  # at the least temperatures all others are infinitely far
            mass = np.cumsum(_softmax((values - values[0]) / p.temperature))
        return min(int(np.searchsorted(mass, self.random.random(), side="right")), len(values) - 1)

    def _logprob(self, logits: Logits, row: int, token: int, lse: float) -> Logprob | None:
        count = self.params.logprobs
        if count is None:
            return None
        if isinstance(logits, Top):
            values, ids = logits.values[row], logits.ids[row]
            own = float(values[int(np.flatnonzero(ids == token)[0])])
        else:
            own = float(logits[row][token])
            values, ids = _sorted(logits[row], count) if count else (np.zeros(0), np.zeros(0))
        top = tuple(
            (int(i), float(v) - lse) for i, v in zip(ids[:count], values[:count], strict=True)
        )
        return Logprob(token, own - lse, top)


def _sorted(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest (0: all) from large to small, ties to the lower id, and their ids."""
    ids = np.arange(len(values))
    if 0 < count < len(values):
        edge = np.partition(values, -count)[-count]
        ids = np.flatnonzero(values >= edge)
    ids = ids[np.argsort(-values[ids], kind="stable")]
    ids = ids[:count] if count else ids
    return values[ids], ids


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values[0])
    return weights / weights.sum()
