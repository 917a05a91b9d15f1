"""Messages to bytes and back: msgpack of `[PROTOCOL_VERSION, [tag, field, ...]]`.

msgpack does the bytes, under limits that a peer cannot exceed; msgspec checks tag, types and ranges
against the message classes. Whatever arrives, the result is a valid message of the expected kind or
a CodecError/VersionError. Must not know which messages there are.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgpack
import msgspec

from baton.errors import CodecError, VersionError
from baton.protocol import PROTOCOL_VERSION

MAX_MESSAGE_BYTES = 32 << 20
"""No control message is longer; KV blocks do not travel through the codec."""

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes one union of message classes (`Codec(Submit | Abort)`)."""

    def __init__(self, union: Any, *, max_bytes: int = MAX_MESSAGE_BYTES):
        self._union = union
        self._max_bytes = max_bytes

    def encode(self, message: M) -> bytes:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        data: bytes = msgpack.packb([PROTOCOL_VERSION, plain], use_bin_type=True)
        return data

    def decode(self, data: bytes | memoryview) -> M:
        """Raises VersionError for another protocol version, CodecError for anything else that is not a message."""
        if len(data) > self._max_bytes:
            raise CodecError(f"message of {len(data)} bytes, more than the {self._max_bytes} allowed")
        try:  # unpackb bounds every length by the size of `data` before it allocates
            envelope = msgpack.unpackb(data, raw=False, strict_map_key=False)
        except Exception as e:  # msgpack raises many kinds, ValueError and its own among them
            raise CodecError(f"not a msgpack message: {e}") from e
        if not isinstance(envelope, list) or len(envelope) != 2:
            raise CodecError("not a Baton message: expected [version, body]")
        version, body = envelope
        if version != PROTOCOL_VERSION:
            raise VersionError(
                f"peer speaks protocol version {version!r}, this side {PROTOCOL_VERSION}; run one release"
            )
        try:
            message: M = msgspec.convert(body, self._union, strict=True)
        except msgspec.ValidationError as e:
            raise CodecError(f"malformed message: {e}") from e
        return message
