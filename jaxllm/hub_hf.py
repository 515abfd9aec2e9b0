"""Models named `hf:owner/repo/path/file.gguf`, through huggingface_hub and its cache.

The library asks again and again where there is no network, for half a minute. So it is seen first
whether the hub can be reached at all; where not, what the cache has is taken.
"""

import re
import socket
from contextlib import suppress
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from jaxllm.errors import HubError

_SPLIT_NAME = re.compile(r"-00001-of-(\d{5})\.gguf$")
_PATIENCE = 3.0  # seconds for the hub to answer


def fetch_hf(spec: str) -> Path:
    """The path of the file, or of the first of those that it is split into; HubError."""
    owner, _, rest = spec.removeprefix("hf:").partition("/")
    repo, _, file = rest.partition("/")
    if not (owner and repo and file.endswith(".gguf")):
        raise HubError(f"{spec!r} does not have the form hf:owner/repo/path/file.gguf.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(
            f"{spec!r} needs the huggingface_hub package: run pip install 'jaxllm[hub]'."
        ) from error
    files = [file]
    if match := _SPLIT_NAME.search(file):
        count = int(match[1])
        stem = file[: match.start()]
        files = [f"{stem}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    get, name = huggingface_hub.hf_hub_download, f"{owner}/{repo}"
    away = not _reachable(huggingface_hub.constants.ENDPOINT)
    try:
        paths = [get(name, each, local_files_only=away) for each in files]
    except Exception as error:  # The library raises its own, requests' and the system's errors.
        if away:
            raise HubError(
                f"cannot fetch {spec!r}: its hub cannot be reached, and the file was not fetched"
                " before; check the network, or pass a local .gguf file with -m path."
            ) from error
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise HubError(
            f"cannot fetch {spec!r} ({reason}): check the name and the network."
        ) from error
    return Path(paths[0])


def _reachable(url: str) -> bool:
    """Whether the host of an address takes connections; one behind a proxy is held to do so."""
    parts = urlsplit(url)
    if getproxies().keys() & {parts.scheme, "all"}:
        return True
    address = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    answered: list[bool] = []

    def connect() -> None:
        with suppress(OSError), socket.create_connection(address, _PATIENCE):
            answered.append(True)

    # In a thread, for looking up a name may take long and knows no time limit.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(answered)
