"""What names the beginning of a prompt, wherever it is computed: a chain of digests, block by block.

The KV of a block depends on all tokens up to its end, on the model, and on the request's salt. So its digest is made of
the digest of the block before and of its own tokens; the first one's of the model's fingerprint and the salt:

    digest[0] = H(H(fingerprint, salt) + tokens[0 : B])      digest[i] = H(digest[i - 1] + tokens[i * B : (i + 1) * B])

H is xxh3_128. A worker's prefix cache compares the tokens too (`baton.engine.prefix_cache`). Who only guesses where a
prefix may be cached, as the router does, takes the first 8 bytes of a digest: the *prefix hash*.
Pure arithmetic; must not know requests or pools.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from xxhash import xxh3_128_digest

DIGEST_BYTES: Final = 16
TOKEN_BYTES: Final = 4
HASH_BYTES: Final = 8


@lru_cache(maxsize=64)
def root_digest(fingerprint: str, salt: str = "") -> bytes:
    """What the first block's digest begins with."""
    return xxh3_128_digest(f"{fingerprint}\0{salt}".encode())


def prefix_hashes(tokens: Sequence[int], block_size: int, fingerprint: str, salt: str = "") -> tuple[int, ...]:
    """The prefix hash of every full block of `block_size` tokens, from the first on."""
    num_blocks = len(tokens) // block_size
    whole = num_blocks * block_size
    data = struct.pack(f"<{whole}I", *(tokens if whole == len(tokens) else tokens[:whole]))
    digest, digest_of = root_digest(fingerprint, salt), xxh3_128_digest
    blocks = struct.iter_unpack(f"{block_size * TOKEN_BYTES}s", data)
    digests = [digest := digest_of(digest + block) for (block,) in blocks]
    return struct.unpack(f"<{2 * num_blocks}Q", b"".join(digests))[::2]


def hashes_of_keys(keys: Iterable[bytes]) -> bytes:
    """The prefix hashes of blocks by their keys in a prefix cache, one after another."""
    return b"".join([xxh3_128_digest(key)[:HASH_BYTES] for key in keys])


def unpack_hashes(data: bytes) -> tuple[int, ...]:
    """Prefix hashes that lie one after another; a rest of fewer than 8 bytes is none."""
    count = len(data) // HASH_BYTES
    return struct.unpack_from(f"<{count}Q", data)
