"""Text of a stream of tokens, cut at the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.text import StreamDecoder


class StopFilter:
    """Turns tokens into text and holds back what may be the beginning of a stop text."""

    def __init__(self, decoder: StreamDecoder | None, stop: Sequence[str]):
        self.decoder, self.stop = decoder, stop
        self.stopped = False
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain once `token` has come."""
        return self._emit(self.decoder.push(token)) if self.decoder else ""

    def flush(self) -> str:
        """What is left at the end."""
        if self.decoder is None or self.stopped:
            return ""
        text = self._emit(self.decoder.flush())
        rest = "" if self.stopped else self._held
        self._held = ""
        return text + rest

    def _emit(self, text: str) -> str:
        text = self._held + text
        found = [at for at in map(text.find, self.stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(
            (n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
