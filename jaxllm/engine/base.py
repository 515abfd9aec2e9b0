"""What generation asks of an engine, whatever the plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np

from jaxllm.engine.local import NO_TOKEN, Top
from jaxllm.engine.rows import LayerRow
from jaxllm.engine.states import StateEnds, StateRow
from jaxllm.models.layers import Array
from sharding import DoesNotFit, Plan
from sharding.memory import free_frames, memory_of

Logits = np.ndarray | Top  # float32 [N, V], or the largest of each row
Hidden = Any  # an engine's own form of hidden states


Method = TypeVar("Method", bound=Callable[..., Any])


def frees_on_failure(method: Method) -> Method:
    """A method of an engine that raises `DoesNotFit` where a device runs out of memory, with what
    it has made freed. Who called it is to `recover` the engine, as after any other failure."""

    @wraps(method)
    def run(self: Engine, *args: Any, **kw: Any) -> Any:
        self.at_work = None
        try:
            with memory_of(self.plan, lambda: self.at_work):
                return method(self, *args, **kw)
        except DoesNotFit as error:
            refused = error.bare()
        free_frames()
        raise refused

    return run  # type: ignore[return-value]


class Engine(ABC):
    """Runs steps over the rows of a batch and keeps their cache.

    A step is either one row with a chunk of T tokens or all rows with one token each. The caller
    knows how long every row is; an engine keeps no count of its own.

        begin     release (empty), or reuse (with the beginning of a row); encode, with an encoder
        steps     forward, logits, settle
        end       release (forgotten), or park (kept, for reuse, read_row and unpark)
    """

    plan: Plan
    runs_ahead: bool = False  # whether `greedy` is worth starting before its tokens are known
    greedy_steps: int = 1  # that are worth asking for at a time
    ends: StateEnds
    at_work: int | None = None  # the device that a program was last given to, where that is known

    def encode(self, tokens: np.ndarray, row: int, used: int) -> None:
        """Run a model's encoder over tokens int32 [1, T], those past the first `used` padding. The
        decoder's steps of the row attend to what it gives until the row is released."""
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        tokens: np.ndarray,
        row: int,
        starts: np.ndarray,
        used: int | None = None,
        features: Array | None = None,
        keep: bool = False,
    ) -> Hidden:
        """tokens int32 [N, T] at positions starts[n] .. starts[n] + T of rows row .. row + N.
        Tokens past the first `used` are padding; of several rows, one with start -1 takes no part
        and keeps its cache. features [N, T, D] come with the tokens of a draft
        (`jaxllm.models.nextn`). With `keep` a step of one row may be taken back in part. Returns
        the hidden states for `logits`."""

    @abstractmethod
    def take_back(self, row: int, length: int, count: int) -> None:
        """After a step with `keep`, not settled yet, let its row have `length` positions, the first
        `count` of that step's among them."""

    @abstractmethod
    def logits(self, hidden: Hidden, at: np.ndarray, top: int) -> Logits:
        """Logits after tokens at [N, J] of the step's chunk: float32 [N J, V], or with `top` > 0
        the largest only."""

    @abstractmethod
    def features(self, hidden: Hidden) -> Array:
        """What the head reads of hidden states [N, T, D], for a draft."""

    def greedy(self, tokens: Any, starts: np.ndarray, steps: int = 1) -> tuple[Any, Any]:
        """Steps of all rows, one or `greedy_steps`, from tokens int32 [rows] at positions starts
        [rows], each with the likeliest tokens of the one before: those of all [steps, rows], for
        `read`, and of the last, NO_TOKEN where logits are not numbers. Where `runs_ahead`, it
        returns before they are known, and the last may be given to the next call while they still
        are not."""
        hidden = self.forward(np.asarray(tokens)[:, None], 0, starts)
        best = self.logits(hidden, np.zeros((len(starts), 1), np.int32), 1)
        self.settle(0, starts + 1)
        ids = likeliest(best)
        return ids[None], ids

    def read(self, ids: Any) -> np.ndarray:
        """The tokens [steps, rows] that `greedy` gave, once they are known."""
        return np.asarray(ids)

    def settle(self, row: int, ends: np.ndarray) -> None:  # noqa: B027 (nothing to do is fine)
        """After a step: rows row .. row + N now end at ends[n]."""

    def rehearse(self, chunk: int) -> Iterator[int]:
        """For warm-up with steps of `chunk` tokens a row: put row 0 into each state that makes
        `forward` use other programs; the position to run at."""
        yield 0

    @abstractmethod
    def release(self, row: int) -> None:
        """Forget a row's cache."""

    def park(self, row: int) -> None:  # noqa: B027 (nothing to do is fine)
        """Keep a row's cache, and take no part in steps: its sequence has ended, or rests."""

    def unpark(self, row: int) -> None:  # noqa: B027 (nothing to do is fine)
        """Let a row go on that was parked, or not."""

    @frees_on_failure
    def wait(self, hidden: Hidden) -> None:
        """Return when the step that gave these hidden states is done."""
        jax.block_until_ready(hidden)

    @abstractmethod
    def holds(self, row: int, length: int) -> bool:
        """Whether a row still has all that the query at position `length` sees; it had as many
        positions at least. A recurrent state is that of the row's end alone."""

    def ends_at(self, row: int, length: int) -> bool:
        """Whether a row's recurrent states, where the model has any, are those after `length`
        positions."""
        return self.ends.at(row, length)

    @abstractmethod
    def reuse(self, source: int, row: int, length: int) -> None:
        """Begin a row with the first `length` positions of `source`, which holds them; it may be
        the row itself. `length` is a multiple of page and ubatch."""

    @abstractmethod
    def read_row(self, row: int, length: int) -> list[LayerRow]:
        """The cache of every layer of a row with `length` positions, all heads of the model in
        their order: all positions, or with a window those that the row still has."""

    @abstractmethod
    def read_states(self, row: int) -> list[StateRow]:
        """The recurrent states of a row, all groups of the model in their order."""

    @abstractmethod
    def write_row(
        self, row: int, layers: Sequence[LayerRow], length: int, states: Sequence[StateRow] = ()
    ) -> None:
        """Let a row hold what `read_row` and `read_states` told, under this or another plan."""

    @abstractmethod
    def weights(self) -> list[Array]:
        """The arrays that hold the weights, wherever they are."""

    def link_bytes(self) -> list[int]:
        """Bytes sent from host memory to each device so far."""
        return []

    def recover(self) -> bool:
        """After anything that failed or was interrupted: give up what it has begun. Its rows are to
        be released; all of them, if the answer is that their cache was lost with it."""
        return False


def merge_logits(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows [N, J, rows] of several devices side by side: [N J, V]."""
    whole = np.concatenate(parts, axis=-1)
    return whole.reshape(-1, whole.shape[-1])


def merge_top(parts: Sequence[Top], top: int) -> Top:
    """The largest of several devices' parts, what is no number first, ties to the lower id."""
    values = merge_logits([p.values for p in parts])
    ids = merge_logits([p.ids for p in parts])
    order = np.lexsort((ids, -np.where(np.isnan(values), np.inf, values)), axis=1)[:, :top]
    lse = None
    if top > 1:
        with np.errstate(invalid="ignore"):
            lse = np.logaddexp.reduce([np.ravel(p.lse) for p in parts], axis=0)
    take = np.take_along_axis
    return Top(take(values, order, axis=1), take(ids, order, axis=1), lse)


def likeliest(best: Logits) -> np.ndarray:
    """The tokens [N] of what `logits` gave as the largest, NO_TOKEN where that is no number."""
    assert isinstance(best, Top)
    return np.where(np.isfinite(best.values[:, 0]), best.ids[:, 0], NO_TOKEN)
