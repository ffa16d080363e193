"""Two plain processes, each with one thread and one of two stages: what this machine can give at best, and what
torch's own pipelines give.

"limit": each process trains or runs its stage on its own rows, and never waits for the other.
"torch": `torch.distributed.pipelining` over gloo.
"""

import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.peers import Round, compete
from benchmarks.pipelines import BATCH, MICRO_BATCHES, dataset, optimizer_of, stages, width


def prepare(verb: str, who: str, quick: bool) -> Callable[[], Round]:
    folder = tempfile.mkdtemp()
    context = mp.get_context("spawn")
    ends = []
    for rank in range(2):
        mine, theirs = context.Pipe()
        work = _limit if who == "limit" else _torch
        context.Process(target=_serve, args=(work, rank, verb, quick, folder, theirs), daemon=True).start()
        ends.append(mine)

    def run() -> Round:
        for end in ends:
            end.send("go")
        found = [end.recv() for end in ends]
        return Round(found[1][0], found[1][1])

    run()
    return run


def _serve(
    make: Callable[..., Callable[[], tuple[int, float]]],
    rank: int,
    verb: str,
    quick: bool,
    folder: str,
    end: Connection,
) -> None:
    torch.set_num_threads(1)
    run = make(rank, verb, quick, folder)
    while True:
        end.recv()
        end.send(run())


def _limit(rank: int, verb: str, quick: bool, folder: str) -> Callable[[], tuple[int, float]]:
    """The arithmetic of one stage on every micro-batch, without the other stage."""
    x, _ = dataset(quick)
    stage = stages(quick)[rank]
    optimizer = optimizer_of(stage)
    batches = torch.from_numpy(x).split(BATCH)

    def run() -> tuple[int, float]:
        total = torch.zeros(())
        for batch in batches:
            if verb == "predict":
                with torch.inference_mode():
                    for rows in batch.chunk(MICRO_BATCHES):
                        total += stage(rows).mean()
                continue
            optimizer.zero_grad()
            for rows in batch.chunk(MICRO_BATCHES):
                outputs = stage(rows.clone().requires_grad_(rank > 0))
                outputs.backward(torch.ones_like(outputs) / outputs.numel())
                total += outputs.detach().mean()
            optimizer.step()
        return len(batches), total.item()

    return run


def _torch(rank: int, verb: str, quick: bool, folder: str) -> Callable[[], tuple[int, float]]:
    """A stage of torch's 1F1B pipeline."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "meet"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x, y = map(torch.from_numpy, dataset(quick))
    module = stages(quick)[rank]
    device = torch.device("cpu")
    micro = torch.zeros(BATCH // MICRO_BATCHES, width(quick))
    stage = PipelineStage(module, rank, 2, device, input_args=(micro,), output_args=(module(micro),))
    optimizer = optimizer_of(module)
    schedule = (
        Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.cross_entropy)
        if verb == "fit"
        else ScheduleGPipe(stage, MICRO_BATCHES)
    )

    def run() -> tuple[int, float]:
        total = 0.0
        for rows, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
            inputs = (rows,) if rank == 0 else ()
            losses: list[torch.Tensor] = []
            if verb == "fit":
                optimizer.zero_grad()
                if rank:
                    schedule.step(target=labels, losses=losses)
                else:
                    schedule.step(*inputs)
                optimizer.step()
                total += float(torch.stack(losses).mean()) if losses else 0.0
            else:
                with torch.no_grad():
                    outputs = schedule.eval(*inputs) if hasattr(schedule, "eval") else schedule.step(*inputs)
                total += float(outputs.abs().mean()) if isinstance(outputs, torch.Tensor) else 0.0
        return len(x) // BATCH, total / (len(x) // BATCH)

    return run


if __name__ == "__main__":
    compete(prepare)
