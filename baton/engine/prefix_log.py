"""What became findable in a prefix cache, and what did not any more, since somebody last asked.

What came and went in between leaves nothing behind, so it is never longer than twice the pool. Partial blocks are
left out: they are found by equal prompts only. Must not know blocks, or who asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from baton.prefix_hash import hashes_of_keys
from baton.wire import MAX_PREFIX_HASHES


class PrefixLog:
    """`key_bytes`: the length of a full block's key. `keys`: what can be found at the start; it is told first."""

    def __init__(self, key_bytes: int, keys: Iterable[bytes]):
        self._key_bytes = key_bytes
        self._changes: dict[bytes, bool] = {key: True for key in keys if len(key) == key_bytes}
        """Whether each key that changed can be found now, in the order of the changes."""

    def __len__(self) -> int:
        return len(self._changes)

    def note(self, key: bytes, present: bool) -> None:
        """The key can be found from now on, or cannot any more. Never the same twice in a row."""
        if len(key) == self._key_bytes and self._changes.pop(key, None) is None:
            self._changes[key] = present

    def take(self) -> tuple[bytes, bytes]:
        """`(added, removed)`: prefix hashes, one after another; a limited number, the rest comes next time."""
        changes = self._changes
        if len(changes) <= MAX_PREFIX_HASHES:
            self._changes = {}
        else:
            changes = dict(islice(changes.items(), MAX_PREFIX_HASHES))
            for key in changes:
                del self._changes[key]
        return (
            hashes_of_keys(key for key, present in changes.items() if present),
            hashes_of_keys(key for key, present in changes.items() if not present),
        )
