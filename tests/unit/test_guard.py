"""How commands end where the operating system refuses something: in a sentence, with a non-zero exit status."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton_cli.guard import guarded
from baton_cli.output import print_json


def no_file() -> None:
    Path("/no/such/folder/file").write_text("")


def bad_option() -> None:
    raise ConfigError("--rate", "must be positive")


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("run", "status", "said"),
    [
        (no_file, 1, "error: /no/such/folder/file: No such file or directory"),
        (bad_option, 2, "error: --rate: must be positive"),
        (interrupted, 130, ""),
    ],
)
def test_a_command_ends_in_a_sentence(
    run: Callable[[], None], status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        guarded(run)
    assert ended.value.code == status
    assert " ".join(capfd.readouterr().err.split()) == said


def test_output_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            guarded(lambda: print_json({"points": []}))
    assert ended.value.code == 1
    assert "No space left on device" in capfd.readouterr().err


def test_json_is_escaped_where_stdout_lacks_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, shown in (("ascii", "\\u2013"), ("utf-8", "–")):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        print_json({"note": "1–2"})
        sys.stdout.flush()
        text = raw.getvalue().decode(encoding)
        assert shown in text
        assert json.loads(text) == {"note": "1–2"}
