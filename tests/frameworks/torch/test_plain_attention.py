"""Attention that drops out has its plain form on accelerators. Afterwards the program has its own choice again."""

import threading

import pytest
import torch

from modelfleet.frameworks.torch.random.drawing_kernels import PLAIN_ATTENTION


def chosen() -> tuple[bool, bool]:
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()


def test_threads_that_leave_in_the_order_in_which_they_entered_put_back_the_choice() -> None:
    before = chosen()
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with PLAIN_ATTENTION:
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    with PLAIN_ATTENTION:
        thread.start()
        entered.wait()
    assert chosen() == (False, False)  # the other one is within
    left.set()
    thread.join()
    assert chosen() == before == (True, True)


def test_it_is_put_back_after_an_error_and_within_itself() -> None:
    before = chosen()
    with pytest.raises(ZeroDivisionError), PLAIN_ATTENTION, PLAIN_ATTENTION:
        raise ZeroDivisionError
    assert chosen() == before
