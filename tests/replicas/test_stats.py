"""Statistics as text: on a terminal, in a file and in a notebook."""

from typing import Any

import pytest
import rich.console

from modelfleet.replicas.requests import Counts, Request
from modelfleet.replicas.stats import Stats, Tally


def some() -> Stats:
    tally = Tally(["cpu:0", "cpu:1"])
    tally.count_batch("cpu:0", 1200, 0.5)
    tally.count_restart("cpu:1")
    for begun, taken in ((0.0, 1.0), (0.0, 3.0)):
        tally.count_request(Request("ada", None, 4, begun, first_taken=taken))
    return tally.stats(Counts(submitted=2, answered=1, waiting=1, waiting_rows=4), {"cpu:1": OSError("gone")})


@pytest.mark.parametrize("notebook", [False, True])
def test_the_table_is_text_in_notebooks_too(notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: notebook)
    shown: list[Any] = []
    monkeypatch.setattr("rich.jupyter.display", lambda *given: shown.append(given))
    text = str(some())
    assert "2 requests: 1 answered, 0 failed, 0 cancelled; 1 wait with 4 rows" in text
    assert "1,200" in text
    assert "2,400" in text
    assert "given up: gone" in text
    assert repr(some()) == text
    assert shown == []


def test_waits_are_those_of_the_user() -> None:
    user = some().users["ada"]
    assert (user.requests, user.rows, user.mean_wait, user.longest_wait) == (2, 8, 2.0, 3.0)
    assert some().replicas["cpu:1"].restarts == 1
