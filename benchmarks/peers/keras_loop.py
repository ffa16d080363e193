"""Three Keras models by hand: a `tf.function` train step for each, taking turns over `tf.data` pipelines."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.keras_nets import BATCH, STEPS, Data, three
from benchmarks.peers import Round, compete


class Trainee:
    """A model with its pipeline and its compiled step."""

    def __init__(self, model: keras.Model, data: Data, epochs: int) -> None:
        self.epochs = epochs
        self.total = keras.metrics.Mean()
        pipeline = tf.data.Dataset.from_tensor_slices(data).shuffle(BATCH * STEPS).batch(BATCH)
        self.pipeline = pipeline.prefetch(tf.data.AUTOTUNE)

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                output = model(x, training=True)
                loss = model.compute_loss(x, y, output)
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)
            self.total.update_state(loss)
            model.compute_metrics(x, y, output)

        self.step = step

    def batches(self) -> Any:
        """All batches of all epochs."""
        for _ in range(self.epochs):
            self.total.reset_state()
            yield from self.pipeline


def prepare(what: str, quick: bool) -> Callable[[], Round]:
    trainees = [Trainee(model, data, 1 if quick else epochs) for model, data, epochs in three().values()]

    def train_round() -> Round:
        running = [(trainee, trainee.batches()) for trainee in trainees]
        while running:
            for turn in list(running):
                trainee, batches = turn
                batch = next(batches, None)
                if batch is None:
                    running.remove(turn)
                else:
                    trainee.step(*batch)
        losses = [float(trainee.total.result()) for trainee in trainees]
        return Round(STEPS * sum(trainee.epochs for trainee in trainees), sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
