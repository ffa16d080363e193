"""Two stages on two CPU devices of one thread each: as a chain, or in turn on one thread."""

from collections.abc import Callable

import numpy as np
import torch

import modelfleet as mf
from benchmarks.contests import ONE_THREAD
from benchmarks.peers import Round, compete
from benchmarks.pipelines import BATCH, MICRO_BATCHES, RATE, dataset, optimizer_of, stages, train_step


def prepare(verb: str, who: str, pipeline: str, quick: bool) -> Callable[[], Round]:
    torch.set_num_threads(1)
    x, y = dataset(quick)
    models = stages(quick)
    steps = len(x) // BATCH
    if who == ONE_THREAD:
        return _in_turn(verb, models, x, y)
    chain = mf.Chain(models, devices="cpu:0,cpu:1")
    chain.compile("adam", "cross_entropy", lr=RATE)

    def fit() -> Round:
        history = chain.fit(
            (x, y),
            batch_size=BATCH,
            shuffle=False,
            micro_batches=MICRO_BATCHES,
            pipeline=pipeline,  # pyrefly: ignore
            strategy=who,  # pyrefly: ignore
            progress=False,
        )
        timeline = chain.last_plan.measured if chain.last_plan is not None else None
        notes = {} if timeline is None else {"idle part of a step": timeline.bubble}
        return Round(steps, history["chain"]["loss"][-1], notes=notes)

    def predict() -> Round:
        outputs = chain.predict(
            x,
            batch_size=BATCH,
            micro_batches=MICRO_BATCHES,
            strategy=who,  # pyrefly: ignore
        )
        return Round(steps, float(np.abs(outputs).mean()))

    run = fit if verb == "fit" else predict
    run()
    return run


def _in_turn(verb: str, models: list[torch.nn.Module], x: np.ndarray, y: np.ndarray) -> Callable[[], Round]:
    rows, labels = torch.from_numpy(x).split(BATCH), torch.from_numpy(y).split(BATCH)
    optimizers = [optimizer_of(model) for model in models]

    def fit() -> Round:
        losses = [train_step(models, optimizers, own, labels_) for own, labels_ in zip(rows, labels, strict=True)]
        return Round(len(rows), sum(losses) / len(losses))

    def predict() -> Round:
        with torch.inference_mode():
            outputs = torch.cat([models[1](models[0](own)) for own in rows])
        return Round(len(rows), outputs.abs().mean().item())

    run = fit if verb == "fit" else predict
    run()
    return run


if __name__ == "__main__":
    compete(prepare)
