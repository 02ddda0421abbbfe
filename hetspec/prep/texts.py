"""What a text may be used for: decided by the text itself, so that every command treats it alike.

Nothing is judged on a text that something was made from, whichever commands saw the collection before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

STATISTICS, FIT, HELD_OUT, RESERVED = "statistics", "fit", "held_out", "reserved"
# Of ten texts, in the mean: one is left to `predict`, two test fits, two are fitted on, five make statistics.
_ROLES = (RESERVED, HELD_OUT, HELD_OUT, FIT, FIT, *[STATISTICS] * 5)
FEWEST_TEXTS = 100  # below this texts are cut up, so that every role gets some


def role_of(text: str) -> str:
    """The role of a text, by its hash."""
    return _ROLES[int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:4], "big") % 10]


def divided(texts: Sequence[str]) -> list[str]:
    """The texts, cut into about FEWEST_TEXTS blocks where there are fewer."""
    if len(texts) >= FEWEST_TEXTS:
        return list(texts)
    size = max(1, -(-sum(map(len, texts)) // FEWEST_TEXTS))
    return [text[at : at + size] for text in texts for at in range(0, len(text), size)]


def for_calibration(texts: Sequence[str]) -> list[str]:
    """What calibration may see, held-out texts included."""
    return [text for text in divided(texts) if role_of(text) != RESERVED]


def for_making(texts: Sequence[str]) -> list[str]:
    """What kernels and heads may be made from: nothing that is used to test them."""
    return [text for text in divided(texts) if role_of(text) in (STATISTICS, FIT)]


def for_prediction(texts: Sequence[str]) -> list[str]:
    """What no other command sees; whole texts, or all of them if there are too few to set any aside."""
    return (
        [text for text in texts if role_of(text) == RESERVED] if len(texts) >= FEWEST_TEXTS else list(texts)
    )
