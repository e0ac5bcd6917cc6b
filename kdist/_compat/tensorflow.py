"""Private names of TensorFlow; read in 2.20 and 2.21."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.eager import context
from tensorflow.python.eager import tape as tape_lib
from tensorflow.python.eager.context import executor_scope
from tensorflow.python.eager.executor import Executor
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.framework.function import Defun, _DefinedFunction
from tensorflow.python.ops import script_ops
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from kdist._compat.replaced import replaced

# Imported here for others.
__all__ = ["UninitializedVariable", "executor_scope"]

_DETERMINISTIC_FLAG = "_ZN6google8protobuf2io17CodedOutputStream36default_serialization_deterministic_E"
#: The priority of the creator by which a `tf.function` notices variables.
_CREATOR_OF_FUNCTIONS = 50
# A server frees what a chief has there when the chief was silent for so long by the server's clock, which may be set:
# TensorFlow's 10 minutes are not enough. A day bounds what a worker keeps that was cut off and came back.
_KEEP_ALIVE_SECS = 86_400
#: Names of functions that nothing uses any more, and that tasks still have.
unused_functions: deque[str] = deque()
#: Captured tensors and their copies for the tasks of the present cluster, by the id of the tensor.
_copies_for_tasks: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
_function_numbers = itertools.count()


def forget_traced_functions() -> None:
    """Lets TensorFlow trace its functions for datasets of the tf.data service again.

    A function that was traced before tasks joined is unknown to them, and is missing where it is only referred to.
    TensorFlow keeps them since 2.17.
    """
    if kept := getattr(data_service_ops, "_get_uncompress_func", None):
        kept.cache_clear()


def allow_many_next(iterator: Any) -> None:
    """Lets a function call `next` again: TensorFlow rejects more than 32 calls, assuming an unrolled Python loop."""
    iterator._get_next_call_count = 0


def function_for_tasks(
    function: Callable[..., Any], *specs: Any, autograph: bool = False
) -> tf.types.experimental.ConcreteFunction:
    """Traces a function that tasks call. Of the tensors of this process that it captures, they get copies."""
    concrete = tf.function(function, autograph=autograph).get_concrete_function(*specs)
    captured = concrete._captured_inputs
    copies = [
        _copies_for_tasks.setdefault(id(t), (t, copy_for_tasks(t)))[1] if _may_be_sent(t) else t for t in captured
    ]
    concrete.set_external_captures(copies)
    return concrete


@contextmanager
def send_to_joining_tasks(function: tf.types.experimental.ConcreteFunction) -> Iterator[None]:
    """Makes a function, and its callees, known to the tasks that this process joins in this context.

    TensorFlow sends a function to the tasks when it is added to this process, and only then. So it is added again, and
    removed before: no tasks are there then, to be told to remove functions that they lack.
    """
    own, definitions = context.context(), dict[str, Any]()
    waiting: list[Any] = [function._inference_function]
    while waiting:
        found = waiting.pop()
        name = tf.compat.as_str(found.name)
        if name not in definitions and own.has_function(name):
            # Those of TensorFlow's older layers are of another kind.
            is_older = isinstance(found, _DefinedFunction)
            waiting += found._sub_functions.values() if is_older else found.children or []
            definitions[name] = own.get_function_def(name)
            own.remove_function(name)
    try:
        yield
    finally:
        for definition in definitions.values():
            own.add_function_def(definition)


@contextmanager
def keep_unused_functions() -> Iterator[None]:
    """Removes the functions that become unused in this context only by `remove_unused_functions`, and at its end.

    The thread that frees a function waits until every connected task has removed it, with Python's lock. So a host that
    fell silent would stop this process for 20 seconds, and a task that is stopped, for ever.
    """
    try:
        with replaced(context.context(), remove_function=unused_functions.append):
            yield
    finally:
        remove_unused_functions()


def remove_unused_functions() -> None:
    """Removes the functions that became unused, also from the connected tasks, all of which have to respond."""
    while unused_functions:
        type(context.context()).remove_function(context.context(), unused_functions.popleft())


def _may_be_sent(captured: Any) -> bool:
    """Tells whether a captured tensor, or the handle of a table, here, is sent to the tasks that call the function."""
    return isinstance(captured, tf.Tensor) and captured.dtype != tf.variant and "/job:localhost/" in captured.device


def assigned_variables(graph: Any) -> list[tf.Variable]:
    """The variables that a traced function assigns, also in functions that it calls, in branches and in loops."""
    captures = [(outside, inside) for outside, inside in graph.captures if inside.dtype == tf.resource]
    assigned = {
        id(outside)
        for outside, inside in captures
        if any(inside in get_read_write_resource_inputs(user)[1] for user in inside.consumers())
    }
    return [variable for variable in graph.variables if id(variable.handle) in assigned]


def later_input(graph: Any, key: Hashable, spec: tf.TensorSpec) -> tf.Tensor:
    """A new input of a function that is being traced, whose value each `call_with` gives by this key."""

    def without_value() -> tf.Tensor:
        raise RuntimeError(f"no value for input {key}")

    with graph.device(None), graph.control_dependencies(None):
        return graph.capture_call_time_value(without_value, spec, key)


def call_with(
    function: tf.types.experimental.ConcreteFunction, inputs: Mapping[Any, tf.Tensor], *arguments: Any
) -> Any:
    """Calls a traced function; `inputs` are the values of its `later_input`s."""
    graph, before = function.graph, function._captured_inputs
    keys = list(graph.function_captures.by_ref_internal)
    values = [inputs.get(key, given) for key, given in zip(keys, before[len(graph.external_captures) :], strict=True)]
    function.set_external_captures([*before[: len(graph.external_captures)], *values])
    try:
        return function(*arguments)
    finally:
        function.set_external_captures(before)


@contextmanager
def outside_of_functions() -> Iterator[None]:
    """As `tf.init_scope`; and a function that is being traced takes no variables from there for its own.

    It would be traced again, without them.
    """
    graph = tf.compat.v1.get_default_graph()
    creators = graph._variable_creator_stack
    graph._variable_creator_stack = [creator for creator in creators if creator[0] != _CREATOR_OF_FUNCTIONS]
    try:
        with tf.init_scope():
            yield
    finally:
        graph._variable_creator_stack = creators


def argument_for_task(value: Any, dtype: tf.DType | None = None) -> tf.Tensor:
    """A constant on the CPU of this process, whatever the device of the caller is, as an argument of a function.

    TensorFlow sends it together with the call. Made on the device of another task, a constant is sent by itself, and no
    other thread of this process runs Python in the meantime.
    """
    with tf.device(None), tf.device("CPU:0"):
        return tf.constant(value, dtype)


def copy_for_tasks(tensor: tf.Tensor) -> tf.Tensor:
    """The same value, on the device where it is; the memory is shared.

    TensorFlow remembers of every tensor which tasks have it, by their names. So it takes a task of the next cluster for
    that of the last one, and the task misses the tensor.
    """
    with tf.device(None), tf.device(tensor.device):
        return tf.identity(tensor)


def forget_copies_for_tasks() -> None:
    """Ends the use of copies that the tasks of a cluster have, when it is left."""
    _copies_for_tasks.clear()


@contextmanager
def not_compiled() -> Iterator[None]:
    """Keeps XLA's auto-clustering from the operations in this context, if a function is being traced.

    It takes some whose sizes are known only when they run, such as those of the rows for the ids of a batch, and fails.
    """
    with nullcontext() if tf.executing_eagerly() else tf.xla.experimental.jit_scope(compile_ops=False):
        yield


def function_of_its_own(function: Callable[..., Any]) -> Any:
    """A `tf.function` that stays one where another function calls it, also on another task.

    TensorFlow would copy its operations into the caller. With the same function on 32 tasks, the caller is 32 times as
    large, and takes as much longer to be optimized and cut into parts.
    """
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def run_independently(operation: tf.Operation | None) -> None:
    """Lets an operation with side effects run beside others of the function that is traced; None if it is not traced.

    TensorFlow would run all of those that take no resource one after the other, whatever their tasks.
    """
    if operation is not None:
        operation.graph.experimental_acd_manager.run_independently(operation)


def offer_python_function(name: str, function: Callable[..., Any]) -> None:
    """Lets `tf.raw_ops.PyFunc` call a function of this process by a given name, as its `token`.

    The public `tf.numpy_function` chooses a name that only this process knows; so it cannot be called on other tasks.
    TensorFlow keeps no reference to the function.
    """
    script_ops._py_funcs._funcs[name] = function


def watch_in_every_tape(value: tf.Tensor) -> None:
    """Makes a tensor of a graph behave as a trainable variable that was read: every recording tape watches it.

    `tape.gradient` of a Keras variable asks for the `handle` of its value, which a tensor does not have.
    """
    value.handle = value
    tape_lib.variable_accessed(SimpleNamespace(handle=value, trainable=True))


def with_handle_of(source: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The tensor `value`, for whose gradient a tape gives the gradient of `source`, which it watches."""
    value.handle = source
    return value


