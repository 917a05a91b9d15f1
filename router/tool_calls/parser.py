"""Finding calls in a text that comes piece by piece; what all formats share.

A format is a grammar, written as generators: each is given a character at a time, so how the text was cut into
pieces cannot matter. A rule is given its first character and returns the first one after it; the end of the text
reads as "". Where the text leaves the grammar it raises Malformed.

             a character with which a call may start
    content ─────────────────────────────────────────▶ trial ──▶ recognized: CallStart, CallArguments ─┐
       ▲                                                 │                                              │
       └──── Malformed: what was read of it is content, ─┴──── the call ends ───────────────────────────┘
             and calls are looked for from its second character on

A call is told as soon as its name is known, its arguments as they come, so what turns out to be malformed after
that leaves a call with arguments that are no JSON, and content after it. Everything the model wrote is told as
content, name or arguments, but for the syntax around calls and the space before and after them.

Pure. Must not know HTTP, tokens or which model is served.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator

from router.tool_calls.events import CallArguments, CallStart, Content, ToolEvent

Rule = Generator[None, str, str]
SPACE = " \t\r\n"
MAX_DEPTH = 128
"""Of arrays and objects in arguments. Clients' JSON parsers have limits, too."""
_ATOM_ENDS = frozenset(SPACE + ',:]}"[{')
_ATOM = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_MAX_ATOM = 512


class Malformed(Exception):
    """The text is no call, or none any more."""


