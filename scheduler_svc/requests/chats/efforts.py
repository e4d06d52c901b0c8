"""How much a model is to think: clients' words for it, where a template knows other ones.

Templates have two to four of them and refuse the rest: what a client sends by default may be one of those.
"""

from __future__ import annotations

import json

from scheduler_svc.requests.chats.json_objects import json_object

_NAMES = ("reasoning_effort", "thinking_effort")
_SCALE = ("minimal", "low", "medium", "high", "xhigh", "max")
_NOT_AT_ALL = {"none": ("no_think",)}


def near_efforts(template_kwargs: str) -> list[str]:
    """Return arguments of a template with other efforts in place of theirs: the nearest first, of two the lower.

    Nothing unless both names have the effort, as a request's own field gives them: an argument of one is meant so.
    """
    given = json_object(template_kwargs, "template_kwargs") if template_kwargs else {}
    words = [given.get(name) for name in _NAMES]
    effort = words[0]
    if not isinstance(effort, str) or words != [effort, effort]:
        return []
    if effort not in _SCALE:
        others: tuple[str, ...] = _NOT_AT_ALL.get(effort, ())
    else:
        own = _SCALE.index(effort)
        others = tuple(sorted(_SCALE, key=lambda word: (abs(_SCALE.index(word) - own), _SCALE.index(word)))[1:])
    return [json.dumps({**given, **dict.fromkeys(_NAMES, other)}) for other in others]
