import os
import threading

import keras

from kdist.threads import in_thread


def test_calls_one_after_the_other_share_threads() -> None:
    used = {in_thread(threading.current_thread).result(10) for _ in range(50)}
    # A call that follows at once may find the thread not idle yet.
    assert len(used) < 5


def test_a_call_that_never_returns_holds_up_no_other() -> None:
    for_ever = threading.Event()
    stuck = [in_thread(for_ever.wait) for _ in range(3)]
    assert in_thread(lambda: 1).result(10) == 1
    for_ever.set()
    assert all(outcome.result(10) for outcome in stuck)


def test_what_a_call_sets_in_keras_does_not_reach_the_next() -> None:
    in_thread(lambda: keras.config.set_dtype_policy("mixed_bfloat16")).result(10)
    seen = {in_thread(lambda: keras.config.dtype_policy().name).result(10) for _ in range(3)}
    assert seen == {keras.config.dtype_policy().name}


def test_a_forked_child_has_threads_of_its_own() -> None:
    in_thread(lambda: None).result(10)
    child = os.fork()
    if not child:
        try:
            os._exit(in_thread(lambda: 7).result(10))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