@contextmanager
def rename_legacy_functions() -> Iterator[None]:
    """In this context, functions of TF1's kind get new names whenever they are traced.

    The loops of `tf.nn.ctc_loss` consist of such functions. By default their names are hashes of what they do, the same
    in every trace, and TensorFlow sends a function to the tasks only if it has not known its name before they joined.
    """
    original = Defun.__init__

    def init(defun: Defun, *input_types: Any, **options: Any) -> None:
        original(defun, *input_types, **{"func_name": f"kdist_{next(_function_numbers)}", **options})

    with replaced(Defun, __init__=init):
        yield


def let_idle_threads_sleep() -> None:
    """Lets threads that have nothing to do sleep at once: TensorFlow's look for work for a while before.

    To be called before its first op in a process.
    """
    config = tf.compat.v1.ConfigProto()
    config.experimental.disable_thread_spinning = True
    context.context()._config = config


class QuietExecutor(Executor):
    """Runs ops that may fail with a task.

    An executor keeps the last error of its ops. TensorFlow's own one, which the whole process shares, would fail with
    it later.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(pywrap_tfe.TFE_NewExecutor(False, True, 0))

    def wait(self) -> None:
        try:
            super().wait()
        except tf.errors.OpError:
            self.clear_error()


def server_def() -> tf.train.ServerDef | None:
    """A copy of the server definition of this process, which no public function returns; None if there is none."""
    present = context.context().get_server_def()
    if present is None:
        return None
    copy = tf.train.ServerDef()
    copy.CopyFrom(present)
    return copy


def set_server_def(definition: tf.train.ServerDef) -> None:
    """Connects this process; `tf.config.experimental_connect_to_cluster` would rename its job and change its config."""
    with _deterministic_serialization():
        context.context().set_server_def(definition, _KEEP_ALIVE_SECS)


def forget_server_def(present: tf.train.ServerDef | None) -> None:
    """Makes TensorFlow's Python code believe that the process is connected to `present`, after an attempt failed."""
    context.context()._server_def = present


