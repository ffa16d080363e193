"""Three unlike Keras models, trained at once on one device, each with its own data, optimizer, loss and epochs.

Run it with any backend: KERAS_BACKEND=jax python examples/three_keras_models.py
"""

import keras
import numpy as np
from keras import layers

import modelfleet as mf

random = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return random.standard_normal(shape, dtype=np.float32)


def models() -> dict[str, keras.Model]:
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    digits = keras.Sequential(
        [layers.Input((32,)), layers.Dense(64, "relu"), layers.Dropout(0.1), layers.Dense(10)]
    )
    digits.compile(keras.optimizers.Adam(1e-2), classes, metrics=["accuracy"])
    signal = keras.Sequential(
        [
            layers.Input((16, 4)),
            layers.Conv1D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(4),
        ]
    )
    signal.compile(keras.optimizers.SGD(0.1, momentum=0.9), classes, metrics=["accuracy"])
    price = keras.Sequential([layers.Input((12,)), layers.Dense(48, "tanh"), layers.Dense(1)])
    price.compile("rmsprop", "mse")
    return {"digits": digits, "signal": signal, "price": price}


def main() -> None:
    keras.utils.set_random_seed(0)
    fleet = mf.Fleet(models())
    images, waves, houses = floats(1280, 32), floats(640, 16, 4), floats(960, 12)
    data = mf.each(
        {
            "digits": (images, images[:, :10].argmax(1)),
            "signal": (waves, waves.mean(1).argmax(1)),
            "price": (houses, houses[:, :3].sum(1, keepdims=True)),
        }
    )
    epochs = mf.each({"digits": 6, "signal": 8, "price": 10})
    history = fleet.fit(
        data, epochs=epochs, progress=False, callbacks=[keras.callbacks.EarlyStopping("loss", patience=3)]
    )
    print(fleet.plan(data, epochs=epochs))
    for name in fleet.names:
        first, last = history[name]["loss"][0], history[name]["loss"][-1]
        epochs_done = len(history[name]["loss"])
        print(f"{name}: loss {first:.3f} → {last:.3f} in {epochs_done} epochs, {type(fleet[name]).__name__}")


if __name__ == "__main__":
    main()
