"""Metadata with the architecture's prefix resolved and types checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from jaxllm.errors import ModelError, shown
from jaxllm.gguf.reader import GGUFFile

T = TypeVar("T")


@dataclass(frozen=True)
class Metadata:
    """`values` under the keys of the file; a key is looked for as `{architecture}.key` first."""

    values: Mapping[str, Any]
    architecture: str

    @classmethod
    def of(cls, file: GGUFFile) -> "Metadata":
        return cls(file.metadata, file.architecture)

    def full_key(self, key: str) -> str:
        """The name under which `key` is stored: with the architecture's prefix, or as it is."""
        prefixed = f"{self.architecture}.{key}"
        return key if key in self.values and prefixed not in self.values else prefixed

    def __contains__(self, key: str) -> bool:
        return self.full_key(key) in self.values

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(self.full_key(key), default)

    @overload
    def require(self, key: str, kind: type[T]) -> T: ...
    @overload
    def require(self, key: str) -> Any: ...
    def require(self, key: str, kind: type[Any] | None = None) -> Any:
        """The value of `key`; ModelError where it is missing or not of type `kind`.

        An int is taken where a float is asked for; a bool is never taken for a number.
        """
        name = self.full_key(key)
        if name not in self.values:
            raise ModelError(
                f"the model's metadata lacks {shown(name)}; convert the model again with a newer "
                "tool."
            )
        value = self.values[name]
        if kind is None or _is(value, kind):
            return float(value) if kind is float else value
        raise ModelError(
            f"the model's metadata {shown(name)} is {shown(value)} of type {type(value).__name__}, "
            f"not {kind.__name__}."
        )

    def per_layer(self, key: str, n_layers: int, default: Any = None) -> tuple[Any, ...]:
        """`n_layers` values from an array with one entry a layer, or a scalar repeated.

        Without the key the default is repeated; without a default that is a ModelError, as is an
        array of another length.
        """
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, np.ndarray | list | tuple):
            return (value,) * n_layers
        if len(value) != n_layers:
            raise ModelError(
                f"the model's metadata {shown(self.full_key(key))} holds {len(value)} values for "
                f"{n_layers} layers."
            )
        return tuple(value.tolist() if isinstance(value, np.ndarray) else value)


def _is(value: Any, kind: type[Any]) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)
