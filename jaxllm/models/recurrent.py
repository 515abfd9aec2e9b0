"""What a recurrent layer is made of and what it keeps of a sequence in place of a KV cache.

A state belongs to groups of heads: each device has those of its own groups. Every kind of layer
says the arrays that one group keeps, all float32; they are zeros before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

Shapes = tuple[tuple[int, ...], ...]


class Recurrent(Protocol):
    """A kind of recurrent layer: its groups, and the shapes of what each keeps.

    Where it is `summed`, something is made of the channels of all groups before their memories can
    go on: devices sum their parts of it.
    """

    summed: ClassVar[bool]

    @property
    def groups(self) -> int: ...

    @property
    def state_shapes(self) -> Shapes: ...

    @property
    def work(self) -> int:
        """Float32 values that a token of a chunk takes in a group while the layer runs."""
        ...


def state_bytes(recurrent: Recurrent) -> int:
    """Of the state of one group of one sequence."""
    return 4 * sum(map(prod, recurrent.state_shapes))


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (Yang et al. 2024): see `jaxllm.models.delta`.

    A group is one key head, which is also a query head, with the value heads that read it. The
    value heads of a group stand together in tensors, or are `groups` apart where they are `tiled`.
    """

    summed: ClassVar[bool] = False

    groups: int
    v_heads: int  # of a group
    dim: int  # of a key, a query and a value
    kernel: int  # tokens that the convolution sees
    tiled: bool
    joined: bool  # both rates are one tensor ssm_ba

    @property
    def channels(self) -> int:
        """Of the convolution, of a group: query, key and values."""
        return (2 + self.v_heads) * self.dim

    @property
    def state_shapes(self) -> Shapes:
        """The last inputs of the convolution, and each value head's memory [key, value]."""
        return (self.kernel - 1, self.channels), (self.v_heads, self.dim, self.dim)

    @property
    def work(self) -> int:
        return 4 * self.channels + self.v_heads * (6 * self.dim + 4 * CHUNK)


CHUNK = 64  # tokens that a memory takes in at once
SHORT_CHUNK = 16  # where not all of it fades alike


@dataclass(frozen=True)
class KimiDelta:
    """Kimi delta attention: see `jaxllm.models.delta`. A group is one head, whose memory forgets
    each key at a rate of its own.

    `decay` and `gate` are the tensors that make decays and the output's gate, a narrow one for all
    heads before that of each head, or that alone.
    """

    summed: ClassVar[bool] = False

    groups: int
    dim: int  # of a key, a query and a value
    kernel: int  # tokens that the convolutions see
    decay: tuple[str, ...]
    gate: tuple[str, ...]
    floor: float | None = None  # of the log decays, where a sigmoid spreads them from zero to it
    sign: int = 1  # of what is stored as the rate before that sigmoid

    @property
    def state_shapes(self) -> Shapes:
        """The last inputs of the convolutions, and the memory [key, value]."""
        return (self.kernel - 1, 3 * self.dim), (1, self.dim, self.dim)

    @property
    def work(self) -> int:
        """Decays stand between each two tokens of a chunk."""
        return (24 + 3 * SHORT_CHUNK) * self.dim


@dataclass(frozen=True)
class Lightning:
    """Lightning attention: see `jaxllm.models.lightning`. A group is one head."""

    summed: ClassVar[bool] = False

    groups: int
    dim: int  # of a key, a query and a value

    @property
    def state_shapes(self) -> Shapes:
        """The memory [key, value]."""
        return ((1, self.dim, self.dim),)

    @property
    def work(self) -> int:
        return 16 * self.dim + 4 * CHUNK


@dataclass(frozen=True)
class Mamba2:
    """Mamba 2: see `jaxllm.models.mamba2`. A group is some heads with the key and query that they
    share, and with a norm of its own."""

    summed: ClassVar[bool] = False

    groups: int
    heads: int  # of a group
    dim: int  # of a head's values
    keys: int  # values of a key and of a query
    kernel: int  # tokens that the convolution sees
    normed: bool

    @property
    def channels(self) -> int:
        """Of the convolution, of a group: values, key and query."""
        return self.heads * self.dim + 2 * self.keys

    @property
    def state_shapes(self) -> Shapes:
        """The last inputs of the convolution, and each head's memory [key, value]."""
        return (self.kernel - 1, self.channels), (self.heads, self.keys, self.dim)

    @property
    def work(self) -> int:
        return 4 * self.channels + self.heads * (4 * self.dim + 2 * self.keys + 4 * CHUNK)


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution over groups of channels: see `jaxllm.models.short_conv`."""

    summed: ClassVar[bool] = False

    groups: int
    channels: int  # of a group
    kernel: int

    @property
    def state_shapes(self) -> Shapes:
        """The last inputs of the convolution."""
        return ((self.kernel - 1, self.channels),)

    @property
    def work(self) -> int:
        return 6 * self.channels


@dataclass(frozen=True)
class TimeMix:
    """The first half of an RWKV 6 layer: see `jaxllm.models.time_mix`. A group is one head, whose
    memory forgets each key at a rate of its own."""

    summed: ClassVar[bool] = False

    groups: int
    dim: int  # of a key, a query and a value
    rank: int  # values that each mixture with the token before is made of
    decay_rank: int  # values that decays are made of

    @property
    def state_shapes(self) -> Shapes:
        """What the layer read last, and the memory [key, value]."""
        return (1, self.groups * self.dim), (1, self.dim, self.dim)

    @property
    def work(self) -> int:
        """Decays stand between each two tokens of a chunk; the mixtures are counted with each."""
        return (24 + 3 * SHORT_CHUNK) * self.dim + 5 * self.dim


@dataclass(frozen=True)
class ChannelMix:
    """The second half of an RWKV 6 layer: see `jaxllm.models.time_mix`. A group is some columns of
    an MLP."""

    summed: ClassVar[bool] = False

    groups: int
    columns: int  # of a group
    embed: int

    @property
    def state_shapes(self) -> Shapes:
        """What the layer read last."""
        return ((1, self.embed),)

    @property
    def work(self) -> int:
        return 2 * self.columns


@dataclass(frozen=True)
class Selective:
    """Mamba 1 and the heads of PLaMo 2: see `jaxllm.models.selective`. A group is some channels;
    its keys, queries and steps are made of the channels of all groups.

    A channel of Mamba 1 has a step of its own and a rate of fading a key. Those of a head share
    one step and one rate; then a group is a head.
    """

    summed: ClassVar[bool] = True

    groups: int
    channels: int  # of a group
    keys: int  # values of a key and of a query
    rank: int  # values that steps are made of
    kernel: int  # tokens that the convolution sees
    heads: bool
    conv_bias: bool
    normed: bool  # keys, queries and what steps are made of, each
    weighted: bool  # those norms have weights

    @property
    def state_shapes(self) -> Shapes:
        """The last inputs of the convolution, and the memory [key, channel]."""
        return (self.kernel - 1, self.channels), (self.keys, self.channels)

    @property
    def work(self) -> int:
        """What is made of the channels of all groups is counted with each, and the memories that
        stand side by side as if a chunk had 512 tokens."""
        beside = 4 * CHUNK if self.heads else self.keys * self.channels * 4 * SHORT_CHUNK // 512
        return 8 * self.channels + 2 * self.keys + self.rank + beside
