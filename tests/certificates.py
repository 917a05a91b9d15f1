"""Certificates that the tests make themselves, with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """Files in PEM."""

    chain: str
    """Of a certificate for `localhost` and 127.0.0.1 that signs itself."""
    key: str
    other_key: str
    """Another one's."""
    locked_key: str
    """The key behind a password."""


def make_certificate(folder: Path) -> Certificate:
    """Skips the test where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command is not installed")
    files = Certificate(*(str(folder / f"{name}.pem") for name in Certificate._fields))

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], check=True, capture_output=True, timeout=60)

    curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
    run("genpkey", "-algorithm", "EC", *curve, "-out", files.key)
    run("genpkey", "-algorithm", "EC", *curve, "-out", files.other_key)
    run("pkey", "-in", files.key, "-aes128", "-passout", "pass:a password", "-out", files.locked_key)
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    run("req", "-x509", "-new", "-key", files.key, "-subj", "/CN=baton test", "-addext", names, "-days", "2",
        "-out", files.chain)  # fmt: skip
    return files
