"""The fuzzer's own random numbers are right: else it would compare with a mistake."""

import jax
import jax.numpy as jnp
import numpy as np
from tests.fuzz.draws import threefry


def test_threefry_gives_its_published_numbers() -> None:
    known = {  # key, counter: words (Random123's kat_vectors, threefry2x32, 20 rounds)
        (0, 0, 0, 0): (0x6B200159, 0x99BA4EFE),
        (0xFFFFFFFF,) * 4: (0x1CB996FC, 0xBB002BE7),
        (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3): (0xC4923A9C, 0x483DF7A0),
    }
    for (first, second, a, b), words in known.items():
        assert tuple(int(word) for word in threefry((first, second), (a, b))) == words


def test_threefry_gives_what_jax_gives() -> None:
    key = jax.random.wrap_key_data(jnp.array([7, 11], jnp.uint32), impl="threefry2x32")
    expected = jax.random.key_data(jax.random.fold_in(key, 5))
    np.testing.assert_array_equal(np.array(threefry((7, 11), (0, 5))).ravel(), expected)
