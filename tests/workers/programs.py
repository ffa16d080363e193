"""Programs of users, as they are written: no guard, all in one file. Tests run them in many ways."""

TOP = """
import os

import numpy as np
import torch
from torch import nn

import modelfleet as mf

with open(os.environ["RUNS"], "a") as file:
    file.write("run\\n")


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.outer(squashed(self.inner(x)))


def squashed(x):
    return torch.tanh(x)


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


x = np.linspace(-1, 1, 80, dtype=np.float32).reshape(20, 4)
y = np.arange(20) % 3
"""

FIT = """
fleet = mf.Fleet([Net(4), Net(5)])
fleet.compile("sgd", loss, lr=0.1)
history = fleet.fit((x, y), epochs=2, batch_size=8, strategy="processes", progress=False)
assert history.failed == {}
"""

MAP = """
net = Net()
with torch.no_grad():
    wanted = net(torch.from_numpy(x)).numpy()
answers = mf.map(net, mf.each({"ada": x, "bob": x[:3]}), devices="cpu:0,cpu:1", batch_size=4)
np.testing.assert_allclose(answers["ada"], wanted, rtol=1e-5, atol=1e-6)
"""

REPLICAS = """
with mf.Replicas(Net, devices="cpu:0,cpu:1") as replicas:
    assert replicas.submit("ada", x).result().shape == (20, 3)
"""

END = """
print("all is well")
"""

EVERYTHING = TOP + FIT + MAP + REPLICAS + END

# What is to be killed: each says that it is under way, and goes on until it is killed.
TRAINING = (
    TOP
    + """
class Say(mf.Callback):
    def on_epoch_end(self, run):
        print("under way", flush=True)

fleet = mf.Fleet([Net(4), Net(5)])
fleet.compile("sgd", loss, lr=0.1)
fleet.fit((x, y), epochs=10**6, batch_size=8, strategy="processes", progress=False, callbacks=[Say()])
"""
)

TEAM = (
    TOP
    + """
class Say(mf.Callback):
    def on_epoch_end(self, run):
        print("under way", flush=True)

fleet = mf.Fleet([Net(4), Net(4)], devices="cpu:0,cpu:1")
fleet.compile("sgd", loss, lr=0.1)
fleet.fit((x, y), epochs=10**6, batch_size=8, strategy="data_parallel", progress=False, callbacks=[Say()])
"""
)

MAPPING = (
    TOP
    + """
net = Net()
while True:
    mf.map(net, mf.each({"ada": x, "bob": x[:3]}), devices="cpu:0,cpu:1", batch_size=4)
    print("under way", flush=True)
"""
)

LOADING = (
    TOP
    + """
import time

def never():
    time.sleep(10**6)

class Slow(Net):
    def __setstate__(self, state):
        never()

print("under way", flush=True)
with mf.Replicas(Slow(), devices="cpu:0,cpu:1") as replicas:
    replicas.submit("ada", x).result()
"""
)

IDLE = (
    TOP
    + MAP
    + """
import time

print("under way", flush=True)
time.sleep(10**6)
"""
)

HOLDING = (
    TOP
    + """
import ctypes

from modelfleet.workers.process import ProcessPlace

def hold(order):
    yield "begun"
    ctypes.PyDLL(None).sleep(10**6)  # within C, and nobody else of its process gets on

worker = ProcessPlace("cpu:0", "cpu:0").hire()
worker.start(hold, None, "an order")
worker.receive()
worker.answer(None)
print("under way", flush=True)
worker.receive()
"""
)

KILLED = {
    "training": TRAINING,
    "a team": TEAM,
    "mapping": MAPPING,
    "loading": LOADING,
    "idle": IDLE,
    "holding": HOLDING,
}
