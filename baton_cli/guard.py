"""How every command ends: in order at a signal, in one sentence at an error of Baton's own."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import BatonError, ConfigError
from baton_cli.output import err


def interrupt(signum: int, frame: object) -> None:
    """Signal handler: end in order, as at Ctrl-C."""
    raise KeyboardInterrupt


def guarded(run: Callable[[], object]) -> None:
    """Baton's own errors end in one sentence, Ctrl-C in silence, both with a non-zero exit."""
    try:
        run()
    except BatonError as e:
        err.print(f"error: {e}", style="red", markup=False)
        raise SystemExit(2 if isinstance(e, ConfigError) else 1) from None
    except KeyboardInterrupt:
        err.print()  # what comes next shall not stick to what was interrupted
        raise SystemExit(130) from None
