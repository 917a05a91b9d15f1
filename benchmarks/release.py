"""How long it takes until nothing is left of a request that is cancelled, times out, or whose client is gone.

    python -m benchmarks.release --rounds 20 --json release.json

From the end until no worker holds a block of it, no port a transfer and the router no entry; for each state in which
the request may be. Everything is real but the model: a step takes 20 ms, which an end may have to wait for.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.release import STATES, WAYS, Rig


def measure(rounds: int) -> list[dict[str, Any]]:
    """One entry for each state and way, in milliseconds."""
    found = []
    for state in STATES:
        rig = Rig(state)  # type: ignore[arg-type]
        try:
            for way in WAYS:
                ms = sorted(1e3 * rig.measure(way) for _ in range(rounds))  # type: ignore[arg-type]
                p50, p99 = ms[len(ms) // 2], ms[min(len(ms) - 1, int(0.99 * len(ms)))]
                found.append({"state": state, "way": way, "ms_p50": p50, "ms_p99": p99, "ms": ms})
                print(f"{state:20} {way:18} p50 {p50:6.1f} ms   p99 {p99:6.1f} ms", file=sys.stderr)
        finally:
            rig.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
