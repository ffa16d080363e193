"""What is measured beside the rows of equal torch networks: Keras models against `fit`, the planner's choice, and
several devices, all in steady state; and the contests of `promises.py`. Knows no framework.
"""

from benchmarks.entrants import ALONE, FLEET, PLAIN, Contest, Entrant
from benchmarks.promises import FIT, MIXES, PROMISES, STRATEGIES

LOOP = "tf.function loop by hand"
ONE = "one device, one thread"
THREADS = 'two devices, "threads"'
POOL = "multiprocessing.Pool(2)"
SPAWN = "torch.multiprocessing, spawn"
SPLIT = "DataParallel-style, 2 threads"
RAY = "2 Ray actors by hand"
IDEAL = "the ideal split"
UNWEIGHTED = "without class weights"
ONE_THREAD = "the stages in turn, one thread"
LIMIT = "two processes that never wait"
TORCH_PIPELINE = "torch.distributed.pipelining, gloo"
THEORY = "the schedule by theory"
BEST_CUT = "the best of all cuts"


def _three(backend: str, over_fit: float) -> Contest:
    environment = {"KERAS_BACKEND": backend}
    entrants = {
        FLEET: Entrant("keras_fleet", ("three",), environment),
        FIT: Entrant("keras_fit", ("three",), environment),
    }
    bars = {FIT: over_fit}
    if backend == "tensorflow":
        entrants[LOOP] = Entrant("keras_loop", ("three",), environment)
        bars[LOOP] = 1.5
    return Contest(
        f"three-{backend}", f"three unlike Keras models on {backend}: own data, optimizers, epochs", entrants, bars
    )


def _equal(backend: str, over_fit: float) -> Contest:
    environment = {"KERAS_BACKEND": backend}
    entrants = {
        FLEET: Entrant("keras_fleet", ("equal",), environment),
        FIT: Entrant("keras_fit", ("equal",), environment),
    }
    return Contest(f"keras-{backend}", f"32 equal Keras MLPs on {backend}", entrants, {FIT: over_fit})


def _mix(name: str) -> Contest:
    environment = {"KERAS_BACKEND": "jax", "MODELFLEET_COMPILE": "now"}
    # The fixed strategies warm up first: what their runs have taken is then known to the planner.
    strategies = [*(["fused"] if name == "convs" else []), *STRATEGIES]  # the others can't all be fused
    entrants = {strategy: Entrant("mixes", (name, strategy, "again"), environment) for strategy in strategies}
    entrants[ALONE] = Entrant("mixes", (name, ALONE, "again"), environment)
    entrants[FLEET] = Entrant("mixes", (name, "auto", "again"), environment)
    bars = {label: 0.9 for label in entrants if label != FLEET}
    return Contest(f"auto-{name}", f'strategy="auto": {MIXES[name]}', entrants, bars)


def _single(net: str) -> Contest:
    entrants = {who: Entrant("single", (net, who)) for who in (FLEET, PLAIN)}
    return Contest(f"single-{net}", f"a fleet of one: {net}", entrants, {PLAIN: 0.95})


def _weighted() -> Contest:
    entrants = {who: Entrant("class_weights", (who,)) for who in (FLEET, UNWEIGHTED)}
    return Contest("class-weights", "64 × MLP, class weights from outside the models", entrants, {UNWEIGHTED: 0.9})


# One thread for each device, and none that spins while it waits: the peers' processes are all there at once.
_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
_RAY = _THREAD | {"RAY_USAGE_STATS_ENABLED": "0"}
_TWO = "cpu:0,cpu:1"


