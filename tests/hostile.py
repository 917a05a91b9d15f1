"""Hypothesis strategies for what a hostile peer sends: made from the message types, so that new fields are tried too.

`bodies(union)` are messages as plain data, some valid with extreme values, some with a part that is out of range or of
another type; `frames` turns them into what goes over the wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import msgspec
from hypothesis import strategies as st
from msgspec import inspect as types

from baton.layout import KVLayout
from baton.protocol import PROTOCOL_VERSION
from tests.stub_cluster import LAYOUT

Strategy = st.SearchStrategy[Any]

JUNK: Strategy = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)]),
    st.sampled_from([float("nan"), float("inf"), -1e308, 0.5]),
    st.sampled_from(["", "x" * 100_000, b"", b"\xff\xfe", [], {}, [[]] * 50, {1: {2: 3}}]),
    st.binary(max_size=8),
)


class Bodies:
    """`words`: texts that mean something to the receiver (ids, names); they are drawn for any text.

    `likely`: by field, what a message must name to be considered at all; it mostly does.
    """

    def __init__(self, words: Sequence[str], likely: Mapping[str, str] | None = None):
        self._likely = likely or {}
        self._words = [*words, "", "?", "x" * 200, "\0é🎉"]
        self._layout = msgspec.to_builtins(LAYOUT)

    def of(self, kind: Any) -> Strategy:
        """A message of this union of types."""
        return self._of(types.type_info(kind))

    def _of(self, kind: types.Type) -> Strategy:
        good = self._good(kind)
        return st.integers(0, 99).flatmap(lambda dice: JUNK if dice == 50 else good)

    def _field(self, field: types.Field) -> Strategy:
        kind = self._of(field.type)
        likely = self._likely.get(field.name)
        return kind if likely is None else st.integers(0, 9).flatmap(lambda dice: kind if dice > 7 else st.just(likely))

    def _good(self, kind: types.Type) -> Strategy:
        match kind:
            case types.Metadata():
                return self._good(kind.type)
            case types.UnionType():
                return st.one_of(*(self._of(part) for part in kind.types))
            case types.StructType():
                if kind.cls is KVLayout:
                    return st.one_of(*[st.just(self._layout)] * 3, self._fields(kind))
                return self._fields(kind)
            case types.NamedTupleType():
                return st.tuples(*(self._field(field) for field in kind.fields)).map(list)
            case types.VarTupleType():
                return st.lists(self._of(kind.item_type), min_size=kind.min_length or 0, max_size=4)
            case types.DictType():
                return st.dictionaries(self._good(kind.key_type), self._of(kind.value_type), max_size=3)
            case types.IntType():
                low = -(1 << 63) if kind.ge is None else kind.ge
                high = (1 << 64) - 1 if kind.le is None and kind.lt is None else kind.le or (kind.lt or 0) - 1
                return st.one_of(st.integers(max(low, 0), min(high, 5)), st.sampled_from([low, high]))
            case types.FloatType():
                edges = [edge for edge in (kind.ge, kind.le) if edge is not None]
                edges += [math.nextafter(kind.gt, math.inf)] if kind.gt is not None else []
                edges += [math.nextafter(kind.lt, -math.inf)] if kind.lt is not None else []
                return st.sampled_from(edges or [0.0, -1.5, 1e308])
            case types.StrType():
                low, high = kind.min_length or 0, kind.max_length or 1 << 30
                return st.sampled_from([word for word in self._words if low <= len(word) <= high])
            case types.LiteralType():
                return st.sampled_from(list(kind.values))
            case types.EnumType():
                return st.sampled_from([member.value for member in kind.cls])
            case types.BoolType():
                return st.booleans()
            case types.NoneType():
                return st.none()
            case types.BytesType():
                return st.binary(max_size=16)
        return JUNK

    def _fields(self, kind: types.StructType) -> Strategy:
        head = [] if kind.tag is None else [st.just(kind.tag)]
        whole = st.tuples(*head, *(self._field(field) for field in kind.fields)).map(list)
        return st.tuples(whole, st.integers(0, 99)).map(lambda drawn: drawn[0][:-1] if drawn[1] == 50 else drawn[0])


def encoded(body: Any) -> bytes:
    """As a peer of this release would send it."""
    data: bytes = msgpack.packb([PROTOCOL_VERSION, body], use_bin_type=True)
    return data


def damaged(data: bytes) -> Strategy:
    """`data` with some bytes overwritten, or cut short."""

    def damage(places: list[tuple[int, int]]) -> bytes:
        out = bytearray(data)
        for at, byte in places:
            out[at % len(out)] = byte
        return bytes(out[: places[0][0] % len(out)]) if places[0][1] < 20 else bytes(out)

    return st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4).map(damage)
