"""A step in phases: its graph, cut where it needs values that depend on its own results.

A GAN's step updates the discriminator, and then the generator against the updated discriminator. Traced as one
function, the new values are inputs that are not known at the beginning. Cut at them, the step returns the first
gradients, and goes on when they have been applied. A step that looks up rows of tables is cut where they arrive, see
`kdist.model.lookup_rounds`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

#: The phase of an operation that needs constants only: each phase has its own copy.
_CONSTANT = -1


class PhaseOfTensor:
    """The first phase that can compute a tensor of a graph."""

    def __init__(self) -> None:
        self._of: dict[tf.Operation, int] = {}

    def arrive(self, tensors: Iterable[tf.Tensor], phase: int) -> None:
        """States that these inputs are there from a phase on; others are there from the first."""
        self._of |= {tensor.op: phase for tensor in tensors}

    def of(self, values: Any) -> int:
        """The first phase in which all of these nested tensors can be computed."""
        return max([0, *(self.of_operation(tensor.op) for tensor in flat(values))])

    def of_operation(self, operation: tf.Operation) -> int:
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            if last in self._of:
                waiting.pop()
            elif missing := [tensor.op for tensor in last.inputs if tensor.op not in self._of]:
                waiting += missing
            else:
                # Nothing that changes, or is drawn, is computed twice.
                own = 0 if last.type == "Placeholder" or last.op_def.is_stateful else _CONSTANT
                self._of[last] = max([own, *(self._of[tensor.op] for tensor in last.inputs)])
        return self._of[operation]


class Phases:
    """A traced function that runs in phases.

    Args:
        inputs: nested, of each phase: of the function for the first one; for the others the tensors that arrive.
        outputs: nested, of each phase.
    """

    def __init__(
        self,
        graph: Any,
        first_phases: PhaseOfTensor,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        jit_compile: bool | None = None,
    ) -> None:
        self._captures = {inside.name: outside for outside, inside in graph.captures}
        self._inputs = [[tensor.name for tensor in flat(of_phase)] for of_phase in inputs]
        self._outputs = list(outputs)
        live = ancestors(graph, flat(self._outputs))
        phase_of = {operation: first_phases.of_operation(operation) for operation in live}
        graph_def = graph.as_graph_def()
        nodes = {node.name: node for node in graph_def.node}
        needed: set[str] = {tensor.name for tensor in flat(self._outputs)}
        #: The names of the inputs and outputs of each phase, and the function that computes it.
        self._pieces: list[tuple[list[str], list[str], Any]] = []
        # From the last to the first, as each has to return what later ones need.
        for phase in reversed(range(len(self._outputs))):
            own = [o for o in live if phase_of[o] in (phase, _CONSTANT) and o.type != "Placeholder"]
            inside = {tensor.name for operation in own for tensor in operation.outputs}
            ins = list(dict.fromkeys(t.name for o in own for t in o.inputs if t.name not in inside))
            outs = sorted(needed & {t.name for o in own if phase_of[o] == phase or phase == 0 for t in o.outputs})
            part = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
            names = {operation.name for operation in own}
            for operation in own:
                node = part.node.add()
                node.CopyFrom(nodes[operation.name])
                node.input[:] = [name for name in node.input if not name.startswith("^") or name[1:] in names]
                node.attr.pop("_class", None)
            needed = (needed - set(outs)) | set(ins)
            self._pieces.insert(0, (ins, outs, _function(graph, part, ins, outs, jit_compile)))

    def run(self, arguments: Any) -> Generator[Any, Any, None]:
        """Runs it on nested `arguments`: yields the outputs of each phase, and is sent the inputs of the next."""
        values: dict[str, Any] = dict(self._captures)
        for (ins, outs, function), names, outputs in zip(self._pieces, self._inputs, self._outputs):
            values |= zip(names, flat(arguments))
            values |= zip(outs, function([values[name] for name in ins]))
            arguments = yield packed(outputs, values)


def flat(values: Any) -> list[Any]:
    """The tensors of a nested structure, in a fixed order."""
    return [tensor for tensor in tf.nest.flatten(values, expand_composites=True) if tensor is not None]


def packed(structure: Any, values: Mapping[str, Any]) -> Any:
    """A nested structure of tensors of a graph, with values in their places, by the names of the tensors."""
    found = [None if tensor is None else values[tensor.name] for tensor in tf.nest.flatten(structure, True)]
    return tf.nest.pack_sequence_as(structure, found, expand_composites=True)


def ancestors(graph: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The operations that tensors need, and those that do something (assertions, output), in the graph's order."""
    operations = graph.get_operations()
    acting = [o for o in operations if o.op_def.is_stateful and o.type != "Placeholder"]
    seen: set[tf.Operation] = set()
    waiting = [*(tensor.op for tensor in tensors), *acting]
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
    return [operation for operation in operations if operation in seen]


def _function(
    graph: Any, part: tf.compat.v1.GraphDef, ins: list[str], outs: list[str], jit_compile: bool | None
) -> Any:
    def piece(values: list[tf.Tensor]) -> list[tf.Tensor]:
        results = tf.graph_util.import_graph_def(part, dict(zip(ins, values)), outs, name="phase")
        for name, result in zip(outs, results):
            # The trace of the whole step has found out more than that of a piece could.
            result.set_shape(graph.get_tensor_by_name(name).shape)
        return results

    return tf.function(piece, autograph=False, jit_compile=jit_compile)
