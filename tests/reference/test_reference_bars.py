"""What starting and a step of the default model may take: memory, seconds to the first token, and
the staged engine beside the fused one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2-135m")]
LOAD = """
import sys
from pathlib import Path
import jax, jaxllm.llm
from sharding import ensure_devices

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

split = dict(devices=3, split_mode="tensor", tensor_split="1,1,1", attn_split="2,1,0", kv="host")
ensure_devices(3)
jax.devices()
before = peak()
llm = jaxllm.LLM.from_gguf(sys.argv[1], ctx=64, dtype="float32", progress=False, **split)
print(peak() - before, sum(llm.plan.weight_bytes(i) for i in range(3)))
"""
OWN_SETTINGS = ("JAX_", "XLA_", "NPROC", "PYTHONPATH")  # of this test run, not of a user


def environment(cache: Path) -> dict[str, str]:
    """A newcomer's, with a cache folder of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OWN_SETTINGS)}
    path = os.pathsep.join(p for p in sys.path if p)  # a checkout need not be installed
    return kept | {"JAX_PLATFORMS": "cpu", "JAXLLM_CACHE": str(cache), "PYTHONPATH": path}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_loading_takes_little_more_than_the_slices(smollm2_path: Path, tmp_path: Path):
    command = [sys.executable, "-c", LOAD, str(smollm2_path)]
    done = subprocess.run(command, env=environment(tmp_path), check=True, capture_output=True)
    grown, slices = map(int, done.stdout.split())
    assert grown < 1.3 * max(slices, smollm2_path.stat().st_size)


def test_seconds_to_the_first_token(smollm2_path: Path, tmp_path: Path):
    """On two cores. Where the machine is busy with more than this, both cores' time counts, which
    is the least that it could have taken."""
    command = [sys.executable, "-m", "jaxllm", "generate", "-m", str(smollm2_path), "Hello"]
    for most in (20, 6):  # the second time with compiled programs
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "-n", "1"], env=environment(tmp_path), check=True)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert min(seconds, busy / 2) < most


def test_a_staged_step_beside_a_fused_one(smollm2_path: Path):
    """One device, all of the cache on it; the best of runs that take turns."""
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    rates: dict[str, list[float]] = {"fused": [], "staged": []}
    llms = {
        engine: LLM.from_gguf(
            smollm2_path, devices=1, dtype="float32", ctx=512, engine=engine, progress=False
        )
        for engine in rates
    }
    for _ in range(9):  # the first compiles
        for engine, llm in llms.items():
            (done,) = llm.generate("The capital of France is", params)
            rates[engine].append(done.generation_rate)
    assert max(rates["fused"]) <= 1.5 * max(rates["staged"])
