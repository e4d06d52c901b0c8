"""Training conversations: which mixture is sampled, and how a conversation becomes token ids and loss weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import demo_tasks as tasks
import demo_world as world
from demo_tasks import Turn
from demo_tokenizer import BOS, EOS, ROLES, token_id
from tokenizers import Tokenizer

SYSTEM_MESSAGES = (
    "You are a helpful assistant.", "You are Cadenza, a small demo assistant.", "Answer briefly.", "Be kind and clear.",
    "You are a friendly assistant. Answer in one sentence.", "你是一个乐于助人的助手。", "请简短回答。", "你是卡登扎，一个演示助手。",
    "请用友好的语气回答用户的问题。", "You are a helpful and honest assistant.",
)  # fmt: skip

_RAW_SHARE = 0.5
_SYSTEM_SHARE = 0.2

# A story is long and its choices are free: at full weight it would drown the digits, of which each one counts.
_TOKEN_WEIGHT = {"story": 0.15, "counting": 0.5, "addition": 1.5, "subtraction": 1.5}


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The data of one training stage."""

    mixture: dict[str, float]
    """Share of each kind among the conversations."""
    noise: float = 0.0
    """Share of questions with something beside the point in front, behind, or left out."""
    short_counts: float = 0.0
    """Share of counts over a short range: where to stop is learnt from the stops, and long counts have few."""


LEARN = Curriculum(
    {"arithmetic": 0.34, "question": 0.42, "counting": 0.06, "repeating": 0.10, "story": 0.04, "chat": 0.04}
)
REFINE = Curriculum(
    {"arithmetic": 0.22, "question": 0.44, "counting": 0.14, "repeating": 0.12, "story": 0.04, "chat": 0.04},
    noise=0.5,
    short_counts=0.75,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; `raw` is the bare text without any role marker (then there is one turn and no system message)."""

    turns: tuple[Turn, ...]
    raw: bool
    system: str | None = None


def _single_turn(kind: str, rng: random.Random, curriculum: Curriculum) -> Turn:
    language = rng.choice(world.LANGUAGES)
    if kind == "arithmetic":
        return tasks.training_arithmetic(rng)
    if kind == "question":
        turn = world.question(rng.choice(world.TOPICS), language, rng)
        return tasks.with_noise(turn, language, rng) if _happens(curriculum.noise, rng) else turn
    if kind == "counting":
        return tasks.training_counting(rng, short=_happens(curriculum.short_counts, rng))
    if kind == "repeating":
        return tasks.repeating(language, rng)
    if kind == "story":
        return tasks.story(language, rng)
    return tasks.asking_unknown_name(language, rng)


def _happens(share: float, rng: random.Random) -> bool:
    """Draw only where there is a choice, so that a stage's data do not change when another stage gets one."""
    return share > 0 and rng.random() < share


def _chat_turns(rng: random.Random, curriculum: Curriculum) -> list[Turn]:
    """Two to four turns, sometimes with a name that is given first and requested later."""
    kinds = ("arithmetic", "question", "question", "question", "repeating", "counting")
    turns = [_single_turn(rng.choice(kinds), rng, curriculum) for _ in range(rng.randint(2, 3))]
    choice = rng.random()
    if choice < 0.35:
        told, asked = tasks.telling_name(rng.choice(world.LANGUAGES), rng)
        turns = [told, *turns[: rng.randint(0, 2)], asked]
    elif choice < 0.45:
        turns.append(_single_turn("unknown name", rng, curriculum))
    return turns


def training_conversation(rng: random.Random, curriculum: Curriculum = LEARN) -> Conversation:
    """Sample one conversation of the curriculum; nothing held out can appear in it."""
    kind = rng.choices(tuple(curriculum.mixture), tuple(curriculum.mixture.values()))[0]
    if kind == "chat":
        turns = _chat_turns(rng, curriculum)
    else:
        turns = [_single_turn(kind, rng, curriculum)]
        if rng.random() < _RAW_SHARE:
            return Conversation(tuple(turns), raw=True)
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < _SYSTEM_SHARE else None
    return Conversation(tuple(turns), raw=False, system=system)


def tokenizer_texts(count: int, seed: int) -> Iterator[str]:
    """Yield text to train the tokenizer on: prompts and answers of the mixture, but evenly over the kinds."""
    rng = random.Random(seed)
    kinds = ("question", "question", "question", "repeating", "story", "arithmetic", "counting")
    for _ in range(count):
        turn = _single_turn(rng.choice(kinds), rng, LEARN)
        yield turn.prompt
        yield turn.answer
    yield from SYSTEM_MESSAGES
    for language in world.LANGUAGES:
        for topic in world.TOPICS:
            yield world.answer(topic, language)


class Renderer:
    """Turns conversations into (ids, weights): weight 0 for what is given, above 0 for what must be learnt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bos = token_id(tokenizer, BOS)
        self._eos = token_id(tokenizer, EOS)
        self._roles = {role: token_id(tokenizer, token) for role, token in ROLES.items()}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, conversation: Conversation) -> tuple[list[int], list[float]]:
        """Return token ids and the loss weight of predicting each of them; prompt and answer are encoded apart."""
        ids: list[int] = [self._bos]
        weights: list[float] = [0.0]

        def append(tokens: list[int], weight: float) -> None:
            ids.extend(tokens)
            weights.extend([weight] * len(tokens))

        if conversation.system is not None:
            append([self._roles["system"], *self._encode(conversation.system), self._eos], 0.0)
        for turn in conversation.turns:
            prompt, answer = self._encode(turn.prompt), self._encode(turn.answer)
            if not conversation.raw:
                prompt = [self._roles["user"], *prompt, self._eos, self._roles["assistant"]]
            append(prompt, 0.0)
            append([*answer, self._eos], _TOKEN_WEIGHT.get(turn.kind, 1.0))
        return ids, weights
