"""How many gradients make an update of `sync_replicas`, and which workers may compute them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quorum:
    """How many gradients make an update, and which workers may compute them.

    Attributes:
        replicas_to_aggregate: gradients of an update.
        num_workers: number of workers.
        shared_tokens: TF1's tokens: each step has as many as there are workers, or gradients if those are more, and a
            fast worker takes several. Otherwise every worker has a share of its own.
    """

    replicas_to_aggregate: int
    num_workers: int
    shared_tokens: bool = False

    def share(self, worker: int) -> int:
        """How many gradients of one step a worker may compute, if it has a share of its own."""
        if self.replicas_to_aggregate <= self.num_workers:
            return 1
        return (self.replicas_to_aggregate + self.num_workers - 1 - worker) // self.num_workers

    @property
    def needs_everyone(self) -> bool:
        """Whether each step takes every gradient that the workers may compute, so that their order does not matter."""
        return not self.shared_tokens and self.replicas_to_aggregate >= self.num_workers

    @property
    def tokens(self) -> int:
        """How many gradients of one step all workers together may compute."""
        return max(self.replicas_to_aggregate, self.num_workers)
