"""A model and its draft in step: two engines whose rows hold the same tokens at the same positions.

    target    the model's layers, as without a draft
    draft     the layer that predicts tokens ahead (`jaxllm.models.nextn`), its cache a context of
              its own

At position p the draft reads the token there and the target's features of p - 1. So the features
of each row's newest position wait for the token after them; a row begins with zeros. Every step of
the target is one of the draft, which then reads what is true; what it writes while it predicts
tokens ahead is written over by that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.base import Engine, Hidden, Logits, likeliest
from jaxllm.engine.rows import LayerRow
from jaxllm.engine.states import StateEnds, StateRow
from jaxllm.errors import SessionError
from jaxllm.models.layers import Array
from sharding import Plan


class Both(NamedTuple):
    """Hidden states of a step of the target and of the draft."""

    target: Hidden
    draft: Hidden


@partial(jax.jit, donate_argnames=("waiting",))
def _shift(
    waiting: Array, features: Array, row: Array, starts: Array, counts: Array
) -> tuple[Array, Array]:
    """Features [N, T, D] of a step, each a position later, with those [slots, D] that waited for
    its first tokens; and what waits after the first counts [N] of them."""
    before = jax.lax.dynamic_slice_in_dim(waiting, row, len(starts))
    before = before.astype(features.dtype)
    begun = jnp.where((starts == 0)[:, None], jnp.zeros((), before.dtype), before)
    shifted = jnp.concatenate([begun[:, None], features[:, :-1]], axis=1)
    newest = jnp.take_along_axis(features, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    after = jnp.where((counts > 0)[:, None], newest, before).astype(waiting.dtype)
    return shifted, jax.lax.dynamic_update_slice_in_dim(waiting, after, row, 0)


class DraftingEngine(Engine):
    """See the module's docstring; `Engine` says what the methods mean, for both together."""

    def __init__(self, plan: Plan, target: Engine, draft: Engine, dtype: str):
        self.plan, self.target, self.draft = plan, target, draft
        self.dtype = dtype
        self.count = plan.options.spec_draft_n_max  # tokens that are drafted at once, at most
        self.ends = StateEnds(plan.options.slots, stateful=True)  # what features wait for
        self.waiting = self._nothing()

    def _nothing(self) -> Array:
        return jnp.zeros((self.plan.options.slots, self.plan.model.embed), self.dtype)

    def forward(
        self,
        tokens: np.ndarray,
        row: int,
        starts: np.ndarray,
        used: int | None = None,
        features: Array | None = None,
        keep: bool = False,
    ) -> Both:
        hidden = self.target.forward(tokens, row, starts, used, features, keep)
        return Both(hidden, self.follow(tokens, row, starts, used, hidden))

    def take_back(self, row: int, length: int, count: int) -> None:
        self.target.take_back(row, length, count)

    def follow(
        self, tokens: np.ndarray, row: int, starts: np.ndarray, used: int | None, hidden: Hidden
    ) -> Hidden:
        """The draft's step after the target's, whose hidden states these are."""
        count = tokens.shape[1] if used is None else used
        counts = np.where(starts < 0, 0, count).astype(np.int32)
        features = self.target.features(hidden)
        rows = np.int32(row), starts.astype(np.int32), counts
        shifted, self.waiting = _shift(self.waiting, features, *rows)
        self.ends.advance(row, starts, count)
        return self.draft.forward(tokens, row, starts, used, shifted)

    def ahead(self, tokens: np.ndarray, starts: np.ndarray) -> Iterator[tuple[Hidden, np.ndarray]]:
        """The draft's hidden states and likeliest tokens [rows], one step after another, each of
        the tokens of the one before. The first is of tokens int32 [rows] at positions starts
        [rows] (-1 for a row that takes no part), which the target has not seen yet."""
        features, at = self.waiting[:, None], np.zeros((len(starts), 1), np.int32)
        while True:
            hidden = self.draft.forward(tokens[:, None], 0, starts, features=features)
            tokens = likeliest(self.draft.logits(hidden, at, 1))
            yield hidden, tokens
            features = self.draft.features(hidden)
            starts = np.where(starts < 0, starts, starts + 1)

    def advance(self, tokens: np.ndarray, starts: np.ndarray, most: np.ndarray) -> list[list[int]]:
        """The next tokens of each row, as if each were the likeliest after the one before: tokens
        int32 [rows] at positions starts [rows] are the newest, -1 for a row that takes no part. At
        most so many of them as `most` [rows] says are drafted, and one more comes from the target.

        Where a row's chunk would cross a multiple of ubatch or leave the context, nothing is
        drafted.
        """
        options, count = self.plan.options, self.count
        fits = (starts % options.ubatch + count < options.ubatch) & (starts + count < options.ctx)
        drafting = (most > 0) & (starts >= 0) & fits
        plain = np.where(drafting, -1, starts)
        found: list[list[int]] = [[] for _ in starts]
        if (plain >= 0).any():
            tokens_of = self.read(self.greedy(tokens, plain)[0])[0]
            for row in np.flatnonzero(plain >= 0):
                found[row] = [int(tokens_of[row])]
        if drafting.any():
            chain = self.ahead(tokens, np.where(drafting, starts, -1))
            drafts = np.stack([tokens, *(ids for _, ids in islice(chain, count))], axis=1)
            for row in np.flatnonzero(drafting).tolist():
                used = 1 + min(count, int(most[row]))
                found[row] = self._verify(row, drafts[row : row + 1], starts[row : row + 1], used)
        return found

    def _verify(self, row: int, drafts: np.ndarray, starts: np.ndarray, used: int) -> list[int]:
        """What the target says after the newest token and each draft [1, T] of which the first
        `used` count, up to the first of which it says another; the row then ends there."""
        drafts = drafts.astype(np.int32)
        hidden = self.target.forward(drafts, row, starts, used, keep=True)
        places = np.arange(drafts.shape[1], dtype=np.int32)[None]
        said = likeliest(self.target.logits(hidden, places, 1))
        wrong = np.flatnonzero(drafts[0, 1:used] != said[: used - 1])
        count = 1 + int(wrong[0]) if len(wrong) else used
        ends = starts + count
        if count < used and self.target.ends.stateful:
            self.target.take_back(row, int(ends[0]), count)
        self.follow(drafts, row, starts, count, hidden)
        self.settle(row, ends)
        return said[:count].tolist()

    def logits(self, hidden: Both, at: np.ndarray, top: int) -> Logits:
        return self.target.logits(hidden.target, at, top)

    def features(self, hidden: Both) -> Array:
        return self.target.features(hidden.target)

    def settle(self, row: int, ends: np.ndarray) -> None:
        self.target.settle(row, ends)
        self.draft.settle(row, ends)

    def rehearse(self, chunk: int) -> Iterator[int]:
        for engine in (self.target, self.draft):
            for position in engine.rehearse(chunk):
                yield position
                if chunk == 1 and self.count:
                    self._rehearse(position)

    def _rehearse(self, position: int) -> None:
        """Draft, verify and take back in row 0."""
        slots, ubatch = self.plan.options.slots, self.plan.options.ubatch
        tokens, starts = np.zeros(slots, np.int32), np.full(slots, position, np.int32)
        for _ in islice(self.ahead(tokens, starts), 2):
            pass
        starts = starts[:1] // ubatch * ubatch
        self._verify(0, np.zeros((1, self.count + 1), np.int32), starts, 1)
        if self.target.ends.stateful:
            self.target.take_back(0, int(starts[0]) + 1, 1)

    def release(self, row: int) -> None:
        self.target.release(row)
        self.draft.release(row)
        self.ends.set(row, 0)

    def park(self, row: int) -> None:
        self.target.park(row)
        self.draft.park(row)

    def unpark(self, row: int) -> None:
        self.target.unpark(row)
        self.draft.unpark(row)

    def holds(self, row: int, length: int) -> bool:
        both = self.target.holds(row, length) and self.draft.holds(row, length)
        return both and self.ends_at(row, length)

    def reuse(self, source: int, row: int, length: int) -> None:
        self.target.reuse(source, row, length)
        self.draft.reuse(source, row, length)
        self.waiting = self.waiting.at[row].set(self.waiting[source])
        self.ends.copy(source, row)

    def read_row(self, row: int, length: int) -> list[LayerRow]:
        raise SessionError(
            "a session does not hold what a draft needs; load the model with spec_type "
            "(--spec-type) none"
        )

    def read_states(self, row: int) -> list[StateRow]:
        return self.target.read_states(row)

    def write_row(
        self, row: int, layers: Sequence[LayerRow], length: int, states: Sequence[StateRow] = ()
    ) -> None:
        self.read_row(row, length)

    def weights(self) -> list[Array]:
        arrays = [*self.target.weights(), *self.draft.weights()]  # the ends are of both
        return list({id(array): array for array in arrays}.values())

    def link_bytes(self) -> list[int]:
        both = zip(self.target.link_bytes(), self.draft.link_bytes(), strict=True)
        return [sum(pair) for pair in both]

    def recover(self) -> bool:
        lost = [self.target.recover(), self.draft.recover(), self.waiting.is_deleted()]
        if lost[2]:  # donated to what failed
            self.waiting = self._nothing()
        return any(lost)
