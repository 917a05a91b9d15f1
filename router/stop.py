"""Stop strings: where a text that comes piece by piece ends, and what of it may be shown already.

Pure. Must not know tokens, requests or sockets.

A text ends at the stop string that is complete first, of several that end there the longest. It is looked
for character by character with one automaton for all stop strings (Aho and Corasick, "Efficient string
matching", CACM 1975), so the answer does not depend on how the text was cut into pieces. The automaton's
depth is also exactly how much must be held back: the longest end of the text that some stop string starts with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of some stop strings; none of them empty. Immutable, so the samples of a request share it."""

    __slots__ = ("_depth", "_fail", "_found", "_next")

    def __init__(self, strings: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        """The state of the longest proper end of this state's text that is a state too."""
        self._depth = [0]
        self._found = [0]
        """Length of the longest stop string that ends here; 0: none."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._found.append(0)
            state = following
        self._found[state] = len(string)

    def _link(self) -> None:
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for character, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], character)
                todo.append(following)
            self._found[state] = self._found[state] or self._found[self._fail[state]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character; 0 is the start."""
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def found(self, state: int) -> int:
        """Length of the stop string that is complete in this state; 0: none."""
        return self._found[state]

    def pending(self, state: int) -> int:
        """How many of the last characters may be the start of a stop string."""
        while state and not self._next[state]:  # complete, and ignored: it cannot go on
            state = self._fail[state]
        return self._depth[state]


class StopMatcher:
    """One text. `include`: show the stop string that ends it."""

    __slots__ = ("_held", "_include", "_state", "_stops", "stopped")

    def __init__(self, stops: StopStrings, *, include: bool = False):
        self.stopped = False
        """A stop string is complete: the text has ended."""
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        """Text that is not shown, as a stop string may start in it."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """What can be shown after this piece. Stop strings that end in a piece that may not stop are ignored."""
        if self.stopped:
            return ""
        text = self._held + piece
        state, stops = self._state, self._stops
        for end, character in enumerate(piece, len(self._held) + 1):
            state = stops.step(state, character)
            length = stops.found(state)
            if length and may_stop:
                self.stopped = True
                self._held = ""
                return text[: end if self._include else end - length]
        self._state = state
        shown = len(text) - stops.pending(state)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held, self._state = self._held, "", 0
        return held
