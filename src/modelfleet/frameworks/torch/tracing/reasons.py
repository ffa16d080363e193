"""Say in a few words why a step can't be traced, and on which line of the user's code."""

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.user_code import line_of_error

WRITES_OUTSIDE = "it writes to a tensor that is not part of the model"

# What torch says, in order: the first that is found in the message counts.
_MEANINGS = {
    "would mutate a captured Tensor": WRITES_OUTSIDE,
    "hit the vmap fallback": "an operation has no batching rule",
    "Batching rule not implemented": "an operation has no batching rule",
    "data-dependent control flow": "its forward branches on the value of a tensor",
    "It looks like you're calling .item()": "its forward reads the value of a tensor with .item()",
    "_local_scalar_dense": "its forward reads the value of a tensor",
    "data-dependent": "its forward has a shape or a branch that depends on the values of a tensor",
    "dynamic shape": "its forward makes a tensor whose shape depends on the values of another",
    "draws random numbers": "it draws random numbers that have no stream per member",
}
_MAX_LENGTH = 160  # characters of torch's own message


def explain(error: Exception) -> CannotFuseError:
    """Return the error to raise for anything that a step raised while it was traced."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = text.split(". ")[0]
    if len(sentence) > _MAX_LENGTH:
        sentence = sentence[: _MAX_LENGTH - 1] + "…"
    line = line_of_error(error)
    where = "" if line is None else f" at {line}"
    meaning = next((meaning for words, meaning in _MEANINGS.items() if words in text), None)
    if meaning is None:
        return CannotFuseError(f"{type(error).__name__}{where}: {sentence}")
    return CannotFuseError(f"{meaning}{where} ({sentence})", shared=meaning == WRITES_OUTSIDE)


def add_line(error: CannotFuseError) -> None:
    """Add the line of the user's code to a reason that was raised while that code ran."""
    line = line_of_error(error)
    if line is not None:
        error.args = (f"{error} at {line}", *error.args[1:])
