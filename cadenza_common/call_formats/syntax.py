"""How models write tool calls and thoughts, as data: what a format is comes from its description, and nowhere else.

A call is written as `section[0] call[0] NAME separator ARGUMENTS call[1]`, several with `between`, and `section[1]`
behind the last one. Literals may have `{id}`, any id, `{index}`, the number of the call, and `{name}`, the name of the
first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Body(Enum):
    """How the name and the arguments of a call are written."""

    OBJECT = "a JSON object with the name and the arguments"
    JSON = "the name, then a JSON object"
    TAGS = "the name, then each argument between tags"
    PYTHON = "the name, then keyword arguments in brackets"
    TREE = "the name, then an element for each argument, with elements in it"
    TYPED = "the name, then arguments in braces: bare keys, strings between markers"


@dataclass(frozen=True, slots=True)
class Tags:
    """How an argument is written: key_open KEY key_close VALUE value_close; strings as they are, other values as JSON.

    A `{type}` in key_close says what the value is: `types` has the word for a string, and that for the others, whose
    kind is meant where it is empty.
    """

    key_open: str
    key_close: str
    value_close: str
    end: str = ""
    """Behind the last argument; empty: the call's own end."""
    is_padded: bool = False
    """Whether line breaks at both ends of a value are none of it."""
    types: tuple[str, str] = ("", "")
    quotes: tuple[str, str] = ("", "")
    """What may stand around a string."""
    behind: str = "\n"
    """What is written behind each argument."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One way to write calls."""

    body: Body
    call: tuple[str, str] = ("", "")
    section: tuple[str, str] = ("", "")
    separator: str = ""
    """Behind the name."""
    header: str = ""
    """An expression for all that may stand there; empty: the separator alone."""
    between: str = ""
    """What stands between calls."""
    keys: tuple[str, str] = ("name", "arguments")
    """Of an object: the keys of the name and of the arguments; others are nothing."""
    needs_arguments: bool = False
    """Whether an object without arguments is no call."""
    tags: Tags | None = None
    markers: tuple[str, ...] = ()
    """Texts that may be tokens: the first one begins calls."""
    is_known: bool = False
    """Whether a call is one by the name of a tool alone."""
    bare: str | None = None
    """What begins a call of a known tool too; empty: nothing, at the start of an answer."""
    name: str = r"[\w.:/-]+"
    """An expression for names."""
    id_form: str = ""
    """What an {id} or an "id" is, where the format has it."""

    @property
    def open(self) -> str:
        """What begins the first call."""
        return self.section[0] + self.call[0]


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """One format, which --tool-call-parser names."""

    name: str
    models: str
    """Whose it is, for readers."""
    ways: tuple[CallSyntax, ...]
    """All of them are read; one is written."""
    wrappers: tuple[str, ...] = ()
    """Texts around an answer that are none of it."""
    hint: str = ""
    """What templates have that show no calls in histories: such are written there in this format."""
    written: int | None = None
    """The way that models write, whatever templates show."""
    start: str = ""
    """A text that is none of the answer at its start."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Of all ways, in their order."""
        return tuple(dict.fromkeys(text for way in self.ways for text in way.markers))


@dataclass(frozen=True, slots=True)
class ThoughtSyntax:
    """How thoughts are written, which --reasoning-parser names."""

    name: str
    models: str
    open: str
    close: str
    always: bool = False
    """Whether each answer begins within a thought, unless the prompt has closed it."""
    repeats: bool = False
    """Whether thoughts stand behind text of the answer too."""
    wrappers: tuple[str, ...] = ()
    """Texts around the answer that are none of it."""
    then: str = ""
    """What is written between a thought and the answer."""
    content: tuple[str, str] = ("", "")
    """What stands around text of an answer that is no call."""
    parts: tuple[str, ...] = ()
    """Texts that may be tokens, where those above consist of several; empty: each is one."""
    answer: tuple[str, str] = ("", "")
    """Texts that are none of the answer at its start, and at its end."""
    hint: str = ""
    """What chat templates with these texts have."""
