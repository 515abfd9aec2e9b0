"""Devices on paper and devices that JAX has."""

import os
import subprocess
import sys

import pytest

from sharding import DeviceInfo, DoesNotFit, Mesh, ShardingError, axis
from sharding.axes import AXES
from sharding.errors import PlanError


def in_new_process(code: str, **env: str) -> str:
    drop = ("JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS", "JAX_PLATFORMS")
    clean = {k: v for k, v in os.environ.items() if k not in drop}
    clean["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    run = subprocess.run(
        [sys.executable, "-c", code], env=clean | env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_virtual_mesh():
    mesh = Mesh.virtual(3, free=5, kind="x")
    assert len(mesh) == 3
    assert mesh.alike
    assert [d.label for d in mesh.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert mesh.jax_devices is None
    assert mesh == Mesh.virtual(3, free=5, kind="x")
    assert hash(mesh) == hash(Mesh.virtual(3, free=5, kind="x"))


def test_unlike_devices():
    assert not Mesh((DeviceInfo("a", kind="big"), DeviceInfo("b", kind="small"))).alike
    assert not Mesh((DeviceInfo("a", "gpu"), DeviceInfo("b", "cpu"))).alike
    assert Mesh((DeviceInfo("a" * 40, free=1), DeviceInfo("b" * 40, free=2))).alike


@pytest.mark.parametrize("n", [0, -1, True, 1.0])
def test_a_mesh_needs_devices(n):
    with pytest.raises(ShardingError):
        Mesh.virtual(n)
    with pytest.raises(ShardingError):
        Mesh(())
    with pytest.raises(ShardingError):
        Mesh(Mesh.virtual(2).devices, ("one",))


def test_a_mesh_of_jax_devices():
    import jax

    there = jax.devices()
    mesh = Mesh.from_jax()
    assert mesh.jax_devices == tuple(there)
    assert Mesh.from_jax(1).jax_devices == (there[0],)
    assert Mesh.from_jax([there[-1]]).devices[0].platform == there[-1].platform
    with pytest.raises(ShardingError, match=f"JAX has {len(there)}"):
        Mesh.from_jax(len(there) + 1)
    with pytest.raises(ShardingError, match="twice"):
        Mesh.from_jax([there[0], there[0]])
    with pytest.raises(ShardingError):
        Mesh.from_jax(0)
    with pytest.raises(ShardingError):
        Mesh.from_jax([])


def test_plans_need_no_jax():
    code = (
        "import sys; from sharding import *\n"
        "m = ModelShape((LayerShape(2, 1, 8, 8, 64),), 16, 8)\n"
        "str(make_plan(m, Mesh.virtual(2), PlanOptions(split_mode='tensor')))\n"
        "print('jax' in sys.modules, any(n.startswith('jaxllm') for n in sys.modules))"
    )
    assert in_new_process(code) == "False False"


def test_devices_are_made_before_the_backend_starts_and_asked_for_after():
    code = (
        "import os, jax; from sharding import *\n"
        "ensure_devices(1); assert 'NPROC' not in os.environ\n"
        "assert not backend_started()\n"
        "ensure_devices(3); assert os.environ['NPROC'] == '16'\n"
        "assert not backend_started()\n"
        "print(len(jax.devices())); assert backend_started()\n"
        "ensure_devices(2)\n"
        "try: ensure_devices(4)\n"
        "except ShardingError as e: print(e)\n"
    )
    count, message = in_new_process(code, JAX_PLATFORMS="cpu").splitlines()
    assert count == "3"
    assert "JAX_NUM_CPU_DEVICES" in message
    assert "started with 3" in message


def test_a_count_of_devices_in_xla_flags_is_respected():
    code = (
        "import jax; from sharding import *\n"
        "ensure_devices(2)\n"
        "try: ensure_devices(4)\n"
        "except ShardingError as e: print('XLA_FLAGS' in str(e))\n"
        "print(len(jax.devices()))"
    )
    flags = "--xla_force_host_platform_device_count=3"
    assert in_new_process(code, JAX_PLATFORMS="cpu", XLA_FLAGS=flags) == "True\n3"


def test_axes_are_declared():
    assert axis("kv_group").follows == "attn"
    assert axis("mlp").follows == "weight"
    assert axis("vocab").follows == "weight"
    for name in ("embed", "head_rows", "head_dim", "pair", "rope"):
        assert not axis(name).split
    assert all(name == a.name for name, a in AXES.items())
    with pytest.raises(PlanError, match="'heads' is not declared"):
        axis("heads")


def test_does_not_fit_keeps_its_figures():
    import pickle

    error = pickle.loads(pickle.dumps(DoesNotFit("gpu:1", 10, 3)))
    assert (error.device, error.needed, error.free) == ("gpu:1", 10, 3)
    assert "gpu:1 needs 10 bytes and has 3 free" in str(error)
