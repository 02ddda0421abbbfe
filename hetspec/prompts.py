"""Prompts to measure on, by kind."""

from __future__ import annotations

from typing import Any

from hetspec.sources import named_texts

KINDS = ("code", "prose", "chat", "long", "longest")
LONG_CHARACTERS, LONGEST_CHARACTERS = 8_000, 32_000  # about 2,000 and 8,000 tokens
QUESTIONS = (
    "Explain to a ten-year-old why the sky is blue.",
    "Write a polite e-mail that moves a meeting from Tuesday to Thursday.",
    "What are three differences between a list and a tuple in Python?",
    "Give me a recipe for pancakes for two people.",
    "Summarise the rules of chess in one paragraph.",
    "My flight was cancelled. What should I do first?",
    "Translate into French: The library opens at nine and closes at six.",
    "How does a refrigerator keep food cold?",
    "Suggest a name for a small bakery and explain the choice.",
    "List the planets of the solar system and one fact about each.",
)


def prompts_of(kind: str, count: int) -> list[Any]:
    """Prompts of one kind, spread over its source.

    Args:
        kind: "code" (HumanEval), "prose" (openings of Wikipedia passages), "chat" (questions, as messages), "long"
            (about 2,000 tokens of passages, to be summarised) or "longest" (about 8,000).
        count: at most so many; of "longest" there is one.
    """
    if kind == "chat":
        return [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    texts = named_texts("humaneval" if kind == "code" else "passages")
    if kind == "code":
        return [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]
    chosen = [i * len(texts) // count for i in range(min(count, len(texts)))]
    if kind == "prose":
        return [_opening(texts[i]) for i in chosen]
    if kind == "long":
        return [_long(texts, i, LONG_CHARACTERS) for i in chosen]
    return [_long(texts, 0, LONGEST_CHARACTERS)]


def _opening(text: str, characters: int = 240) -> str:
    """The beginning of a passage, cut at a space."""
    return text[: text.rfind(" ", 0, characters)] if len(text) > characters else text


def _long(texts: list[str], start: int, characters: int) -> str:
    whole = ""
    while len(whole) < characters:
        whole += texts[start % len(texts)] + "\n\n"
        start += 1
    return whole[:characters] + "\n\nIn short, this text says that"
