"""What a parser tells of an answer's text. Plain data."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The model calls this function. Calls of one answer are numbered from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


ToolEvent = Content | CallStart | CallArguments
