"""A step in phases: its graph, cut where it needs values that depend on what it has computed before.

A GAN's step updates the discriminator, and then the generator against the updated discriminator. Traced as one
function, the new values are inputs that nobody can give at the beginning. Cut at them, the step returns the first
gradients, and goes on when they have been applied. A step that looks up rows of tables is cut where they arrive, see
`kdist.model.lookup_rounds`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kdist.model.loss_weights import LossWeights
from kdist.model.train_step import OwnTrainStep
from kdist.model.updates import StepUpdates

#: The phase of what needs nothing but constants: each phase has its own copy.
_CONSTANT = -1


class Levels:
    """For tensors of a graph, which phase can compute them first."""

    def __init__(self) -> None:
        self._of: dict[tf.Operation, int] = {}

    def arrive(self, tensors: Iterable[tf.Tensor], phase: int) -> None:
        """States that these inputs are there from a phase on; those that nobody has mentioned, from the first."""
        self._of |= {tensor.op: phase for tensor in tensors}

    def of(self, values: Any) -> int:
        """The first phase in which all of these nested tensors can be computed."""
        return max([0, *(self.of_operation(tensor.op) for tensor in flat(values))])

    def of_operation(self, operation: tf.Operation) -> int:
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            missing = [tensor.op for tensor in last.inputs if tensor.op not in self._of]
            if missing and last not in self._of:
                waiting += missing
                continue
            if last not in self._of:
                # Nothing that changes, or is drawn, is computed twice.
                own = 0 if last.type == "Placeholder" or last.op_def.is_stateful else _CONSTANT
                self._of[last] = max([own, *(self._of[tensor.op] for tensor in last.inputs)])
            waiting.pop()
        return self._of[operation]


@dataclass(frozen=True)
class _Piece:
    """The part of a graph that one phase computes: names of tensors that go in and come out, and the function."""

    inputs: list[str]
    outputs: list[str]
    shapes: list[tf.TensorShape]
    function: Any


class Phases:
    """A traced function that runs in phases.

    Args:
        graph: of the function.
        captures: what it captured, with the placeholders for it.
        levels: of the graph.
        inputs: the nested inputs of each phase: those of the function for the first one, for the others what arrives.
        outputs: the nested outputs of each phase.
        jit_compile: whether XLA compiles each phase.
    """

    def __init__(
        self,
        graph: Any,
        captures: Sequence[tuple[Any, tf.Tensor]],
        levels: Levels,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        jit_compile: bool | None = None,
    ) -> None:
        self._captures = {inside.name: outside for outside, inside in captures}
        self._inputs = [[tensor.name for tensor in flat(of_phase)] for of_phase in inputs]
        self._outputs = list(outputs)
        live = _ancestors(graph, flat(self._outputs))
        level_of = {operation: levels.of_operation(operation) for operation in live}
        graph_def = graph.as_graph_def()
        nodes = {node.name: node for node in graph_def.node}
        needed: set[str] = {tensor.name for tensor in flat(self._outputs)}
        self._pieces: list[_Piece] = []
        # From the last to the first, as each has to return what later ones need.
        for phase in reversed(range(len(self._outputs))):
            own = [o for o in live if level_of[o] in (phase, _CONSTANT) and o.type != "Placeholder"]
            inside = {tensor.name for operation in own for tensor in operation.outputs}
            ins = list(dict.fromkeys(t.name for o in own for t in o.inputs if t.name not in inside))
            outs = sorted(needed & {t.name for o in own if level_of[o] == phase or phase == 0 for t in o.outputs})
            part = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
            names = {operation.name for operation in own}
            for operation in own:
                node = part.node.add()
                node.CopyFrom(nodes[operation.name])
                inputs_here = [name for name in node.input if not name.startswith("^") or name[1:] in names]
                del node.input[:]
                node.input.extend(inputs_here)
                node.attr.pop("_class", None)
            needed = (needed - set(outs)) | set(ins)
            shapes = [graph.get_tensor_by_name(name).shape for name in outs]
            self._pieces.insert(0, _Piece(ins, outs, shapes, _function(part, ins, outs, jit_compile)))

    def run(self, arguments: Any) -> Generator[Any, Any, None]:
        """Runs it on nested `arguments`: yields the outputs of each phase, and is sent the inputs of the next."""
        values: dict[str, Any] = dict(self._captures)
        for piece, names, outputs in zip(self._pieces, self._inputs, self._outputs):
            values |= zip(names, flat(arguments))
            results = piece.function([values[name] for name in piece.inputs])
            for result, shape in zip(results, piece.shapes):
                # The trace of the whole step has found out more than that of a piece could.
                result.set_shape(shape)
            values |= zip(piece.outputs, results)
            found = [None if tensor is None else values[tensor.name] for tensor in tf.nest.flatten(outputs, True)]
            arguments = yield tf.nest.pack_sequence_as(outputs, found, expand_composites=True)


class TracedPhases:
    """What the trace of a step with open values after each update tells about its phases.

    Args:
        own: the step.
        weights: of the gradients of synchronous replicas.

    Attributes:
        function: what was traced; to be set when it is.
        updates: the step's updates, with their phases.
        dense_gradients: the trainable variables that get a dense gradient in each of their updates, by index.
    """

    function: tf.types.experimental.ConcreteFunction

    def __init__(self, own: OwnTrainStep, weights: LossWeights) -> None:
        self._own = own
        self._weights = weights

    def trace(self, arguments: Sequence[Any], outputs: tuple[Any, Any, Any, Any]) -> None:
        """Called while the step is traced.

        Args:
            arguments: its own, and then the values after each update, as in `OwnTrainStep.updated`.
            outputs: the gradients of each update, what is assigned before each and at the end, state, metrics.
        """
        *inputs, later = arguments
        gradients, assigned, state, metrics = outputs
        self._levels = levels = Levels()
        phases: list[int] = []
        last: dict[int, int] = {}
        for indices, of_update, before, after in zip(self._own.updated, gradients, assigned, later):
            again = [last[i] + 1 for i in indices if i in last]
            phase = max([levels.of([of_update, before]), *phases[-1:], *again])
            levels.arrive(after, phase + 1)
            phases.append(phase)
            last |= dict.fromkeys(indices, phase)
        at_end = [last[i] + 1 for i in assigned[-1] if i in last]
        num_phases = 1 + max(levels.of([assigned[-1], state, metrics]), *phases, *at_end)
        live = set(_ancestors(tf.compat.v1.get_default_graph(), flat(outputs)))
        arriving: list[dict[int, tf.Tensor]] = [{} for _ in range(num_phases)]
        for indices, phase, after in zip(self._own.updated, phases, later):
            for i, tensor in zip(indices, after):
                if tensor.op in live:
                    arriving[phase + 1][i] = tensor
        pulled_again = tuple(frozenset(variables) for variables in arriving)
        everywhere = frozenset(i for found in assigned for i in found)
        self.updates = updates = StepUpdates(
            self._own.groups, self._own.updates(phases), pulled_again, everywhere, self._weights
        )
        sparse = {i for of_update in gradients for i, g in enumerate(of_update) if isinstance(g, tf.IndexedSlices)}
        self.dense_gradients = frozenset(i for indices in self._own.updated for i in indices) - sparse
        self._inputs = [inputs, *([of_phase[i] for i in sorted(of_phase)] for of_phase in arriving[1:])]
        of_phases = [(updates.merge(gradients, p), updates.merge_assigned(assigned, p)) for p in range(num_phases)]
        unknown: list[Any] = [None] * len(state)
        self._outputs: list[Any] = [(*found, unknown, []) for found in of_phases]
        self._outputs[-1] = *of_phases[-1], state, metrics

    def phases(self, jit_compile: bool | None) -> Phases:
        """The step, cut; `jit_compile` says whether XLA compiles each phase."""
        graph = self.function.graph
        return Phases(graph, graph.captures, self._levels, self._inputs, self._outputs, jit_compile)


def flat(values: Any) -> list[Any]:
    """The tensors of a nested structure, in a fixed order."""
    return [tensor for tensor in tf.nest.flatten(values, expand_composites=True) if tensor is not None]


def _function(part: tf.compat.v1.GraphDef, ins: list[str], outs: list[str], jit_compile: bool | None) -> Any:
    def piece(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return tf.graph_util.import_graph_def(part, dict(zip(ins, values)), outs, name="phase")

    return tf.function(piece, autograph=False, jit_compile=jit_compile)


def _ancestors(graph: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
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
