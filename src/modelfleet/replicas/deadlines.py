"""Open requests by deadline."""

import heapq

from modelfleet.replicas.requests import Request


class Deadlines:
    """Open requests with a deadline, the nearest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._number = 0  # breaks ties, as requests have no order
        self._closed = 0  # requests in the heap that are not open any more

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is not None:
            self._number += 1
            heapq.heappush(self._heap, (request.deadline, self._number, request))

    def remove(self, request: Request) -> None:
        """Stop watching a request, which is not open any more."""
        if request.deadline is None:
            return
        # It leaves the heap when it comes up; but a far deadline must not keep many answered requests in memory.
        self._closed += 1
        if self._closed * 2 > len(self._heap) + 64:
            self._heap = [entry for entry in self._heap if entry[2].status == "open"]
            heapq.heapify(self._heap)
            self._closed = 0

    def nearest(self) -> Request | None:
        """Return the open request with the nearest deadline."""
        while self._heap and self._heap[0][2].status != "open":
            heapq.heappop(self._heap)
            self._closed -= 1
        return self._heap[0][2] if self._heap else None
