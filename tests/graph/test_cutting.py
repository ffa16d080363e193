"""The dynamic programme finds what trying all cuts finds, and operations are grouped where few bytes cross."""

from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import modelfleet as mf
from modelfleet.frameworks.grouping import crossing_bytes, group
from modelfleet.frameworks.pieces import Piece, Timing
from modelfleet.frameworks.rounds import LEAST, shortest_times
from modelfleet.graph.cutting import arriving_bytes, best_cuts


@st.composite
def rows_of_pieces(draw: st.DrawFn) -> list[Piece]:
    """Pieces with times of whole numbers, so that sums are exact, and with values over any distance."""
    count = draw(st.integers(1, 8))
    pieces = []
    for number in range(count):
        needs = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=3)) if number else []
        seconds = st.integers(0, 9)
        timing = Timing(draw(seconds), draw(seconds))
        made = {f"v{number}": draw(st.integers(1, 50))}
        weights = draw(st.integers(0, 9))
        pieces.append(Piece(f"p{number}", timing, 0, weights, weights, 1, made, tuple(f"v{n}" for n in needs)))
    return pieces


def parts(count: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise([0, *cuts, count]))


def longest(pieces: list[Piece], cuts: tuple[int, ...]) -> float:
    return max(sum(p.timing.total for p in pieces[a:b]) for a, b in parts(len(pieces), cuts))


def sent(pieces: list[Piece], cuts: tuple[int, ...]) -> int:
    """Bytes over the links, by going through all of them."""
    total = 0
    for start, stop in parts(len(pieces), cuts):
        own = {name for piece in pieces[start:stop] for name in piece.needs}
        total += sum(piece.makes[name] for piece in pieces[:start] for name in piece.makes if name in own)
    return total


def fits(pieces: list[Piece], cuts: tuple[int, ...], memory: list[int]) -> bool:
    own = [sum(piece.memory for piece in pieces[start:stop]) for start, stop in parts(len(pieces), cuts)]
    return all(needed <= limit for needed, limit in zip(own, memory, strict=True))


@given(rows_of_pieces(), st.integers(1, 4), st.floats(0, 0.5), st.data())
def test_best_cuts_are_those_that_trying_all_finds(
    pieces: list[Piece], stages: int, slack: float, data: st.DataObject
) -> None:
    stages = min(stages, len(pieces))
    memory = data.draw(st.none() | st.lists(st.integers(1, 150), min_size=stages, max_size=stages))
    possible = [
        cuts
        for cuts in combinations(range(1, len(pieces)), stages - 1)
        if memory is None or fits(pieces, cuts, memory)
    ]
    if not possible:
        with pytest.raises(mf.InputError, match="is too little"):
            best_cuts(pieces, stages, memory, slack=slack)
        return
    found = best_cuts(pieces, stages, memory, slack=slack)
    assert found in possible
    limit = min(longest(pieces, cuts) for cuts in possible) * (1 + slack)
    good = [cuts for cuts in possible if longest(pieces, cuts) <= limit]
    assert found in good
    assert sent(pieces, found) == min(sent(pieces, cuts) for cuts in good)


@given(rows_of_pieces())
def test_arriving_bytes_are_counted_once_for_a_stage(pieces: list[Piece]) -> None:
    table = arriving_bytes(pieces)
    for start in range(len(pieces)):
        for stop in range(start + 1, len(pieces) + 1):
            names = {name for piece in pieces[start:stop] for name in piece.needs}
            own = [piece.makes[name] for piece in pieces[:start] for name in piece.makes if name in names]
            assert table[start][stop] == sum(own)


def test_memory_that_is_too_little_is_refused_with_what_is_needed() -> None:
    pieces = [Piece(str(number), Timing(1, 1), 1, 4, 4, 0) for number in range(4)]  # 16 bytes each
    with pytest.raises(mf.InputError, match=r"the largest stage needs 32 B, and all of them 64 B"):
        best_cuts(pieces, 2, [20, 20])
    assert best_cuts(pieces, 2, [16, 48]) == (1,)


def test_operations_are_grouped_where_the_fewest_bytes_cross() -> None:
    # Each value is needed by the next operation; every fifth is small.
    sizes = [1 if number % 5 == 4 else 100 for number in range(40)]
    crossing = crossing_bytes(40, [(n, n + 1, size) for n, size in enumerate(sizes[:-1])])
    assert crossing[4:7] == [100, 1, 100]
    ranges = group(range(1, 40), [1.0] * 40, crossing, 2, per_stage=4)
    assert [start for start, _ in ranges] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert ranges[-1][1] == 40


def test_programs_are_timed_in_turns() -> None:
    calls: list[str] = []
    times = {"a": iter([9.0, 5.0, 3.0, *[4.0] * 99]), "b": iter([1.0, *[2.0] * 99])}

    def timed(name: str) -> tuple[float, float]:
        calls.append(name)
        return next(times[name]), 7.0

    # The first of each warms up.
    assert shortest_times([partial(timed, "a"), partial(timed, "b")]) == [(3.0, 7.0), (2.0, 7.0)]
    assert calls == ["a", "b"] * (len(calls) // 2)
    assert len(calls) > 2 * LEAST


def test_few_operations_are_all_pieces() -> None:
    assert group([1, 3], [1.0] * 4, [0] * 5, 2) == [(0, 1), (1, 3), (3, 4)]


def test_one_operation_that_takes_all_of_the_time_leaves_enough_pieces() -> None:
    seconds = [1e-9] * 99 + [1.0]
    assert len(group(range(1, 100), seconds, [0] * 101, 4, per_stage=2)) >= 4