def _devices() -> list[Contest]:
    fleet = {
        ONE: Entrant("sharded", ("cpu:0", "fused"), _THREAD),
        THREADS: Entrant("sharded", (_TWO, "threads"), _THREAD),
        FLEET: Entrant("sharded", (_TWO, "processes"), _THREAD),
        POOL: Entrant("sharded_pool", (), _THREAD),
        SPLIT: Entrant("sharded_split", (), _THREAD),
        RAY: Entrant("sharded_ray", (), _RAY, apart=True),
    }
    users = {
        FLEET: Entrant("map_fleet", (_TWO,), _THREAD),
        ONE: Entrant("map_fleet", ("cpu:0",), _THREAD),
        POOL: Entrant("map_pool", (), _THREAD),
        SPLIT: Entrant("map_split", (), _THREAD),
        RAY: Entrant("map_ray", (), _RAY, apart=True),
    }
    balance = {
        FLEET: Entrant("balance", (FLEET,), _THREAD),
        IDEAL: Entrant("balance", (IDEAL,), _THREAD),
    }
    return [
        Contest(
            "devices-fleet",
            "64 MLPs 64-128-128-10 on two CPU devices",
            fleet,
            {ONE: 1.8, THREADS: 1, POOL: 1, SPLIT: 1, RAY: 1},
        ),
        Contest(
            "devices-map",
            "one CNN, 50 users' rows, two CPU devices",
            users,
            {ONE: 1.8, POOL: 1, SPLIT: 1, RAY: 1},
            "rows",
        ),
        Contest(
            "devices-balance",
            "users of 4 and 4,000 rows, one of two replicas five times slower",
            balance,
            {IDEAL: 1 / 1.1},
            "rows",
        ),
    ]


def _chains() -> list[Contest]:
    bars = {"predict": 1.7, "fit": 1.6}
    return [
        Contest(
            f"chain-{verb}",
            f"two stages of an MLP on two CPU devices: {verb}",
            {
                FLEET: Entrant("chain", (verb, "threads", "1f1b"), _THREAD),
                "modelfleet, processes": Entrant("chain", (verb, "processes", "1f1b"), _THREAD),
                ONE_THREAD: Entrant("chain", (verb, ONE_THREAD, "1f1b"), _THREAD),
                LIMIT: Entrant("chain_processes", (verb, "limit"), _THREAD),
                TORCH_PIPELINE: Entrant("chain_processes", (verb, "torch"), _THREAD),
            },
            {ONE_THREAD: bars[verb], LIMIT: 0.9, TORCH_PIPELINE: 1},
            "batches",
            either=(ONE_THREAD, LIMIT),
        )
        for verb in bars
    ]


def _schedules() -> list[Contest]:
    return [
        Contest(
            "chain-schedules",
            "a step of equal stages on two CPU devices, by schedule",
            {who: Entrant("chain_schedules", (who,), _THREAD) for who in (FLEET, THEORY)},
            {THEORY: 0.8},
            "steps",
            cases=("gpipe", "1f1b", "interleaved", "zero-bubble"),
        ),
        Contest(
            "split-cut",
            "the slower stage of a model cut in two",
            {who: Entrant("split_cut", (who,), _THREAD) for who in (FLEET, BEST_CUT)},
            {BEST_CUT: 0.95},
            "batches",
            cases=("mlp", "resnet", "transformer"),
        ),
    ]


def _first_answers() -> list[Contest]:
    titles = {"fresh": "first answer of two processes, fresh interpreter", "again": "the same, a second pool"}
    return [
        Contest(
            "first-answer" if when == "fresh" else "first-answer-again",
            title,
            {
                FLEET: Entrant("first_answer", ("modelfleet", when), _THREAD),
                SPAWN: Entrant("first_answer", ("spawn", when), _THREAD),
            },
            {SPAWN: 1},
            "answers",
        )
        for when, title in titles.items()
    ]


CONTESTS: dict[str, Contest] = {
    contest.name: contest
    for contest in (
        _three("tensorflow", 4),
        _three("jax", 2),
        _three("torch", 4),
        _equal("tensorflow", 30),
        _equal("jax", 8),
        _equal("torch", 25),
        *(_single(net) for net in ("mlp", "cnn", "lstm", "transformer")),
        _weighted(),
        *(_mix(name) for name in MIXES),
        *_devices(),
        *_chains(),
        *_schedules(),
        *_first_answers(),
        *PROMISES,
    )
}
