"""Random models of many architectures, written as GGUF files from small specs."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from jaxllm.runtime import cache_root

_BESIDE = Path(__file__).resolve().parents[2] / "shared"
SHARED = _BESIDE if (_BESIDE / "archs").is_dir() else None
