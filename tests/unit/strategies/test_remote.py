"""The pipe to the processes of a `Remote` strategy."""

import os
from multiprocessing import Pipe

import pytest

from kdist.strategies.remote import limit_waits


def test_a_process_that_stops_in_the_middle_of_a_message_does_not_hold_up_this_one() -> None:
    here, there = Pipe()
    limit_waits(here, 0.05)
    with here, there:
        # Says that 1000 bytes follow, of which 10 come.
        os.write(there.fileno(), (1000).to_bytes(4, "big") + bytes(10))
        assert here.poll()
        with pytest.raises(BlockingIOError):
            here.recv_bytes()


def test_a_process_that_reads_nothing_does_not_hold_up_this_one() -> None:
    here, there = Pipe()
    limit_waits(here, 0.05)
    with here, there, pytest.raises(BlockingIOError):
        here.send_bytes(bytes(1 << 24))
