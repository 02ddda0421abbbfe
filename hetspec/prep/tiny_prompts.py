"""Prompts that a target writes training texts from: function heads, openings of passages, notes, and chat questions.

What a drafter is measured on must not be among them: the caller passes texts that are kept out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LONGEST_OPENING = 240  # characters
TOPICS = (
    *("photosynthesis", "the water cycle", "volcanoes", "honey bees", "coral reefs", "the Roman Empire"),
    *("the printing press", "black holes", "vaccines", "earthquakes", "glaciers", "solar panels", "sleep"),
    *("the stock market", "inflation", "public libraries", "urban gardening", "jazz music", "opera"),
    *("the Silk Road", "whales", "penguins", "rainbows", "lightning", "the human heart", "memory"),
    *("quick sort", "hash tables", "linked lists", "recursion", "dynamic programming", "regular expressions"),
    *("graph search", "stacks and queues", "prime numbers", "matrix multiplication", "Python decorators"),
    *("generators in Python", "context managers", "unit tests", "version control", "relational databases"),
    *("operating systems", "compilers", "the internet", "encryption", "neural networks", "linear regression"),
    *(
        "probability",
        "the Pythagorean theorem",
        "coffee",
        "bread baking",
        "chess openings",
        "marathon running",
    ),
    *("bicycles", "electric cars", "bridges", "lighthouses", "calendars", "maps", "the metric system"),
    *("time zones", "weather forecasts", "recycling", "forests", "deserts", "rivers", "tides", "gravity"),
)
QUESTION_FORMS = (
    "Explain {} in simple words.",
    "What is {} and why does it matter?",
    "How does one get started with {}?",
    "Write a short story about {}.",
    "Give me five interesting facts about {}.",
    "Write a polite e-mail that asks a colleague for a talk on {}.",
    "Summarise the most important things about {} in one paragraph.",
    "List the pros and cons of {}.",
    "Suggest a title for a book about {} and explain the choice.",
    "Write a poem about {}.",
    "What are common misunderstandings about {}?",
    "Make a plan for learning about {} in one week.",
    "Compare {} with something similar.",
    "Describe {} to a child.",
)
NOTE_FORMS = (
    "# A short introduction to {}\n\n",
    "{}\n\nThe first thing to know is that",
    "# Notes on {}\n\nIn this article, we",
    "The history of {} began",
    "One of the most important aspects of {} is",
)
CODE_STARTS = (
    *("def ", "from typing import List\n\n\ndef ", "import math\n\n\ndef ", "def is_", "def count_"),
    *("def find_", "def get_", "def sum_", "def remove_", "class ", "# Python program to ", "def sort_"),
    *(
        "from typing import List, Tuple\n\n\ndef ",
        "def max_",
        "def reverse_",
        "def compute_",
        "import re\n\n\ndef ",
    ),
)
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Prompt:
    """The beginning of a training text.

    Attributes:
        kind: "code", "prose", "note", "question", "own-code" (the target makes up the function as well) or
            "own-question" (the target asks itself).
        text: given to the target; of a question, the user's message.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class KeptOut:
    """Texts that no training text may have a part in.

    Attributes:
        texts: as measured on.
        names: functions they define; a training text may define none of that name.
    """

    texts: Sequence[str]
    names: frozenset[str] = field(init=False)
    _joined: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = {name for text in self.texts for name in re.findall(r"def (\w+)\(", text)}
        object.__setattr__(self, "names", frozenset(names))
        object.__setattr__(self, "_joined", "\0".join(_words(text) for text in self.texts))

    def forbids(self, text: str) -> bool:
        """Whether a text defines a function of theirs, or begins as a part of one of them."""
        opening = _words(text)[:100]
        return (len(opening) > 20 and opening in self._joined) or not self.names.isdisjoint(
            re.findall(r"def (\w+)\(", text)
        )


def function_heads(sources: Sequence[str], kept_out: KeptOut) -> list[Prompt]:
    """Signatures with docstrings of the functions in Python sources, dedented, each once."""
    heads: dict[str, None] = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        heads.update((head, None) for head in _heads(tree) if not kept_out.forbids(head))
    return [Prompt("code", head) for head in heads]


def _heads(tree: Any) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        doc = doc.split("\n\n")[0].replace("\n", "\n    ")
        if len(doc) > 400 or '"""' in doc or "\\" in doc:
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f'def {node.name}({ast.unparse(node.args)}){returns}:\n    """{doc}"""\n'


def openings(passages: Sequence[str], kept_out: KeptOut) -> list[Prompt]:
    """Beginnings of passages of several lengths, cut at a space."""
    found = []
    for number, passage in enumerate(passages):
        if kept_out.forbids(passage):
            continue
        length = LONGEST_OPENING * (1 + number % 3) // 3
        found.append(
            Prompt("prose", passage[: passage.rfind(" ", 0, length)] if len(passage) > length else passage)
        )
    return found


def templated(kind: str, forms: Sequence[str], kept_out: KeptOut) -> list[Prompt]:
    """Every form with every topic."""
    return [
        Prompt(kind, text) for form in forms for t in TOPICS if not kept_out.forbids(text := form.format(t))
    ]


def all_prompts(
    sources: Sequence[str], passages: Sequence[str], kept_out: KeptOut, seed: int
) -> dict[str, list[Prompt]]:
    """Every prompt by kind, shuffled.

    Args:
        sources: Python sources.
        passages: running prose.
        kept_out: what must not be trained on.
        seed: of the order.
    """
    prompts = {
        "code": function_heads(sources, kept_out),
        "question": templated("question", QUESTION_FORMS, kept_out),
        "prose": openings(passages, kept_out),
        "own-code": [Prompt("own-code", text) for text in CODE_STARTS],
        "own-question": [Prompt("own-question", "")],
        "note": templated("note", NOTE_FORMS, kept_out),
    }
    rng = np.random.default_rng(seed)
    return {kind: [found[i] for i in rng.permutation(len(found))] for kind, found in prompts.items()}


def _words(text: str) -> str:
    return " ".join(WORD.findall(text)).lower()
