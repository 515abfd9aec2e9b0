"""Mixtures of experts whose file contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm import ModelError
from parity import OTHERWISE, load_model


def test_layers_that_contradict_their_metadata(shared: Path):
    with pytest.raises(ModelError, match="layer 2 has experts"):
        load_model(OTHERWISE[0])
