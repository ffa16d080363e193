"""The tests of planning measure, as fleets do."""

import pytest

from modelfleet.planning import measurements


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of so many steps is long enough for it."""
    monkeypatch.setattr(measurements, "SHORT_RUN", 300)
