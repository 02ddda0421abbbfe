"""The errors hetspec raises on purpose, each with the exit code of the command line.

A message says what was found and what was expected; the hint says what to do next.
"""

from __future__ import annotations


class HetspecError(Exception):
    """A known failure: one line for the user, plus a hint that names the next step.

    Args:
        message: what was found and what was expected, one line.
        hint: what to do about it, one line; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class InvalidInput(HetspecError):
    """An argument, option or prompt that cannot be used."""

    exit_code = 2


class UnknownSource(HetspecError):
    """A model or tokenizer name that leads nowhere."""


class UnsupportedTokenizer(HetspecError):
    """A tokenizer with a component whose bytes are not understood."""


class UnsupportedModel(HetspecError):
    """A model that cannot be driven losslessly (no croppable cache, encoder-decoder, …)."""


class IncompatiblePair(HetspecError):
    """Two parts that do not belong together."""


class ArtifactNotFound(HetspecError):
    """No pair artifact under that name."""


class InvalidArtifact(HetspecError):
    """A damaged or hostile pair artifact."""

    exit_code = 3


class StaleArtifact(HetspecError):
    """A sound artifact that was built for other tokenizers than the ones at hand."""

    exit_code = 3


class GenerationError(HetspecError):
    """A model misbehaved while decoding (non-finite logits, …)."""
