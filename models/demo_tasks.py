"""Tasks with a computed answer: arithmetic, counting, repeating a phrase, remembering a name, telling a story."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import demo_stories as stories
from demo_grammar import sample
from demo_split import is_heldout_pair, is_heldout_range

MAX_OPERAND = 99
MAX_COUNT_SPAN = 40
SHORT_COUNT_SPAN = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its one right answer; `kind` names the category in the reports."""

    kind: str
    prompt: str
    answer: str


# {{a}} and {{b}} survive the choice grammar as <a> and <b>: braces already mean "choice" there.
_BARE = ("<a>{op}<b>=", "<a> {op} <b> =", "<a> {op} <b>=")
_STATED = {
    "+": (
        "{what is|what's|what does|calculate|compute|add up|how much is|please calculate|solve|can you compute|tell me}"
        " {<a>+<b>|<a> + <b>|<a> plus <b>}{?||.| please|, please}",
        "{hello, |please |can you |could you |}{add <a> and <b>|add <a> to <b>|sum <a> and <b>}{?||.|, please}",
        "{what is|find|tell me|i need} the sum of <a> and <b>{?||.}",
        "{<a>加<b>|<a>加上<b>|<a>+<b>|<a> + <b>|<a>与<b>的和|<a>和<b>相加|<a>和<b>的和}"
        "{等于多少|是多少|等于几|得多少|等于|是几|一共是多少}{？||?|呢？}",
        "{请|请你|帮我|请问|你好，请|麻烦|}{计算|算一下|算算|算}{<a>+<b>|<a>加<b>|<a> + <b>|<a>加上<b>}{。||？|，谢谢|等于多少？}",
        "{<a>+<b>|<a> + <b>|<a>加<b>|<a> plus <b>}{?|？|=?|=？||等于？}",
    ),
    "-": (
        "{what is|what's|what does|calculate|compute|how much is|please calculate|solve|can you compute|tell me}"
        " {<a>-<b>|<a> - <b>|<a> minus <b>}{?||.| please|, please}",
        "{hello, |please |can you |could you |}{subtract <b> from <a>|take <b> away from <a>}{?||.|, please}",
        "{what is|find|tell me|i need} the difference of <a> and <b>{?||.}",
        "{<a>减<b>|<a>减去<b>|<a>-<b>|<a> - <b>|<a>与<b>的差|<a>和<b>的差}"
        "{等于多少|是多少|等于几|得多少|等于|是几|还剩多少}{？||?|呢？}",
        "{请|请你|帮我|请问|你好，请|麻烦|}{计算|算一下|算算|算}{<a>-<b>|<a>减<b>|<a> - <b>|<a>减去<b>}{。||？|，谢谢|等于多少？}",
        "{<a>-<b>|<a> - <b>|<a>减<b>|<a> minus <b>}{?|？|=?|=？||等于？}",
    ),
}


