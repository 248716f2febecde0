"""The prompts of every benchmark: four kinds, from sources that any Python installation has.

chat: questions written for this file. edit: functions of the standard library to be rewritten with a small
change. quote: docstrings of the standard library to be repeated or summarised with quotations. document:
long docstrings followed by a question.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from importlib import import_module

CHAT = (
    "What is the capital of France, and what is it known for?",
    "Explain in simple words why the sky is blue.",
    "Write a short poem about the sea in autumn.",
    "Give me three tips for sleeping better.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a story about a robot who learns to paint.",
    "How do I make a good cup of coffee at home?",
    "What are the main causes of inflation?",
    "Suggest a name for a bakery and explain your choice.",
    "Describe how a bicycle stays upright while it moves.",
    "What should I pack for a three-day hike in the mountains?",
    "Explain what a prime number is and give five examples.",
    "Write a polite e-mail asking for a deadline extension.",
    "Which planets have rings, and what are the rings made of?",
    "What is the best way to learn a new language as an adult?",
    "Explain how a refrigerator keeps food cold.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me a recipe for a simple vegetable soup.",
    "Why do leaves change their colour in autumn?",
    "Compare trains and aeroplanes for a journey of 500 kilometres.",
    "Write a short dialogue between a teacher and a curious pupil.",
    "What does a compiler do, and how is it different from an interpreter?",
    "Name five countries in South America and their capitals.",
    "How can I prepare for a job interview?",
    "Explain the water cycle to a ten-year-old child.",
    "What is the greatest common divisor of 84 and 126, and how do you find it?",
    "Write a SQL query that lists the ten newest orders of a shop.",
)

EDIT_FUNCTIONS = (
    ("textwrap", "dedent"),
    ("random", "Random.sample"),
    ("heapq", "merge"),
    ("shlex", "join"),
    ("fnmatch", "filter"),
    ("statistics", "harmonic_mean"),
    ("colorsys", "rgb_to_hsv"),
    ("string", "capwords"),
    ("calendar", "leapdays"),
    ("base64", "b32encode"),
    ("difflib", "unified_diff"),
    ("copy", "copy"),
    ("glob", "escape"),
    ("random", "Random.shuffle"),
    ("fileinput", "hook_compressed"),
    ("shutil", "which"),
    ("mimetypes", "MimeTypes.guess_extension"),
    ("gzip", "compress"),
    ("html", "escape"),
    ("ast", "literal_eval"),
    ("inspect", "cleandoc"),
    ("statistics", "median"),
    ("textwrap", "indent"),
    ("random", "Random.choices"),
    ("functools", "total_ordering"),
    ("calendar", "monthrange"),
    ("urllib.parse", "urlencode"),
)

QUOTE_DOCSTRINGS = (
    ("json", None),
    ("argparse", None),
    ("datetime", "date.fromisocalendar"),
    ("functools", "lru_cache"),
    ("itertools", "groupby"),
    ("collections", "namedtuple"),
    ("os", "walk"),
    ("subprocess", "run"),
    ("tempfile", "mkstemp"),
    ("heapq", None),
    ("textwrap", "wrap"),
    ("shutil", "copytree"),
    ("difflib", "get_close_matches"),
    ("functools", "reduce"),
    ("logging", "basicConfig"),
    ("random", "Random.sample"),
    ("re", None),
    ("pathlib", "PurePath"),
    ("csv", None),
    ("statistics", None),
    ("os", "makedirs"),
    ("threading", "Barrier"),
    ("shutil", "rmtree"),
    ("asyncio", "wait_for"),
    ("enum", "Enum"),
    ("fractions", "Fraction"),
)

DOCUMENTS = (
    "argparse",
    "json",
    "heapq",
    "difflib",
    "_pydecimal",
    "optparse",
    "pickletools",
    "statistics",
    "doctest",
    "zipfile",
    "tarfile",
    "logging",
    "typing",
    "subprocess",
    "email.message",
    "http.server",
    "socketserver",
    "sched",
    "queue",
    "configparser",
    "ftplib",
    "shelve",
    "webbrowser",
    "gettext",
    "trace",
    "cmd",
    "pprint",
)


@dataclass(frozen=True)
class Prompt:
    """One benchmark prompt: its category, where it comes from, and the user's message."""

    category: str
    source: str
    text: str


def _lookup(module: str, path: str | None) -> object:
    found: object = import_module(module)
    for part in (path or "").split("."):
        found = getattr(found, part) if part else found
    return found


def _chat() -> list[Prompt]:
    return [Prompt("chat", f"question {index + 1}", text) for index, text in enumerate(CHAT)]


def _edit() -> list[Prompt]:
    prompts = []
    for module, path in EDIT_FUNCTIONS:
        code = textwrap.dedent(inspect.getsource(_lookup(module, path)))[:1200]
        name = path.rpartition(".")[2]
        request = f"Rename `{name}` to `new_{name}` and repeat the code without any other change:"
        prompts.append(Prompt("edit", f"{module}.{path}", f"{request}\n\n```python\n{code}```"))
    return prompts


def _quote() -> list[Prompt]:
    prompts = []
    for module, path in QUOTE_DOCSTRINGS:
        text = (inspect.getdoc(_lookup(module, path)) or "")[:900]
        source = f"{module}.{path}" if path else module
        prompts.append(Prompt("quote", source, f"Repeat the following text word for word:\n\n{text}"))
    return prompts


def _document() -> list[Prompt]:
    prompts = []
    for module in DOCUMENTS:
        text = inspect.getsource(_lookup(module, None))[:3600]
        prompts.append(Prompt("document", f"{module} source", f"{text}\n\nSummarise what the text above describes."))
    return prompts


def summaries(count: int) -> list[Prompt]:
    """Docstrings to be summarised, from the end of the list so that few of them are in a short run's quotations."""
    prompts = []
    for module, path in QUOTE_DOCSTRINGS[::-1][:count]:
        text = (inspect.getdoc(_lookup(module, path)) or "")[:1600]
        source = f"{module}.{path}" if path else module
        prompts.append(Prompt("summary", source, f"Summarise the following text in a few sentences:\n\n{text}"))
    return prompts


def all_prompts() -> list[Prompt]:
    """Every prompt, category after category, always in the same order."""
    return [*_chat(), *_edit(), *_quote(), *_document()]


def by_category(per_category: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts grouped by category, at most `per_category` of each."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in all_prompts():
        groups.setdefault(prompt.category, []).append(prompt)
    return {name: prompts[:per_category] for name, prompts in groups.items()}
