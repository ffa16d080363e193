"""Counting what a rank of a graph holds during a step, beside weights and their gradients."""


class HeldBytes:
    """Bytes of activations that a rank holds now, and the most that it has held at once."""

    def __init__(self) -> None:
        self.most = 0
        self._kept = self._moving = 0

    def keep(self, change: int) -> None:
        """Note that nodes keep more for their backward passes, or less."""
        self._kept += change
        self._note()

    def move(self, total: int) -> None:
        """Note the size of all tensors that edges carry now."""
        self._moving = total
        self._note()

    def _note(self) -> None:
        self.most = max(self.most, self._kept + self._moving)
