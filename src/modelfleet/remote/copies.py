"""Copies of data for workers, taken before anything is read from them."""

from collections.abc import Mapping
from dataclasses import replace

from modelfleet.each import Each
from modelfleet.members import Member
from modelfleet.runs.feeding import has_loaders
from modelfleet.runs.job import Job
from modelfleet.workers import pickling


def copy_loaders(job: Job, members: Mapping[str, Member]) -> Job:
    """Return a job for workers. A loader with its own generator is copied before this process looks into it.

    Raises:
        CannotSendError: The data can't be sent to a worker.
    """
    if not has_loaders(job, members, "data", "validation"):
        return job
    if isinstance(job.data, Each):  # one by one first, to name the member whose data can't be sent
        for name, own in job.by_name("data").items():
            pickling.pickle_value(own, f"members {name!r} with their data")
    data, validation = pickling.copy_by_pickle((job.data, job.validation), "the data")
    return replace(job, data=data, validation=validation)
