from typing import Any

import numpy as np
import pytest

from modelfleet.errors import InputError
from modelfleet.feeds.tables import by

SALES = {
    "store": ["b", "a", "b", "c", "a", "b"],
    "price": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "day": [1, 2, 3, 4, 5, 6],
    "sold": [10, 20, 30, 40, 50, 60],
}
RIGHT: dict[str, Any] = {"key": "store", "x": ["price"], "y": "sold"}


def table_of(kind: str, columns: dict[str, Any]) -> Any:
    return pytest.importorskip(kind).DataFrame(columns)


@pytest.fixture(params=["pandas", "polars"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_member_gets_its_rows_in_their_order(kind: str) -> None:
    data = by(table_of(kind, SALES), key="store", x=["price", "day"], y="sold").values
    assert isinstance(data, dict)
    assert list(data) == ["b", "a", "c"]
    x, y = data["b"]
    np.testing.assert_array_equal(x, [[1, 1], [3, 3], [6, 6]])
    np.testing.assert_array_equal(y, [10, 30, 60])
    assert (x.dtype, y.dtype) == (np.float64, np.int64)
    assert data["c"][0].tolist() == [[4, 4]]


def test_one_name_is_one_axis_and_a_list_is_two(kind: str) -> None:
    data = by(table_of(kind, SALES), key="store", x="price", y=["sold"]).values
    assert isinstance(data, dict)
    x, y = data["a"]
    assert x.shape == (2,)
    assert y.shape == (2, 1)


def test_agrees_with_picking_rows_one_by_one(kind: str) -> None:
    rng = np.random.default_rng(0)
    key, x, y = rng.integers(0, 50, 1000), rng.normal(size=1000).astype(np.float32), rng.normal(size=1000)
    data = by(table_of(kind, {"k": key, "x": x, "y": y}), key="k", x="x", y="y").values
    assert isinstance(data, dict)
    assert list(data) == [str(value) for value in dict.fromkeys(key.tolist())]
    for name, (own_x, own_y) in data.items():
        np.testing.assert_array_equal(own_x, x[key == int(name)])
        np.testing.assert_array_equal(own_y, y[key == int(name)])
        assert own_x.dtype == np.float32


def test_the_index_of_a_pandas_table_does_not_matter() -> None:
    table = table_of("pandas", SALES).iloc[::-1]
    data = by(table, key="store", x=table.columns[1:3], y="sold").values
    assert isinstance(data, dict)
    assert list(data) == ["b", "a", "c"]
    assert data["b"][1].tolist() == [60, 30, 10]


@pytest.mark.parametrize(
    ("arguments", "near"),
    [({"key": "stor"}, "store"), ({"x": ["price", "dya"]}, "day"), ({"y": "sodl"}, "sold")],
)
def test_unknown_columns(kind: str, arguments: dict[str, Any], near: str) -> None:
    with pytest.raises(InputError, match=rf"unknown column .* Did you mean '{near}'\?"):
        by(table_of(kind, SALES), **(RIGHT | arguments))


@pytest.mark.parametrize("missing", [None, float("nan")])
@pytest.mark.parametrize("column", ["price", "sold"])
def test_missing_values_are_named(kind: str, column: str, missing: Any) -> None:
    values = [1.0, 2.0, 3.0, missing, 5.0, 6.0]
    with pytest.raises(InputError, match=rf"column '{column}' has a missing value in row 3, where 'store' is 'c'"):
        by(table_of(kind, {**SALES, column: values}), key="store", x=["price", "day"], y="sold")


def test_missing_keys_are_named(kind: str) -> None:
    with pytest.raises(InputError, match="column 'store' has no value in row 1"):
        by(
            table_of(kind, {**SALES, "store": ["b", None, "b", "c", "a", "b"]}),
            key="store",
            x="day",
            y="sold",
        )


def test_columns_of_text_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match="column 'store' has dtype"):
        by(table_of(kind, SALES), key="day", x=["price", "store"], y="sold")


@pytest.mark.parametrize(("arguments", "which"), [({"x": []}, "x"), ({"y": []}, "y")])
def test_no_columns(kind: str, arguments: dict[str, Any], which: str) -> None:
    with pytest.raises(InputError, match=f"^{which} names no columns"):
        by(table_of(kind, SALES), **(RIGHT | arguments))


def test_an_empty_table(kind: str) -> None:
    with pytest.raises(InputError, match="no rows"):
        by(table_of(kind, {name: [] for name in SALES}), key="store", x="price", y="sold")


def test_keys_that_read_the_same() -> None:
    with pytest.raises(InputError, match="several values that print as '1'"):
        by(table_of("pandas", {"k": [1, "1"], "x": [1, 2]}), key="k", x="x", y="x")


def test_two_columns_of_one_name() -> None:
    table = table_of("pandas", SALES).rename(columns={"day": "price"})
    with pytest.raises(InputError, match="2 columns named 'price'"):
        by(table, key="store", x="price", y="sold")


@pytest.mark.parametrize("table", [SALES, np.zeros((3, 3)), None])
def test_other_tables(table: Any) -> None:
    with pytest.raises(InputError, match="Give a pandas or polars DataFrame"):
        by(table, key="store", x="price", y="sold")


def test_a_key_that_is_no_number_belongs_to_no_member(kind: str) -> None:
    table = table_of(kind, {**SALES, "store": [1.0, 2.0, float("nan"), 1.0, 2.0, 1.0]})
    with pytest.raises(InputError, match="column 'store' has no value in row 2, so the row belongs to no member"):
        by(table, **RIGHT)


def test_a_key_of_several_columns_is_refused_with_a_sentence(kind: str) -> None:
    table = table_of(kind, SALES)
    for key in (["store", "day"], ("store", "day")):
        with pytest.raises(InputError, match=r"expected the name of one column. To cut by several, join them"):
            by(table, key=key, x="price", y="sold")  # pyrefly: ignore
    with pytest.raises(InputError, match=r"expected a column, or a flat list of columns"):
        by(table, key="store", x=[["price"]], y="sold")  # pyrefly: ignore
