"""Errors that a user of the package may meet.

Each message is one sentence that holds the offending value and says what to do about it.
"""

LONGEST = 60  # characters of a value in a message


def shown(value: object) -> str:
    """A value that others wrote, as a message repeats it."""
    return cut(repr(value))


def cut(text: str) -> str:
    """Text on one line, its end left out where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class JaxllmError(Exception):
    """Base of every error this package raises on bad input."""


class GGUFError(JaxllmError):
    """A file is missing, damaged, or not a GGUF this package reads."""


class ModelError(JaxllmError):
    """A model that is not supported, or whose metadata or tensors contradict each other."""


class TokenizerError(JaxllmError):
    """A vocabulary or chat template that is missing, damaged or of an unknown kind."""


class HubError(JaxllmError):
    """A model that is not known, or could not be fetched or stored."""


class PromptError(JaxllmError):
    """A prompt that is empty or does not fit the context."""


class SessionError(JaxllmError):
    """A session file that cannot be written or read, or does not fit the model."""


class OptionError(JaxllmError):
    """An option whose value is out of range or contradicts another option."""
