"""Every error that Baton raises on purpose.

    BatonError
    ├── ConfigError            cluster.yaml or a command-line option is wrong
    ├── ModelError             a model cannot be found, read or served
    ├── LayoutError            two KV layouts cannot exchange blocks
    ├── RequestError           the client's request is wrong; retrying it unchanged fails again
    │   ├── InvalidRequestError    a field is missing, of the wrong type, or out of range
    │   └── RequestTooLargeError   longer than the model's limit or than any pool can hold
    ├── OverloadedError        the request is fine, there is no room for it now; retry later
    ├── RequestFailedError     accepted, then lost to a fault on our side
    ├── ProtocolError          bytes or a message that a correct peer never sends
    │   ├── CodecError             not decodable: bad msgpack, unknown tag, wrong field type
    │   ├── VersionError           another protocol version
    │   └── JoinRefusedError       a worker that cannot work with this cluster
    └── ClusterError           a cluster could not be started, found or ended

`assert` is for Baton's own bugs; these are for clients, peers, configuration and capacity.
A message says what was wrong, where, and what to do about it.
"""

from __future__ import annotations

from functools import partial


class BatonError(Exception):
    """Base class. `code` is stable, machine-readable, and travels over the wire."""

    code = "internal_error"


class ConfigError(BatonError):
    """A configuration value is wrong; names its YAML path, the value and what is allowed."""

    code = "config_error"

    def __init__(self, path: str, problem: str, *, value: object = None, allowed: str | None = None):
        self.path, self.problem, self.value, self.allowed = path, problem, value, allowed
        message = f"{path}: {problem}"
        if value is not None:
            message += f" (got {value!r})"
        if allowed:
            message += f"; allowed: {allowed}"
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:  # it crosses process borders when a worker refuses to start
        return partial(ConfigError, value=self.value, allowed=self.allowed), (self.path, self.problem)


class ModelError(BatonError):
    code = "model_error"


class LayoutError(BatonError):
    code = "layout_mismatch"


class RequestError(BatonError):
    """The request is wrong. `field` names the part of it at fault, where one is."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class InvalidRequestError(RequestError):
    code = "invalid_request"


class RequestTooLargeError(RequestError):
    code = "request_too_large"


class OverloadedError(BatonError):
    """`retry_after_s`: when there may be room, as far as that can be told; None: it cannot."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailedError(BatonError):
    code = "request_failed"


class ProtocolError(BatonError):
    code = "protocol_error"


class CodecError(ProtocolError):
    code = "codec_error"


class VersionError(ProtocolError):
    code = "version_mismatch"


class JoinRefusedError(ProtocolError):
    code = "join_refused"


class ClusterError(BatonError):
    code = "cluster_error"


_CLIENT_ERRORS: dict[str, type[BatonError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError,
        RequestTooLargeError,
        OverloadedError,
        RequestFailedError,
        VersionError,
        CodecError,
    )
}


def error_from_code(
    code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
) -> BatonError:
    """The exception a client raises for an error that came over the wire."""
    cls = _CLIENT_ERRORS.get(code, RequestFailedError)
    if issubclass(cls, RequestError):
        return cls(message, field=field)
    if issubclass(cls, OverloadedError):
        return cls(message, retry_after_s=retry_after_s)
    return cls(message)
