"""One supervisor: what starts late, dies or freezes, and when to give up."""

from typing import Any

import pytest
from tests.workers import tasks

from modelfleet.workers import WorkerDiedError
from modelfleet.workers.inline import InlinePlace
from modelfleet.workers.supervisor import Policy, RestartBudget, Supervisor, WorkerEnd

PLACE = InlinePlace("cpu", "cpu")
DIED = WorkerDiedError("killed")


def lost(error: Exception = DIED, *, started: bool = False, lifetime: float = 0.0) -> WorkerEnd:
    return WorkerEnd(error, started, lifetime)


def test_failed_starts_in_a_row_spend_the_budget() -> None:
    budget = RestartBudget(Policy(max_failed_starts=3, max_failed_restarts=5))
    delays = []
    while not budget.is_spent:
        budget.charge(lost())
        delays.append(budget.delay)
    assert delays == [0.0, 0.5, 1.0]
    budget.note_started()  # from then on more are allowed
    for _ in range(4):
        budget.charge(lost())
    assert not budget.is_spent
    budget.charge(lost())
    assert budget.is_spent


def test_what_a_task_raises_at_its_first_start_is_not_tried_again() -> None:
    budget = RestartBudget(Policy())
    budget.charge(lost(OSError("no such file")))
    assert budget.is_spent
    assert lost(OSError("no such file")).reason == "OSError: no such file"
    assert lost().reason == "killed"


def test_deaths_spend_the_budget_until_there_is_progress() -> None:
    budget = RestartBudget(Policy(max_deaths=2))
    budget.charge(lost(started=True))
    assert not budget.is_spent
    budget.reset()
    budget.charge(lost(started=True, lifetime=1.0))
    assert (budget.is_spent, budget.delay) == (False, 0.5)
    budget.charge(lost(started=True, lifetime=60.0))
    assert (budget.is_spent, budget.delay) == (True, 0.0)


def test_a_task_is_started_answered_and_finished() -> None:
    supervisor = Supervisor(PLACE, Policy())
    worker = supervisor.start(tasks.echo, 1, "an order", job="a job")
    assert worker.last_job == "a job"
    assert supervisor.wait_started(lambda: False)
    assert supervisor.started
    worker.answer(2)
    assert supervisor.receive(timeout=60.0) == (True, 2)
    assert supervisor.split_begun(["next"]) == ([], ["next"])
    supervisor.check_idle()
    supervisor.finish()
    assert supervisor.worker is None


def stuck(event: Any) -> Any:
    event.wait(60)
    yield 1


def test_a_worker_that_does_not_start_in_time_is_lost() -> None:
    import threading

    event = threading.Event()
    supervisor = Supervisor(PLACE, Policy(start_timeout=0.3, patience=0.1, start_advice=" Wait longer."))
    supervisor.start(stuck, event, "an order")
    assert not supervisor.may_be_stuck()
    with pytest.raises(WorkerDiedError, match=r"did not begin within 0.3 s\. Wait longer\.") as caught:
        supervisor.wait_started(lambda: False)
    assert supervisor.may_be_stuck()
    end = supervisor.lose(caught.value)
    event.set()
    assert (end.started, supervisor.worker, supervisor.lost_last) == (False, None, True)
    supervisor.start(tasks.echo, 1, "an order")
    assert supervisor.wait_started(lambda: False)
    assert not supervisor.lost_last
    supervisor.finish()
