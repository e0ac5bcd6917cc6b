"""`ServerOptimizers`: the optimizers of all servers, each with the slots of what its server has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from kdist.model.updates import StepUpdates, Update
from kdist.parameters.changes import RowMarks
from kdist.parameters.dynamic_table import DynamicTable
from kdist.parameters.named_values import Part
from kdist.parameters.optimizer import ServerOptimizer
from kdist.parameters.packing import Blocks
from kdist.parameters.travelling import Changes


class ServerOptimizers:
    """One optimizer for each server and group of parameters.

    Args:
        updates: of the parameters.
        blocks: of all servers.
        variables: of each block.
        tables: the rows of dynamic tables, by block.
        marks: of the rows of other tables that change, by block, if they are marked.
        names: of the parameters.
        devices: of the servers.
        is_shared: whether several workers make updates at the same time.

    Attributes:
        parts: the slots, and the first copy of what belongs to whole optimizers, by their names in checkpoints.
        copies: all copies of the latter. Every server has its own, of the learning rate for one, so that applying needs
            nothing from another server.
    """

    def __init__(
        self,
        updates: StepUpdates,
        blocks: Blocks,
        variables: Sequence[keras.Variable],
        tables: Mapping[int, DynamicTable],
        marks: Mapping[int, RowMarks],
        names: Sequence[str],
        devices: Sequence[str],
        *,
        is_shared: bool,
    ) -> None:
        self._updates = updates
        self._blocks = blocks
        self._devices = devices
        #: By server and group.
        self._optimizers: dict[tuple[int, int], ServerOptimizer] = {}
        self.parts: dict[str, list[Part]] = {}
        self.copies: dict[str, list[tf.Variable]] = defaultdict(list)
        for g, group in enumerate(updates.groups):
            slots: dict[str, dict[int, Part]] = defaultdict(dict)
            for server, device in enumerate(devices):
                if not (own := self._blocks_of(server, g)):
                    continue
                self._optimizers[server, g] = ServerOptimizer(
                    group.optimizer,
                    [blocks.original(b) for b in own],
                    [variables[b] for b in own],
                    [blocks[b].is_row_wise for b in own],
                    {i: tables[b] for i, b in enumerate(own) if b in tables},
                    {i: marks[b] for i, b in enumerate(own) if b in marks},
                    device,
                    is_shared=is_shared,
                )
                self._name_variables(self._optimizers[server, g], own, group.name, names, slots)
            self.parts |= {name: [by_shard[i] for i in sorted(by_shard)] for name, by_shard in slots.items()}

    def learning_rate(self, step: tf.Tensor, group: int) -> tf.Tensor:
        """The learning rate of a group after `step` updates, a scalar on a server; called while a call is traced."""
        server = min(server for server, of_group in self._optimizers if of_group == group)
        with tf.device(self._devices[server]):
            return self._optimizers[server, group].learning_rate(step)

    def use_averages(self) -> None:
        """Sets parameters to their moving averages, if the optimizers keep any."""
        for optimizer in self._optimizers.values():
            optimizer.use_averages()

    def apply(self, server: int, phase: int, arrived: Changes, step: tf.Tensor) -> None:
        """The updates of a phase, of the variables that a server has, in the step after `step`."""
        for update in self._updates.in_phase(phase):
            if blocks := self._blocks_of(server, update.group):
                self._optimizers[server, update.group].apply(
                    [arrived.get(b) if self._is_in(update, b) else None for b in blocks],
                    self._updates.groups[update.group].iteration(step, update.number),
                )

    def blocks_in(self, update: Update) -> set[int]:
        """The blocks that an update changes."""
        return {b for b, block in enumerate(self._blocks) if block.is_parameter and self._is_in(update, b)}

    def _blocks_of(self, server: int, group: int) -> list[int]:
        """The blocks of a server whose parameters are of a group."""
        variables, blocks = self._updates.groups[group].variables, self._blocks
        own = (b for b, block in enumerate(blocks) if block.server == server and block.is_parameter)
        return [b for b in own if blocks.variable_of(b) in variables]

    def _is_in(self, update: Update, block: int) -> bool:
        return self._blocks.variable_of(block) in update.variables

    def _name_variables(
        self,
        optimizer: ServerOptimizer,
        own: Sequence[int],
        group: str,
        names: Sequence[str],
        slots: dict[str, dict[int, Part]],
    ) -> None:
        """Adds the variables of an optimizer to `parts` and `copies`, and its slots, by shard, to `slots`."""
        for key, variable in optimizer.state([str(b) for b in own], group):
            kind, _, rest = key.partition("/")
            if kind != "slots":
                self.copies[key].append(variable.value)
                self.parts.setdefault(key, [Part.whole(variable.value)])
                continue
            number, _, slot = rest.partition("/")
            block = self._blocks[int(number)]
            # The slots of dynamic tables are stored with their rows.
            for shard in () if block.is_dynamic else block.shards:
                # A slot with another shape than its variable belongs to a block of one shard.
                part = self._blocks.part(shard, variable) if block.is_joint else Part.whole(variable.value)
                slots[f"slots/{names[self._blocks.variable_of_shard(shard)]}/{slot}"][shard] = part
