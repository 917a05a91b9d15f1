"""Network: transfers between workers that share the workers' network interfaces, under a virtual clock.

Pure arithmetic. Of a pair of workers one transfer moves at a time, in the order in which they were sent. Those under
way share each interface max-min fairly, in each direction: nobody gets more at the cost of someone who has less. Must
not know what is sent, or why.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from baton_cluster.virtual_clock import VirtualClock

Pair = tuple[str, str]
"""Source and target."""


class _Flow:
    """What a pair has under way."""

    __slots__ = ("at", "left", "rate", "sent")

    def __init__(self, num_bytes: float, sent: Callable[[], None]):
        self.left = num_bytes
        """Bytes, as of the last change."""
        self.rate = 0.0
        self.at = 0.0
        """When all will have left, unless something changes."""
        self.sent = sent


class Network:
    """`nic_bytes_per_s`: of each worker's interface and direction; `pair_bytes_per_s`: what a pair reaches alone."""

    def __init__(self, clock: VirtualClock, nic_bytes_per_s: float, pair_bytes_per_s: float):
        self._clock = clock
        self._nic = nic_bytes_per_s
        self._pair = pair_bytes_per_s
        self._flows: dict[Pair, _Flow] = {}
        self._queues: dict[Pair, deque[_Flow]] = {}
        """Behind the flows."""
        self._changed_at = clock.now
        self._num_changes = 0

    def send(self, source: str, target: str, num_bytes: float, sent: Callable[[], None]) -> None:
        """Call `sent` when so many bytes have left, after all that this pair was given before."""
        pair, flow = (source, target), _Flow(num_bytes, sent)
        if pair in self._flows:
            self._queues.setdefault(pair, deque()).append(flow)
            return
        self._advance()
        self._flows[pair] = flow
        self._share()

    def drop(self, source: str, target: str) -> None:
        """Forget all that this pair has not sent."""
        self._queues.pop((source, target), None)
        if (source, target) in self._flows:
            self._advance()
            del self._flows[source, target]
            self._share()

    def rates(self) -> dict[Pair, float]:
        """Bytes per second of every pair that sends now."""
        return {pair: flow.rate for pair, flow in self._flows.items()}

    # --- inside -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """All that moved since the last change."""
        seconds, self._changed_at = self._clock.now - self._changed_at, self._clock.now
        for flow in self._flows.values():
            flow.left -= flow.rate * seconds

    def _share(self) -> None:
        """Give each flow its rate, by filling all alike until an interface is full, then the others, and so on."""
        waiting = {pair: (("out", pair[0]), ("in", pair[1])) for pair in self._flows}
        room = {nic: self._nic for nics in waiting.values() for nic in nics}
        while waiting:
            users = Counter(nic for nics in waiting.values() for nic in nics)
            share, full = min((room[nic] / count, nic) for nic, count in users.items())
            if share < self._pair:
                filled = [pair for pair, nics in waiting.items() if full in nics]
            else:
                share, filled = self._pair, list(waiting)
            for pair in filled:
                self._flows[pair].rate = share
                for nic in waiting.pop(pair):
                    room[nic] -= share
        self._num_changes += 1
        now = self._clock.now
        for flow in self._flows.values():
            flow.at = now + max(0.0, flow.left) / flow.rate
        if self._flows:
            self._clock.at(min(flow.at for flow in self._flows.values()), self._complete, self._num_changes)

    def _complete(self, change: int) -> None:
        if change != self._num_changes:
            return  # it goes faster or slower since
        self._advance()
        done = [pair for pair, flow in self._flows.items() if flow.at <= self._clock.now]
        ended = [self._flows.pop(pair) for pair in done]
        for pair in done:
            if queue := self._queues.get(pair):
                self._flows[pair] = queue.popleft()
        self._share()
        for flow in ended:
            flow.sent()
