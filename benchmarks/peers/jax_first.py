"""`jax.vmap` and `jax.jit` by hand, from nothing: the same members and steps as the job "equal"."""

import time
from collections.abc import Callable
from dataclasses import replace

import jax

from benchmarks.jobs import job_of
from benchmarks.peers import Round, compete_in_cases
from benchmarks.peers.jax_vmap import trainer
from benchmarks.rows import MLP_64


def prepare(quick: bool) -> Callable[[str], Round]:
    jax.devices()  # starting the backend is a part of the import, as torch's is

    def train(case: str) -> Round:
        job = job_of("equal", case, quick)
        row = replace(MLP_64, members=len(job.rates), examples=len(job.data[0][0]), epochs=job.epochs)
        started = time.perf_counter()
        done = trainer(row)()
        return replace(done, seconds=time.perf_counter() - started)

    return train


if __name__ == "__main__":
    compete_in_cases(prepare)
