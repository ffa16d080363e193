"""A model per store: two hundred small models, each on its own rows of one table."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from torch import nn

import modelfleet as mf

STORES = 200


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


def make_sales() -> pd.DataFrame:
    """A made-up table: every store reacts to prices in its own way, and has its own number of rows."""
    random = np.random.default_rng(0)
    rows = random.integers(40, 121, STORES)
    store = np.repeat(np.arange(STORES), rows)
    taste = np.repeat(random.normal(-1, 0.5, STORES), rows)
    price, weekend = random.normal(size=len(store)), random.integers(0, 2, len(store))
    sold = taste * price + weekend + 0.1 * random.normal(size=len(store))
    return pd.DataFrame({"store": store, "price": price, "weekend": weekend.astype(float), "sold": sold})


def main() -> None:
    data = mf.by(make_sales(), key="store", x=["price", "weekend"], y=["sold"])
    fleet = mf.Fleet.build(make_net, list(data.values), seed=0)
    fleet.compile("adam", "mse", metrics=["r2"], lr=1e-2)
    history = fleet.fit(data, epochs=15, batch_size=16, progress=False)

    r2 = np.array([history[name]["r2"][-1] for name in fleet])
    print(f"{len(fleet)} stores, R² {np.median(r2):.2f} in the median, {r2.min():.2f} at worst")

    with tempfile.TemporaryDirectory() as folder:
        fleet.save(Path(folder) / "stores")
        one = mf.load(Path(folder) / "stores", factory=make_net, members=["17"])
        sold = one.predict(np.array([[0.0, 1.0]]))["17"]
        print(f"read back alone: {one.names}, which sells {sold.item():.2f} at the usual price on a weekend")


if __name__ == "__main__":
    main()
