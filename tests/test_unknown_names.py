import pytest

from modelfleet.errors import InputError
from modelfleet.unknown_names import explain_arguments, foreign_argument, unknown


class Verbs:
    @explain_arguments
    def fit(self, data: object, *, validation: object = None, epochs: int = 1) -> tuple[object, object, int]:
        """Train."""
        return data, validation, epochs


@pytest.mark.parametrize(
    ("verb", "name", "ours"),
    [
        ("fit", "validation_data", "Use validation."),
        ("fit", "verbose", "Use progress: True or False."),
        ("fit", "learning_rate", "Use lr of fleet.compile."),
        ("fit", "validation_steps", "Use validation with fewer rows."),
        ("fit", "max_steps", "Use epochs and steps_per_epoch."),
        ("evaluate", "sample_weight", r"Use data with the weights: fleet.evaluate\(\(x, y, w\)\)."),
        ("predict", "callbacks", "Use nothing: only fit calls callbacks."),
        ("predict", "verbose", "Use nothing: it shows no progress."),
        ("evaluate", "x", r"Use the first argument: data=\(x, y\)."),
    ],
)
def test_an_argument_of_another_library_is_explained_in_our_words(verb: str, name: str, ours: str) -> None:
    with pytest.raises(InputError, match=f"fleet.{verb} has no argument '{name}'. {ours}"):
        raise InputError(foreign_argument(verb, name))


def test_our_own_and_unknown_arguments_are_not_foreign() -> None:
    assert foreign_argument("fit", "validation") is None
    assert foreign_argument("fit", "epoch") is None
    assert foreign_argument("compile", "verbose") is None


def test_a_verb_explains_wrong_arguments() -> None:
    verbs = Verbs()
    assert verbs.fit(1, validation=2, epochs=3) == (1, 2, 3)
    assert verbs.fit(data=1) == (1, None, 1)
    with pytest.raises(InputError, match=r"has no argument 'validation_data'. Use validation"):
        verbs.fit(1, validation_data=2)  # pyrefly: ignore[unexpected-keyword]
    with pytest.raises(InputError, match=r"unknown argument of fleet.fit 'epoch'. Did you mean 'epochs'"):
        verbs.fit(1, epoch=2)  # pyrefly: ignore[unexpected-keyword]
    with pytest.raises(InputError, match=r"got 2 arguments by position, expected data. .* fleet.fit\(\(x, y\)\)"):
        verbs.fit(1, 2)  # pyrefly: ignore[bad-argument-count]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'data'"):
        verbs.fit()  # pyrefly: ignore[missing-argument]
    assert Verbs.fit.__doc__ == "Train."


@pytest.mark.parametrize(
    ("kind", "name", "known", "ours"),
    [
        ("loss", "sparse_categorical_crossentropy", ["mse", "cross_entropy", "bce"], "cross_entropy"),
        ("loss", "SparseCategoricalCrossentropy", ["mse", "cross_entropy", "bce"], "cross_entropy"),
        ("loss", "mean_squared_error", ["mse", "mae"], "mse"),
        ("metric", "acc", ["accuracy", "r2"], "accuracy"),
        ("hyperparameter of adam", "learning_rate", ["lr", "eps"], "lr"),
        ("hyperparameter of adam", "clipnorm", ["lr", "eps"], "clip_norm"),
        ("precision", "bfloat16", ["float32", "bf16"], "bf16"),
        ("loss", "crossentropi", ["mse", "cross_entropy"], "cross_entropy"),  # a plain typo
        ("member", "acc", ["acco", "zed"], "acco"),  # our word is of no use here
    ],
)
def test_an_unknown_name_suggests_our_word(kind: str, name: str, known: list[str], ours: str) -> None:
    assert f"unknown {kind} {name!r}. Did you mean {ours!r}? Known: " in str(unknown(kind, name, known))
