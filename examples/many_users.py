"""One model for fifty users on two devices: offline (`map`, `imap`), then online, while a replica is killed."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

import modelfleet as mf
from modelfleet.workers.process import hired_pids


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4)).eval()


def main() -> None:
    net = model()
    random = np.random.default_rng(0)
    users = {
        f"user-{number}": random.standard_normal((int(rows), 16), dtype=np.float32)
        for number, rows in enumerate(random.integers(1, 400, 50))
    }
    with torch.no_grad():
        expected = {user: net(torch.from_numpy(rows)).numpy() for user, rows in users.items()}

    answers = mf.map(net, mf.each(users), devices="cpu:0,cpu:1")
    same = all(np.allclose(answers[user], expected[user], atol=1e-5) for user in users)
    rows = sum(map(len, users.values()))
    print(f"map: {rows:,} rows of {len(answers)} users, the same as from the model itself: {same}")

    def archive() -> Iterator[np.ndarray]:  # read as its rows are needed, so it may be larger than memory
        for day in range(200):
            yield np.full((100, 16), day, np.float32)

    for user, answer in mf.imap(net, {"archive": archive}, devices="cpu:0,cpu:1"):
        print(f"imap: {len(answer):,} rows of {user}")

    with mf.Replicas(net, devices="cpu:0,cpu:1") as replicas:
        futures = {user: replicas.submit(user, rows) for user, rows in users.items()}
        while not hired_pids():
            pass
        os.kill(hired_pids()[0], signal.SIGKILL)  # as a crash or the system's out-of-memory killer would
        same = all(np.allclose(future.result(), expected[user], atol=1e-5) for user, future in futures.items())
        print(f"a replica was killed, and all answers are right: {same}")

        replicas.update(nn.Sequential(net, nn.Softmax(-1)))
        print(
            "updated, probabilities now:",
            float(replicas.submit("user-0", users["user-0"]).result()[0].sum().round(3)),
        )
        print("healthy:", all(replicas.check().values()))

        wrong = users["user-0"].copy()[:, :7]
        print("too narrow:", type(replicas.submit("user-0", wrong).exception()).__name__)
        stats = replicas.stats()
        longest = max(user.longest_wait for user in stats.users.values())
        print(f"{stats.submitted} submitted, {stats.answered} answered, {stats.failed} failed")
        print(f"no user waited longer than {longest:.1f} s for the first row")


if __name__ == "__main__":
    main()