class ToolParser:
    """One answer's text. `names`: of the functions that may be called.

    `ids`: a text unique to this answer; the calls' ids are made of it.
    """

    starts = ""
    """Characters with which a call may start anywhere."""
    starts_first = ""
    """And those where only space comes before it, since the text's start or the last call."""

    def __init__(self, names: frozenset[str], ids: str = ""):
        self.num_calls = 0
        """That have been told of so far."""
        self._names = names
        self._ids = ids
        self._find_start = re.compile(f"[{re.escape(self.starts)}]").search if self.starts else _find_nothing
        self._trial: Rule | None = None
        self._held: list[str] = []
        """Characters of the trial that nothing was told of yet."""
        self._told_of_trial = False
        self._space: str | None = ""
        """Space since the start or the last call; None after content."""
        self._events: list[ToolEvent] = []

    def anew(self, ids: str) -> ToolParser:
        """One like this for another answer to the same request."""
        return type(self)(self._names, ids)

    def push(self, text: str) -> list[ToolEvent]:
        """What this piece tells. Content and fragments are as long as possible."""
        position = 0
        while position < len(text):
            if self._trial is None:
                position = self._read_content(text, position)
                continue
            character = text[position]
            position += 1
            self._held.append(character)
            try:
                self._trial.send(character)
                continue
            except StopIteration:
                again = self._end_trial()
            except Malformed:
                told, again = self._told_of_trial, self._end_trial()
                if not told:
                    self._tell_content(again[0])
                    again = again[1:]
            if again:
                text, position = again + text[position:], 0
        return self._take_events()

    def flush(self) -> list[ToolEvent]:
        """The rest, at the end of the text. What was held back because a call may have started in it is content."""
        if self._trial is not None:
            self._held.append("")
            try:
                self._trial.send("")
            except StopIteration:
                self._end_trial()
            except Malformed:
                self._tell_content(self._end_trial())
            assert self._trial is None, "a rule went on after the end of the text"
        if self._space and not self.num_calls:
            self._tell(Content(self._space))
        self._space = ""
        return self._take_events()

    def call(self) -> Rule:
        """The format: from one of `starts` on, one or more calls."""
        raise NotImplementedError

    # --- content --------------------------------------------------------------------------------------

    def _read_content(self, text: str, position: int) -> int:
        """Up to where a trial begins; returns the position of its first character."""
        found = self._find_start(text, position)
        end = found.start() if found else len(text)
        if self._space is not None and self.starts_first:
            first = len(text) - len(text[position:].lstrip())
            if first < end and text[first] in self.starts_first:
                end = first
        self._tell_content(text[position:end])
        if end < len(text):
            self._trial = self.call()
            self._told_of_trial = False
            next(self._trial)
        return end

    def _tell_content(self, text: str) -> None:
        if not text:
            return
        if self._space is not None:
            if not text.strip():
                self._space += text
                return
            text, self._space = self._space + text, None
        last = self._events[-1] if self._events else None
        if type(last) is Content:
            self._events[-1] = Content(last.text + text)
        else:
            self._tell(Content(text))

    def _end_trial(self) -> str:
        """Returns what was read and not told of."""
        held = "".join(self._held)
        self._trial = None
        self._held.clear()
        return held

    def _tell(self, event: ToolEvent) -> None:
        self._events.append(event)

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    # --- for formats ----------------------------------------------------------------------------------

    def _start(self, name: str, *, lookahead: int) -> None:
        """Tell of a call. `lookahead`: characters read that are not part of what is told."""
        self._told_of_trial = True
        self._space = ""
        self._tell(CallStart(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1
        self._recognized(lookahead)

    def _argue(self, text: str, lookahead: int = 0) -> None:
        """Tell more of the last call's arguments."""
        index = self.num_calls - 1
        last = self._events[-1] if self._events else None
        if type(last) is CallArguments and last.index == index:
            self._events[-1] = CallArguments(index, last.fragment + text)
        else:
            self._tell(CallArguments(index, text))
        self._recognized(lookahead)

    def _recognized(self, lookahead: int = 0) -> None:
        """What was read is syntax of a call or was told; it will not be content."""
        del self._held[: len(self._held) - lookahead]

    def _call_id(self, index: int) -> str:
        return "call_" + hashlib.sha256(f"{self._ids}/{index}".encode()).hexdigest()[:24]

    def _calls_json(self, character: str, *, any_name: bool = True) -> Rule:
        """One call, or an array of at least one, in JSON."""
        if character == "{":
            return (yield from self._call_json(character, any_name=any_name))
        expect(character, "[")
        while True:
            character = yield from skip_space((yield))
            character = yield from skip_space((yield from self._call_json(character, any_name=any_name)))
            if character != ",":
                break
        expect(character, "]")
        self._recognized()
        return (yield)

    def _call_json(self, character: str, *, any_name: bool) -> Rule:
        """`{"name": ..., "arguments": {...}}`; `parameters` is `arguments`, too. Other keys are left out."""
        expect(character, "{")
        started, argued = False, False
        arguments: list[str] = []
        """Until the name is known."""
        while True:
            character = yield from skip_space((yield))
            key: list[str] = []
            character = yield from skip_space((yield from read_string(character, key)))
            expect(character, ":")
            character = yield from skip_space((yield))
            match json.loads("".join(key)):
                case "name" if not started:
                    text: list[str] = []
                    character = yield from read_string(character, text)
                    name = json.loads("".join(text))
                    if not name or not (any_name or name in self._names):
                        raise Malformed
                    self._start(name, lookahead=1)
                    started = True
                    if argued:
                        self._argue("".join(arguments), 1)
                case "arguments" | "parameters" if not argued:
                    argued = True
                    character = yield from read_json(character, self._argue if started else _appender(arguments))
                case "id" | "type":
                    character = yield from read_json(character, _ignore)
                case _ if started:
                    character = yield from read_json(character, _ignore)
                case _:
                    raise Malformed
            character = yield from skip_space(character)
            if character != ",":
                break
        expect(character, "}")
        if not started:
            raise Malformed
        if not argued:
            self._argue("{}")
        self._recognized()
        return (yield)

    def _closing(self, character: str, text: str) -> Rule:
        """What ends calls that were told of, after any space; at the end of the text it may be missing."""
        character = yield from skip_space(character)
        for wanted in text:
            if not character:
                break
            expect(character, wanted)
            character = yield
        self._recognized(1)
        return character


# --- rules that know no call --------------------------------------------------------------------------


def expect(character: str, wanted: str) -> None:
    """Malformed if it is another one."""
    if character != wanted:
        raise Malformed


def read_literal(character: str, text: str) -> Rule:
    """Exactly this text."""
    for wanted in text:
        expect(character, wanted)
        character = yield
    return character


def skip_space(character: str) -> Rule:
    """Any space."""
    while character and character in SPACE:
        character = yield
    return character


def read_string(character: str, into: list[str]) -> Rule:
    """A JSON string, quotes included. Line ends in it, which models write as they are, become escapes."""
    expect(character, '"')
    yield from _rest_of_string(lambda piece, lookahead: into.append(piece))
    return (yield)


def read_json(character: str, put: Callable[[str, int], None]) -> Rule:
    """One JSON value; `put(text, lookahead)` gets it as it comes, `lookahead` characters after those read.

    Without recursion: how deep a value nests is the model's choice.
    """
    closing: list[str] = []
    while True:
        if character == '"':
            yield from _rest_of_string(put)
            character = yield
        elif character and character in "{[":
            if len(closing) == MAX_DEPTH:
                raise Malformed
            closing.append("}" if character == "{" else "]")
            put(character, 0)
            character = yield from _keep_space((yield), put)
            if character != closing[-1]:
                if closing[-1] == "}":
                    character = yield from _key(character, put)
                continue
        else:
            character = yield from _atom(character, put)
        while closing:  # after a value, or at the end of an empty array or object
            character = yield from _keep_space(character, put)
            if character == closing[-1]:
                closing.pop()
                put(character, 0)
                character = yield
                continue
            expect(character, ",")
            put(character, 0)
            character = yield from _keep_space((yield), put)
            if closing[-1] == "}":
                character = yield from _key(character, put)
            break
        else:
            return character


def _key(character: str, put: Callable[[str, int], None]) -> Rule:
    """A key and its colon; returns the value's first character."""
    expect(character, '"')
    yield from _rest_of_string(put)
    character = yield from _keep_space((yield), put)
    expect(character, ":")
    put(character, 0)
    return (yield from _keep_space((yield), put))


def _rest_of_string(put: Callable[[str, int], None]) -> Generator[None, str, None]:
    """From the opening quote, which was read, to the closing one, both included."""
    put('"', 0)
    while True:
        character = yield
        if character == "\\":
            escaped = yield
            if escaped == "u":
                for _ in range(4):
                    digit = yield
                    if not digit or digit not in "0123456789abcdefABCDEF":
                        raise Malformed
                    escaped += digit
            elif not escaped or escaped not in '"\\/bfnrt':
                raise Malformed
            put(character + escaped, 0)
        elif not character:
            raise Malformed
        else:
            put(json.dumps(character)[1:-1] if character < " " else character, 0)
            if character == '"':
                return


def _atom(character: str, put: Callable[[str, int], None]) -> Rule:
    """A number, true, false or null: known only by what follows."""
    text = ""
    while character and character not in _ATOM_ENDS:
        text += character
        if len(text) > _MAX_ATOM:
            raise Malformed
        character = yield
    if not _ATOM.fullmatch(text):
        raise Malformed
    put(text, 1)
    return character


def _keep_space(character: str, put: Callable[[str, int], None]) -> Rule:
    while character and character in SPACE:
        put(character, 0)
        character = yield
    return character


def _appender(texts: list[str]) -> Callable[[str, int], None]:
    return lambda text, lookahead: texts.append(text)


def _find_nothing(text: str, position: int) -> None:
    """Where no character starts a call."""


def _ignore(text: str, lookahead: int) -> None:
    """Not worth telling."""