def forget_numbers() -> None:
    """Frees the numbers of Python that were made tensors, as for summaries: TensorFlow keeps 750 bytes for each."""
    pywrap_tfe.TFE_ClearScalarCache()


def session_config() -> tf.compat.v1.ConfigProto:
    """The config that this process runs with; with another one, TensorFlow replaces its local devices."""
    context.ensure_initialized()
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(_configs[0])
    # TensorFlow sets this when it makes its context, and does not tell Python.
    config.experimental.disable_optimize_for_static_graph = True
    return config


#: The config with which TensorFlow has made its context.
_configs: list[Any] = []


def _remember_config() -> None:
    """Remembers the config of TensorFlow's context when it is made: later settings of the program have no effect there,
    and TensorFlow returns the present settings. If it was made before kdist is used, the present ones must do.
    """
    own = context.context()
    original = own.ensure_initialized

    def ensure_initialized() -> None:
        if not _configs:
            _configs.append(own.config)
        original()

    own.ensure_initialized = ensure_initialized
    if own._initialized:
        ensure_initialized()


_remember_config()


def update_server_def(definition: tf.train.ServerDef) -> None:
    """Connects this process to other tasks than before, without holding Python's lock meanwhile.

    TensorFlow's own function holds it. It may wait there for a host that fell silent, and the threads that would end
    the wait are Python's.

    Raises:
        tf.errors.OpError: as TensorFlow's.
    """
    library = _tensorflow_library()
    own = context.context()
    if library is None:
        own.update_server_def(definition, _KEEP_ALIVE_SECS)
        return
    serialized = definition.SerializeToString()
    status = ctypes.c_void_p(library.TF_NewStatus())
    try:
        library.TFE_ContextUpdateServerDef(
            _pointer_in(own._handle), _KEEP_ALIVE_SECS, serialized, ctypes.c_size_t(len(serialized)), status
        )
        if code := library.TF_GetCode(status):
            message = library.TF_Message(status).decode(errors="replace")
            raise tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)
    finally:
        library.TF_DeleteStatus(status)
    own._server_def = definition
    own._initialize_logical_devices()
    own._clear_caches()


@functools.cache
def _tensorflow_library() -> ctypes.CDLL | None:
    """TensorFlow's C functions, which ctypes calls without Python's lock; None where they cannot be loaded."""
    for path in Path(tf.sysconfig.get_lib()).glob("libtensorflow_cc.*"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            library.TF_NewStatus.restype = ctypes.c_void_p
            library.TF_Message.restype = ctypes.c_char_p
            _ = library.TFE_ContextUpdateServerDef, library.TF_GetCode, library.TF_DeleteStatus
            return library
    return None


def _pointer_in(capsule: object) -> ctypes.c_void_p:
    """The pointer in a capsule of Python's."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule)))


@contextmanager
def _deterministic_serialization() -> Iterator[None]:
    """Lets protobuf write maps in a fixed order meanwhile.

    TensorFlow compares two configs as serialized bytes, and the order of a map's entries is random without it.
    """
    library = next(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*"), None)
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _DETERMINISTIC_FLAG)
    except (OSError, ValueError):
        # Not on this platform: the comparison may fail then, and `kdist.dispatch.connection.connect` warns.
        yield
        return
    before = flag.value
    flag.value = True
    try:
        yield
    finally:
        flag.value = before


@contextmanager
def exchanges_between_replicas() -> Iterator[list[str]]:
    """In this context, calls of a replica's context that need the other replicas are recorded, by their names."""
    kind, found = tf.distribute.ReplicaContext, list[str]()

    def recorded(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def method(*arguments: Any, **options: Any) -> Any:
            found.append(name)
            return original(*arguments, **options)

        return method

    with replaced(kind, **{name: recorded(name) for name in ("all_reduce", "all_gather", "merge_call")}):
        yield found
