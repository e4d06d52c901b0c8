"""Short stories from a grammar, in English and Chinese; they end by themselves and are never scored.

The days of a story are numbered ("On the second day ..."), because a small model under greedy decoding needs the
count in the text itself to know when a story is over.
"""

from __future__ import annotations

import random

DAYS = {"short": 1, "medium": 2, "long": 5}

_HEROES_EN = {
    "fox": "Finn", "cat": "Mimi", "dog": "Rolf", "bear": "Bruno", "rabbit": "Rosa", "owl": "Olga", "mouse": "Pip",
    "robot": "Tik", "duck": "Dora", "horse": "Hugo", "dragon": "Drago", "girl": "Anna", "boy": "Tom", "bird": "Kiki",
}  # fmt: skip
_HEROES_ZH = {
    "狐狸": "阿红", "小猫": "咪咪", "小狗": "旺旺", "小熊": "阿宝", "兔子": "白白", "猫头鹰": "阿夜", "老鼠": "吱吱",
    "机器人": "小铁", "鸭子": "嘎嘎", "小马": "飞飞", "小龙": "青青", "女孩": "小云", "男孩": "小明", "小鸟": "叽叽",
}  # fmt: skip
_ORDINALS_EN = ("first", "second", "third", "fourth", "fifth")
_ORDINALS_ZH = ("第一天", "第二天", "第三天", "第四天", "第五天")

_OPENINGS_EN = (
    "Once upon a time, a {adj} {hero} named {name} lived {place}.",
    "Long ago, {place}, there lived a {adj} {hero} named {name}.",
)
_ADJECTIVES_EN = ("small", "brave", "curious", "kind", "quiet", "clever")
_PLACES_EN = ("in a green forest", "by the blue sea", "on a high hill", "near an old mill", "under a big tree")
_EVENTS_EN = (
    "{name} found a golden key in the grass and wondered which door it could open.",
    "{name} met {friend} by the river, and they shared {food}.",
    "{name} heard a soft song in the wind and followed it over the hills.",
    "a storm came, so {name} hid in a cave and counted the drops of rain.",
    "{name} helped {friend} to carry {food} across the bridge.",
    "{name} opened a little door in a tree and found a room full of stars.",
    "{name} got lost in the fog, but {friend} showed the way back.",
    "{name} and {friend} built a boat of wood and sailed down the river.",
    "{name} planted a seed and told it a story until the moon came up.",
)
_FRIENDS_EN = ("an old turtle", "a shy deer", "a tired traveller", "a young goat", "a wise frog")
_FOODS_EN = ("a loaf of bread", "a basket of apples", "a pot of soup", "some sweet honey")
_CLOSINGS_EN = (
    "In the evening {name} went home and slept well. The end.",
    "At last {name} came home, tired but happy. The end.",
)
_PROMPTS_EN = {
    "short": "{Tell me|Please tell me|Can you tell me|I want} a {short|very short|little} story",
    "medium": "{Tell me|Please tell me|Can you tell me|Give me|I would like} a {story|tale|nice story}",
    "long": "{Tell me|Please tell me|Can you tell me|I want} a {long|very long|longer} story",
}

_OPENINGS_ZH = (
    "从前，{place}住着一只{adj}{hero}，名字叫{name}。",
    "很久很久以前，{place}有一个{adj}{hero}，大家都叫它{name}。",
)
_ADJECTIVES_ZH = ("小小的", "勇敢的", "好奇的", "善良的", "安静的", "聪明的")
_PLACES_ZH = ("森林里", "大海边", "高山上", "老磨坊旁", "大树下")
_EVENTS_ZH = (
    "{name}在草地里捡到一把金钥匙，不知道它能打开哪扇门。",
    "{name}在河边遇见了{friend}，它们一起分享了{food}。",
    "{name}听见风里有轻轻的歌声，就跟着歌声翻过了山。",
    "下起了大雨，{name}躲进山洞，一滴一滴数着雨点。",
    "{name}帮{friend}把{food}搬过了小桥。",
    "{name}推开树上的一扇小门，看见一屋子的星星。",
    "{name}在雾里迷了路，是{friend}带它走了回来。",
    "{name}和{friend}用木头造了一条船，顺着河漂了很远。",
    "{name}种下一颗种子，给它讲故事，一直讲到月亮升起。",
)
_FRIENDS_ZH = ("一只老乌龟", "一头害羞的小鹿", "一位疲倦的旅人", "一只小山羊", "一只聪明的青蛙")
_FOODS_ZH = ("一块面包", "一篮苹果", "一锅热汤", "一罐蜂蜜")
_CLOSINGS_ZH = ("晚上，{name}回到家，睡得很香。故事讲完了。", "最后，{name}回到了家，又累又开心。故事讲完了。")
_PROMPTS_ZH = {
    "short": "{讲|给我讲|请讲|说|能讲}{一个|个}{短|很短的|小|简短的}故事",
    "medium": "{讲|给我讲|请讲|说|能讲|我想听}{一个|个}{好听的|有趣的|}故事",
    "long": "{讲|给我讲|请讲|说|能讲}{一个|个}{长|很长的|长长的|长一点的}故事",
}

PROMPTS = {"en": _PROMPTS_EN, "zh": _PROMPTS_ZH}
HEROES = {"en": tuple(_HEROES_EN), "zh": tuple(_HEROES_ZH)}


def story_en(hero: str, length: str, rng: random.Random) -> str:
    """Return an English story about `hero`; `length` is a key of DAYS."""
    name = _HEROES_EN[hero]
    opening = rng.choice(_OPENINGS_EN).format(
        adj=rng.choice(_ADJECTIVES_EN), hero=hero, name=name, place=rng.choice(_PLACES_EN)
    )
    sentences = [opening]
    for day, event in enumerate(rng.sample(_EVENTS_EN, DAYS[length])):
        text = event.format(name=name, friend=rng.choice(_FRIENDS_EN), food=rng.choice(_FOODS_EN))
        sentences.append(f"On the {_ORDINALS_EN[day]} day, {text}")
    sentences.append(rng.choice(_CLOSINGS_EN).format(name=name))
    return " ".join(sentences)


def story_zh(hero: str, length: str, rng: random.Random) -> str:
    """Return a Chinese story about `hero`; `length` is a key of DAYS."""
    name = _HEROES_ZH[hero]
    opening = rng.choice(_OPENINGS_ZH).format(
        adj=rng.choice(_ADJECTIVES_ZH), hero=hero, name=name, place=rng.choice(_PLACES_ZH)
    )
    sentences = [opening]
    for day, event in enumerate(rng.sample(_EVENTS_ZH, DAYS[length])):
        text = event.format(name=name, friend=rng.choice(_FRIENDS_ZH), food=rng.choice(_FOODS_ZH))
        sentences.append(f"{_ORDINALS_ZH[day]}，{text}")
    sentences.append(rng.choice(_CLOSINGS_ZH).format(name=name))
    return "".join(sentences)