def working(left: int, right: int, operator: str) -> str:
    """Return tens, then ones, then the result: "70+15=85" for 47+38, "20-6=14" for 52-38, "-20-2=-22" for 12-34.

    Every step is a small table that is met in full during training, which is why unseen operand pairs come out right
    after minutes; the direct result would have to be learnt pair by pair.
    """
    sign = 1 if operator == "+" else -1
    tens = 10 * (left // 10 + sign * (right // 10))
    ones = left % 10 + sign * (right % 10)
    return f"{tens}{ones:+d}={tens + ones}"


def arithmetic(left: int, right: int, operator: str, rng: random.Random, bare: bool) -> Turn:
    """Return one phrasing of `left operator right`; differences may be negative.

    A bare "47+38=" is completed with "70+15=85"; every other phrasing is answered "47+38=70+15=85". Restating the sum
    first brings all phrasings to one form, so that the model has to learn the arithmetic only once.
    """
    if bare:
        pattern = rng.choice(_BARE).replace("{op}", operator)
        answer = working(left, right, operator)
    else:
        pattern = rng.choice(_STATED[operator])
        answer = f"{left}{operator}{right}={working(left, right, operator)}"
    prompt = sample(pattern, rng).replace("<a>", str(left)).replace("<b>", str(right))
    if prompt[0].islower() and rng.random() < 0.7:
        prompt = prompt[0].upper() + prompt[1:]
    return Turn("addition" if operator == "+" else "subtraction", prompt, answer)


def training_arithmetic(rng: random.Random) -> Turn:
    """Return a sum or a difference whose operand pair is not held out."""
    while True:
        left, right = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
        if not is_heldout_pair(left, right):
            return arithmetic(left, right, rng.choice("+-"), rng, bare=rng.random() < 0.4)


_COUNT = {
    "en": "{{please |can you |could you |}{count|count up} from <a> to <b>{.||?|, please}"
    "|{please |}{list|say|write} {all|the} numbers from <a> to <b>{.||, please}}",
    "zh": "{{请|请你|帮我|你能|}{从<a>数到<b>|从<a>开始数到<b>}{。||，谢谢|吧}|{请|}{数数|数一数|报数}{，|：}从<a>到<b>{。|}}",
}


def counting(first: int, last: int, language: str, rng: random.Random) -> Turn:
    """Count upwards from `first` to `last`, both included."""
    numbers = [str(number) for number in range(first, last + 1)]
    prompt = sample(_COUNT[language], rng).replace("<a>", str(first)).replace("<b>", str(last))
    if rng.random() < 0.7:
        prompt = prompt[0].upper() + prompt[1:]
    return Turn("counting", prompt, ("、" if language == "zh" else ", ").join(numbers))


def training_counting(rng: random.Random, *, short: bool = False) -> Turn:
    """Return a count whose range is not held out."""
    while True:
        first = rng.randint(0, MAX_OPERAND - 1)
        last = min(MAX_OPERAND, first + rng.randint(1, SHORT_COUNT_SPAN if short else MAX_COUNT_SPAN))
        if not is_heldout_range(first, last):
            return counting(first, last, rng.choice(("en", "zh")), rng)


_REPEAT = {
    "en": "{repeat|please repeat|repeat after me|say|echo|please say|say after me}: ",
    "zh": "{请重复|重复|跟我说|请跟我说|重复一遍|跟我念|请复述}：",
}
_EN_WORDS = (
    "the red fox runs over a quiet hill and sings to blue moon my old friend likes green tea in morning we walk by "
    "river never stop dreaming good luck small steps make long roads every river finds its sea hello world book train "
    "window summer winter music paper silver stone apple tiger cloud garden seven open close bright code server token "
    "batch memory fast slow up down left right yes no one two three light water fire earth wind night day"
).split(" ")
_ZH_CHARS = (
    "天地人你我他日月水火山石田土风云雨雪春夏秋冬东西南北上下左右大小多少红黄蓝绿白黑花草树木鸟鱼马牛羊狗猫"
    "书笔纸画歌舞吃喝走跑跳看听说读写爱心手口目耳门窗家国城市路桥车船早晚今明年月时分快慢高低长短好坏新旧"
    "一二三四五六七八九十百千万中学生老师朋友学习工作生活努力加油开心快乐平安健康"
)
_PUNCTUATION = {"en": (".", "!", "?", "", "", ""), "zh": ("。", "！", "？", "", "", "")}


@cache
def _rare_characters() -> str:
    """Characters that the tokenizer never saw and so splits into bytes: copying them exercises partial characters."""
    return "".join(chr(code) for code in range(0x4E00, 0x9FA5, 7)) + "😀🚀🎵🌟🐱🍎éüñßçøæλπΩжщカナひら한글"


def repeating(language: str, rng: random.Random) -> Turn:
    """Repeat a random phrase, now and then one with rare characters, emoji or a number."""
    if language == "en":
        words = [rng.choice(_EN_WORDS) for _ in range(rng.randint(1, 10))]
        if rng.random() < 0.15:
            words[rng.randrange(len(words))] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7)))
    else:
        words = [rng.choice(_ZH_CHARS) for _ in range(rng.randint(2, 16))]
    if rng.random() < 0.2:
        words[rng.randrange(len(words))] = str(rng.randint(0, 9999))
    if rng.random() < 0.2:
        words[rng.randrange(len(words))] = rng.choice(_rare_characters())
    phrase = (" " if language == "en" else "").join(words)
    if language == "en" and rng.random() < 0.5:
        phrase = phrase[0].upper() + phrase[1:]
    phrase += rng.choice(_PUNCTUATION[language])
    prompt = sample(_REPEAT[language], rng)
    if language == "en":
        prompt = (prompt[0].upper() + prompt[1:] if rng.random() < 0.7 else prompt) + " "
    return Turn("repeating", prompt + phrase, phrase)


