"""hetspec: lossless speculative decoding for targets and drafters with different vocabularies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hetspec.artifact import PairArtifact
    from hetspec.errors import HetspecError
    from hetspec.runtime.engine import Engine, GenerateOutput
    from hetspec.runtime.generate import generate, generate_batch, stream
    from hetspec.runtime.hf import hf_generate
    from hetspec.tracking import load_pair
    from hetspec.vocab import Vocabulary

_HOMES = {
    "Engine": "hetspec.runtime.engine",
    "GenerateOutput": "hetspec.runtime.engine",
    "HetspecError": "hetspec.errors",
    "PairArtifact": "hetspec.artifact",
    "Vocabulary": "hetspec.vocab",
    "generate": "hetspec.runtime.generate",
    "generate_batch": "hetspec.runtime.generate",
    "hf_generate": "hetspec.runtime.hf",
    "load_pair": "hetspec.tracking",
    "stream": "hetspec.runtime.generate",
}

__all__ = [
    "Engine",
    "GenerateOutput",
    "HetspecError",
    "PairArtifact",
    "Vocabulary",
    "__version__",
    "generate",
    "generate_batch",
    "hf_generate",
    "load_pair",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that ``import hetspec`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hetspec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
