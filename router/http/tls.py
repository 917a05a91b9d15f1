"""The certificate of HTTPS: whether it can be used, said before anything is started.

Knows files in PEM; must not know the server.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from baton.config import HttpConfig
from baton.errors import ConfigError


def check_tls(http: HttpConfig) -> None:
    """Raises ConfigError, naming the key of the configuration, if the server could not speak HTTPS with these files."""
    if http.tls_certificate is None:
        return
    certificate = _read("http.tls_certificate", http.tls_certificate)
    if b"-----BEGIN CERTIFICATE-----" not in certificate:
        raise ConfigError("http.tls_certificate", "holds no certificate in PEM", value=http.tls_certificate)
    where, key_file = "http.tls_key", http.tls_key
    if key_file is None:
        where, key_file, key = "http.tls_certificate", http.tls_certificate, certificate
    else:
        key = _read(where, key_file)
    if b"PRIVATE KEY-----" not in key:
        hint = "" if http.tls_key else "; name its file in http.tls_key"
        raise ConfigError(where, f"holds no private key in PEM{hint}", value=key_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(http.tls_certificate, key_file, password=_no_password)
    except _Locked:
        raise ConfigError(where, "is a key that needs a password, which nobody could enter", value=key_file) from None
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            problem = "is not the key of http.tls_certificate"
            raise ConfigError(where, problem, value=key_file) from None
        raise ConfigError(
            "http.tls_certificate",
            f"and its key cannot be used: they are damaged, or of a kind that OpenSSL does not take ({e.reason or e})",
            value=http.tls_certificate,
        ) from None


class _Locked(Exception):
    """The key is encrypted."""


def _no_password() -> str:
    raise _Locked


def _read(key: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as e:
        raise ConfigError(key, f"cannot be read: {e.strerror or e}", value=file) from e