def with_noise(turn: Turn, language: str, rng: random.Random) -> Turn:
    """The same question among words that do not matter, or without one of its own: what counts must be found in it."""
    prompt = turn.prompt
    filler = _filler(language, rng)
    choice = rng.random()
    if choice < 0.45:
        border = rng.choice((". ", ", ", "! ") if language == "en" else ("，", "。", "！"))
        prompt = filler + border + prompt
    elif choice < 0.85:
        body = prompt.rstrip(".!?。！？ ")
        joined = " " if language == "en" else rng.choice(("，", ""))
        prompt = body + joined + filler + prompt[len(body) :]
    else:
        parts = prompt.split(" ") if language == "en" else list(prompt)
        if len(parts) > 4:
            del parts[rng.randrange(len(parts))]
            prompt = (" " if language == "en" else "").join(parts)
    return Turn(turn.kind, prompt, turn.answer)


def _filler(language: str, rng: random.Random) -> str:
    if language == "en":
        words = " ".join(rng.choice(_EN_WORDS) for _ in range(rng.randint(1, 6)))
        return words[0].upper() + words[1:] if rng.random() < 0.5 else words
    return "".join(rng.choice(_ZH_CHARS) for _ in range(rng.randint(2, 7)))


def story(language: str, rng: random.Random) -> Turn:
    """Ask for a story; half of the requests name the hero."""
    length = rng.choice(("short", "medium", "long"))
    hero = rng.choice(stories.HEROES[language])
    request = sample(stories.PROMPTS[language][length], rng)
    named = rng.random() < 0.7
    if language == "en":
        article = "an" if hero[0] in "aeiou" else "a"
        prompt = request + (f" about {article} {hero}" if named else "") + rng.choice((".", "", "?", "!", " please."))
        return Turn("story", prompt, stories.story_en(hero, length, rng))
    about = rng.choice((f"，关于{hero}的", f"，主角是{hero}")) if named else ""
    return Turn("story", request + about + rng.choice(("。", "", "吧", "！")), stories.story_zh(hero, length, rng))


_NAMES = {
    "en": "Tom Anna Peter Lucy Max Emma Jack Lily Sam Nina Paul Rosa Leo Mary Ben Kate Alex Olga Tim Eva Bob Alice".split(),
    "zh": "小明 小红 小刚 小丽 小华 小芳 大伟 阿强 小雨 小雪 小龙 小梅 小军 小兰 王芳 李雷 张伟 刘洋 陈静 赵敏".split(),
}
_TELL_NAME = {
    "en": "{hello, |hi, |}{my name is|i am called|call me|you can call me} <n>{.||!}",
    "zh": "{你好，|嗨，|}{我叫|我的名字是|我名叫|你可以叫我}<n>{。||！}",
}
_ASK_NAME = {
    "en": "{what is my name|do you remember my name|what am i called|tell me my name|who am i}{?|}",
    "zh": "{我叫什么|我叫什么名字|你还记得我的名字吗|我的名字是什么|我是谁}{？|}",
}
_NAME_ANSWERS = {
    "en": ("Nice to meet you, <n>!", "Your name is <n>.", "You have not told me your name yet."),
    "zh": ("很高兴认识你，<n>！", "你叫<n>。", "你还没有告诉我你的名字。"),
}


def telling_name(language: str, rng: random.Random) -> tuple[Turn, Turn]:
    """Return two turns for one chat: the user gives a name, and later asks for it."""
    name = rng.choice(_NAMES[language])
    greet, recall, _ = _NAME_ANSWERS[language]
    told = Turn("memory", sample(_TELL_NAME[language], rng).replace("<n>", name), greet.replace("<n>", name))
    asked = Turn("memory", sample(_ASK_NAME[language], rng), recall.replace("<n>", name))
    return told, asked


def asking_unknown_name(language: str, rng: random.Random) -> Turn:
    """Ask for a name that was never given."""
    return Turn("memory", sample(_ASK_NAME[language], rng), _NAME_ANSWERS[language][2])
