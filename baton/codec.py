"""Messages to bytes and back: msgpack of `[PROTOCOL_VERSION, [tag, field, ...]]`.

msgspec reads the bytes straight into the message classes and checks tag, types, lengths and ranges as it goes: what
does not fit is refused before memory is taken for it (a message of a million empty lists would else become a million
objects). Whatever arrives, the result is a valid message of the expected kind or a CodecError/VersionError. Must not
know which messages there are.

The msgpack package writes them. Those of which there is one for every step or token msgspec writes too (`often`), to
the same bytes and in a fifth of the time: most of it goes into making plain lists of the message first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Generic, TypeVar

import msgpack
import msgspec

from baton.errors import CodecError, VersionError
from baton.protocol import PROTOCOL_VERSION

MAX_MESSAGE_BYTES = 32 << 20
"""No control message is longer; KV blocks do not travel through the codec."""

M = TypeVar("M")

_ENVELOPE = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_HEAD: bytes = msgpack.packb([PROTOCOL_VERSION, None])[:-1]
"""Of every message: all but its body."""


class Codec(Generic[M]):
    """Encodes and decodes one union of message classes (`Codec(Submit | Abort)`). `often`: those that must be fast."""

    def __init__(self, union: Any, *, often: Collection[type] = (), max_bytes: int = MAX_MESSAGE_BYTES):
        self._often = frozenset(often)
        self._encode_often = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(union, strict=True)
        self._max_bytes = max_bytes

    def encode(self, message: M) -> bytes:
        if type(message) in self._often:
            return _HEAD + self._encode_often(message)
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        data: bytes = msgpack.packb([PROTOCOL_VERSION, plain], use_bin_type=True)
        return data

    def decode(self, data: bytes | memoryview) -> M:
        """Raises VersionError for another protocol version, CodecError for anything else that is not a message."""
        if len(data) > self._max_bytes:
            raise CodecError(f"message of {len(data)} bytes, more than the {self._max_bytes} allowed")
        try:
            version, body = _ENVELOPE.decode(data)
        except Exception as e:  # RecursionError, UnicodeDecodeError and msgspec's own
            raise CodecError(f"not a Baton message of [version, body]: {e}") from e
        if version != PROTOCOL_VERSION:
            raise VersionError(
                f"peer speaks protocol version {version!r}, this side {PROTOCOL_VERSION}; run one release"
            )
        try:
            message: M = self._decoder.decode(body)
        except Exception as e:
            raise CodecError(f"malformed message: {e}") from e
        return message
