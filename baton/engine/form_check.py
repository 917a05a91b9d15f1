"""Whether a form of output can be followed, found out by a process that may die of it.

llguidance compiles what strangers send. Some forms of a few KiB overflow its stack (rules that refer to each other a
thousand deep), others keep it busy for hours (terminals that double twenty times), and neither can be stopped from
within. So a process is asked that the kernel ends when a form has taken too long, and that has less stack than those
who will follow the form. Must not know requests.

    FormCheck.problem_of ──grammar──► `python -m baton.engine.form_check` ──what is wrong with it──►
                         ◄─ (it ends without an answer: the grammar is too complex)
"""

from __future__ import annotations

import atexit
import contextlib
import resource
import signal
import subprocess
import sys
import threading
from typing import IO, Any

PREPARE_S, FOLLOW_S = 3.0, 0.5
"""Seconds of processor time to compile a form, and then to say what its first token may be, for which a whole batch
waits. Large forms take a fifth of it."""
LIMIT_BYTES = 4 << 30
"""Of memory, most of which is only reserved."""
STACK_BYTES = 2 << 20
"""A worker's thread has 8 MiB, usually."""
NO_OUTPUT = "no output can have this form"


class FormCheck:
    """Asks the other process, which the first question starts. Serves one of the threads that use it at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def problem_of(self, grammar: str) -> str:
        """What is wrong with a grammar in llguidance's notation; empty: nothing.

        It takes `PREPARE_S` and `FOLLOW_S` at most, and longer where others have the processor.
        """
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                _write(process.stdin, grammar)
                return _read(process.stdout)
            except (BrokenPipeError, EOFError):
                self._end(process)
            if process.returncode == -signal.SIGPROF:
                return f"it takes more than {PREPARE_S:g} s to prepare, or {FOLLOW_S:g} s a token; make it simpler"
            return "it is too complex: its parts refer to each other too deeply, or are too large"

    def close(self) -> None:
        """Idempotent; a later question starts another process."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.engine.form_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for those who asked
        )
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """It ends by itself when nobody can ask any more."""
        self._process = None
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of what was not flushed
            process.stdin.close()
        process.stdout.close()
        process.wait()


def _write(file: IO[bytes], text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    file.write(len(data).to_bytes(8, "big") + data)
    file.flush()


def _read(file: IO[bytes]) -> str:
    """Raises EOFError at the end of the file."""
    head = file.read(8)
    data = file.read(int.from_bytes(head, "big"))
    if len(head) < 8 or len(data) < int.from_bytes(head, "big"):
        raise EOFError
    return data.decode("utf-8", "surrogatepass")


# --- the other process --------------------------------------------------------------------------------


def main() -> None:
    """Answer until nobody asks any more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    while True:
        try:
            grammar = _read(sys.stdin.buffer)
        except EOFError:
            return
        problem = _problem(grammar, tokenizer)
        _end_after(0)
        _write(sys.stdout.buffer, problem)


def _end_after(seconds: float) -> None:
    """0: do not. Nobody handles the signal, so it ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _problem(grammar: str, tokenizer: Any) -> str:
    from llguidance import LLMatcher

    _end_after(PREPARE_S)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        return "; ".join(messages)
    # As a worker will do, with a vocabulary of bytes. That it lacks special tokens is no mistake of the grammar's.
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        _end_after(FOLLOW_S)
        matcher.compute_bitmask()
    return NO_OUTPUT if matcher.get_error().startswith("NoExtension") else ""


if __name__ == "__main__":
    main()
