"""The canned world of the demo model: topics, their wordings in two languages, one canonical answer each.

One answer per topic and language makes "exactly right" well defined, which is what lets the golden tests compare
whole answers.
"""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

import demo_topics_en as english
import demo_topics_zh as chinese
from demo_grammar import sample
from demo_split import is_heldout_key, wording_key
from demo_tasks import Turn

LANGUAGES = ("en", "zh")
TOPICS = tuple(english.ANSWERS)
_WORLDS = {"en": english, "zh": chinese}

# Share of the training wordings with one word (or Chinese character) dropped: it keeps the model from leaning on
# any single word of the grammar, which is what hand-written wordings need.
_DROP_SHARE = 0.12


class Heldout(NamedTuple):
    """A held-out question; `source` is "generated" or "handwritten"."""

    topic: str
    language: str
    source: str
    turn: Turn


def answer(topic: str, language: str) -> str:
    """Return the canonical answer."""
    text: str = _WORLDS[language].ANSWERS[topic]
    return text


def _decorate_english(topic: str, core: str, rng: random.Random) -> str:
    if topic in english.SOCIAL:
        text = core + rng.choice(("", "", ".", "!", "!", "!!", "?" if topic == "greeting" else "."))
    else:
        text = rng.choice(english.PREFIXES) + core + rng.choice(english.SUFFIXES) + rng.choice(english.ENDINGS)
    style = rng.random()
    if style < 0.60:
        text = text[0].upper() + text[1:]
        return text.replace(" i ", " I ").replace(" i'm ", " I'm ").replace("kv cache", "KV cache")
    if style < 0.63:
        return text.upper()
    return text


def _decorate_chinese(topic: str, core: str, rng: random.Random) -> str:
    if topic in english.SOCIAL:
        return core + rng.choice(("", "", "。", "！", "！", "～", "？" if topic == "greeting" else "。"))
    return rng.choice(chinese.PREFIXES) + core + rng.choice(chinese.SUFFIXES) + rng.choice(chinese.ENDINGS)


def wording(topic: str, language: str, rng: random.Random) -> str:
    """Return a random wording from the grammar, held out or not."""
    core = sample(rng.choice(_WORLDS[language].PATTERNS[topic]), rng)
    return _decorate_english(topic, core, rng) if language == "en" else _decorate_chinese(topic, core, rng)


@cache
def handwritten_keys() -> frozenset[str]:
    """Return the keys of all hand-written wordings; they are held out even where the grammar could produce them."""
    worlds = (english, chinese)
    return frozenset(wording_key(text) for world in worlds for texts in world.HANDWRITTEN.values() for text in texts)


def is_heldout_wording(text: str) -> bool:
    """Return whether training must never show this wording, in any case and punctuation."""
    key = wording_key(text)
    return key in handwritten_keys() or is_heldout_key(key)


def _drop_one(text: str, language: str, rng: random.Random) -> str:
    units = text.split(" ") if language == "en" else list(text)
    if len(units) < 5:
        return text
    del units[rng.randrange(len(units))]
    return (" " if language == "en" else "").join(units)


def training_wording(topic: str, language: str, rng: random.Random) -> str:
    """Return a random wording that is not held out."""
    while True:
        text = wording(topic, language, rng)
        if rng.random() < _DROP_SHARE:
            text = _drop_one(text, language, rng)
        if not is_heldout_wording(text):
            return text


def question(topic: str, language: str, rng: random.Random) -> Turn:
    """Return a training question on `topic` with its canonical answer."""
    return Turn("question", training_wording(topic, language, rng), answer(topic, language))


def heldout_questions(per_topic: int, seed: int) -> list[Heldout]:
    """Return `per_topic` generated wordings of every topic and language, and all hand-written ones."""
    rng = random.Random(seed)
    found: list[Heldout] = []
    for language in LANGUAGES:
        for topic in TOPICS:
            right = answer(topic, language)
            seen: set[str] = set()
            while len(seen) < per_topic:
                text = wording(topic, language, rng)
                key = wording_key(text)
                if key in seen or not is_heldout_key(key):
                    continue
                seen.add(key)
                found.append(Heldout(topic, language, "generated", Turn("question", text, right)))
            for text in _WORLDS[language].HANDWRITTEN[topic]:
                found.append(Heldout(topic, language, "handwritten", Turn("question", text, right)))
    return found
