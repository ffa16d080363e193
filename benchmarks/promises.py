"""The contests of "never slower than plain torch": sweeps, first runs, short runs, and work that has few members.

Most are `fresh`: a round is a new process with nothing cached, from before the fleet is built to the end of `fit`.
"""

from benchmarks.entrants import ALONE, FLEET, PLAIN, Contest, Entrant

JAX_JIT = "jax.vmap by hand, with its jit"
LANES = "a lane per width"
SAME = "one value for all members"
NONE = "none"
COMPILED = "compiled"
LOOP = "a loop over the models"
WHOLE = "a fleet of whole models"
FIT = "keras fit, one after the other"
STRATEGIES = ("interleaved", "threads", "processes")
MIXES = {
    "mlps": "12 torch MLPs of two widths",
    "convs": "4 equal torch CNNs",
    "unlike": "a torch MLP, a CNN and an LSTM",
    "keras": "three unlike Keras models on JAX",
    "mixed": "8 torch MLPs and two Keras models on JAX",
}
NETS = ("mlp", "cnn", "lstm", "transformer")
NUMBERS = {"dropout": "dropout rates", "smoothing": "label smoothing", "class-weights": "class weights"}
SHORT_RUNS = ("100 steps", "1,000 steps", "5,000 steps")
PREDICTIONS = tuple(
    f"{verb}, {origin}, {models} × {rows}"
    for verb in ("predict", "evaluate")
    for origin in ("handed out", "built")
    for models in (1, 10, 100, 1000)
    for rows in (1, 32, 1024)
)


def _sweeps() -> list[Contest]:
    titles = {
        "sweep": "96 MLPs: 3 learning rates × 4 widths × 4 dropout rates × 2 optimizers",
        "sweep-digits": "the same with LayerNorm, on 8×8 images",
    }
    lengths = {"": ("30 epochs", 6, 2), "-long": ("300 epochs", 9, 1)}
    return [
        Contest(
            f"{name}{suffix}",
            f"{title}, first run",
            {who: Entrant("jobs", (name, who)) for who in (FLEET, PLAIN)},
            {PLAIN: bar},
            cases=(case,),
            rounds=rounds,
            fresh=True,
        )
        for name, title in titles.items()
        for suffix, (case, bar, rounds) in lengths.items()
    ]


def _first_steps() -> list[Contest]:
    ones = [
        Contest(
            f"one-{net}",
            f"a fleet of one, first run: {net}",
            {who: Entrant("jobs", (net, who)) for who in (FLEET, PLAIN)},
            {PLAIN: 0.95},
            cases=SHORT_RUNS,
            rounds=2,
            fresh=True,
        )
        for net in NETS
    ]
    unlike = Contest(
        "four-unlike",
        "an MLP, a CNN, an LSTM and a transformer in one fleet, first run",
        {who: Entrant("jobs", ("four", who)) for who in (FLEET, PLAIN)},
        {PLAIN: 0.95},
        cases=SHORT_RUNS,
        rounds=1,
        fresh=True,
    )
    equal = Contest(
        "first-steps",
        "64 × MLP 32-64-64-10, from nothing to the last step",
        {FLEET: Entrant("jobs", ("equal", FLEET)), JAX_JIT: Entrant("jax_first", ())},
        {JAX_JIT: 1},
        cases=("100 steps", "1,000 steps", "10,000 steps"),
        rounds=2,
        fresh=True,
    )
    widths = Contest(
        "widths",
        "48 widths × 2 MLPs, first run: one fleet",
        {who: Entrant("jobs", ("widths", who)) for who in (FLEET, LANES)},
        {LANES: 1.5},
        cases=("30 epochs",),
        rounds=1,
        fresh=True,
    )
    lengths = Contest(
        "lengths",
        "16 × GRU 32, batches of ten sequence lengths, 200 steps, first run",
        {who: Entrant("lengths", (who,)) for who in (FLEET, PLAIN)},
        {PLAIN: 3},
        rounds=2,
        fresh=True,
    )
    return [*ones, unlike, equal, widths, lengths]


def _numbers() -> list[Contest]:
    return [
        Contest(
            f"numbers-{what}",
            f"64 × MLP, {title} per member",
            {who: Entrant("numbers", (what, who)) for who in (FLEET, SAME, NONE)},
            {SAME: 1 / 1.15, NONE: 1 / 1.15},
        )
        for what, title in NUMBERS.items()
    ]


def _keras(backend: str, over_fit: float) -> Contest:
    environment = {"KERAS_BACKEND": backend}
    entrants = {
        FLEET: Entrant("keras_fleet", ("first",), environment),
        FIT: Entrant("keras_fit", ("first",), environment),
    }
    title = f"three unlike Keras models on {backend}, first run"
    return Contest(f"three-{backend}-first", title, entrants, {FIT: over_fit}, rounds=2, fresh=True)


def _mix(name: str) -> Contest:
    environment = {"KERAS_BACKEND": "jax"}
    strategies = [*(["fused"] if name == "convs" else []), *STRATEGIES]  # the others can't all be fused
    ways = {FLEET: "auto", **{strategy: strategy for strategy in strategies}, ALONE: ALONE}
    entrants = {label: Entrant("mixes", (name, way, "first"), environment) for label, way in ways.items()}
    bars = {label: 0.9 for label in entrants if label != FLEET}
    title = f'strategy="auto", first run: {MIXES[name]}'
    return Contest(f"auto-{name}-first", title, entrants, bars, rounds=2, fresh=True)


# What a person meets: programs are compiled beside the work, where that pays.
_AUTO = {"MODELFLEET_COMPILE": "auto"}

PROMISES: list[Contest] = [
    *_sweeps(),
    *_first_steps(),
    *_numbers(),
    Contest(
        "uncompiled",
        "64 × MLP 32-64-64-10, uncompiled steps",
        {
            FLEET: Entrant("fleet", ("mlp-64",), {"MODELFLEET_COMPILE": "never"}),
            COMPILED: Entrant("fleet", ("mlp-64",)),
        },
        {COMPILED: 1 / 1.4},
    ),
    Contest(
        "predict",
        "predict and evaluate: models × rows, from the second call on",
        {who: Entrant("predicting", (who,), _AUTO) for who in (FLEET, LOOP)},
        {LOOP: 0.95},
        "models",
        cases=PREDICTIONS,
        case_bars={case: 5 for case in PREDICTIONS if case.endswith(" 100 × 32")},
        rounds=2,
    ),
    Contest(
        "heads",
        "fifty heads on one encoder, as a graph",
        {who: Entrant("heads", (who,), _AUTO) for who in (FLEET, PLAIN, WHOLE)},
        {PLAIN: 4, WHOLE: 1.5},
    ),
    _keras("tensorflow", 4),
    _keras("jax", 2),
    _keras("torch", 4),
    *(_mix(name) for name in MIXES),
    Contest(
        "members-20000",
        "20,000 × MLP 16-32-32-4",
        {FLEET: Entrant("twenty_thousand", (), _AUTO)},
        {},
        "members",
        cases=("build", "plan", "load", "drop one and fit again"),
        rounds=1,
        most_seconds=5,
    ),
]
