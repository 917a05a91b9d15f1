"""How every command ends: in order at a signal, in one sentence at an error of Baton's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from baton.errors import BatonError, ConfigError
from baton_cli.output import err


def interrupt(signum: int, frame: object) -> None:
    """Signal handler: end in order, as at Ctrl-C."""
    raise KeyboardInterrupt


def guarded(run: Callable[[], object]) -> None:
    """Baton's own errors and those of files end in one sentence, Ctrl-C in silence, all with a non-zero exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows `?` in its place
    try:
        try:
            run()
        finally:
            sys.stdout.flush()  # what cannot be written is to be told, not to be found out at the very end
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        err.print(f"error: {where}{e.strerror or str(e) or type(e).__name__}", style="red", markup=False)
        _close_stdout()
        raise SystemExit(1) from None
    except BatonError as e:
        err.print(f"error: {e}", style="red", markup=False)
        raise SystemExit(2 if isinstance(e, ConfigError) else 1) from None
    except KeyboardInterrupt:
        err.print()  # what comes next shall not stick to what was interrupted
        raise SystemExit(130) from None


def _close_stdout() -> None:
    """What is left in its buffer goes nowhere: Python would try once more at exit, and complain in many lines."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # it has no descriptor, or it is closed
        pass
