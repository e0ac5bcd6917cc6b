"""PyTorch: `DistributedDataParallel` over gloo: synchronous, by all-reduce, without servers; or one process alone."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.peers.task import THREADS, Task, run_processes, this_task, with_addresses
from benchmarks.workloads import NUM_COUNTS, Clicks, Conv, Dense, Embedding, Flatten, Workload


class FirstClicks(torch.nn.Module):
    """`Clicks`, with sparse gradients of its tables."""

    def __init__(self, clicks: Clicks) -> None:
        super().__init__()
        self.counts = torch.nn.Linear(NUM_COUNTS, clicks.units)
        bags = [torch.nn.EmbeddingBag(rows, clicks.units, mode="sum", sparse=True) for rows in clicks.tables]
        self.tables = torch.nn.ModuleList(bags)

    def forward(self, x: Any) -> Any:
        logs = torch.log1p(x[:, :NUM_COUNTS].float())
        vectors = [torch.relu(self.counts(logs))]
        vectors += [table(x[:, NUM_COUNTS + i, None]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(vectors, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        return torch.cat([vectors[0], products.flatten(1)], 1)


def torch_model(workload: Workload) -> Any:
    layers: list[Any] = []
    channels = 1
    for layer in workload.layers:
        match layer:
            case Dense(units, relu, bias):
                layers.append(torch.nn.LazyLinear(units, bias=bias))
                layers += [torch.nn.ReLU()] if relu else []
            case Conv(filters):
                layers += [torch.nn.Conv2d(channels, filters, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
                channels = filters
            case Flatten():
                layers.append(torch.nn.Flatten())
            case Embedding(rows, units):
                layers.append(torch.nn.EmbeddingBag(rows, units, mode="mean"))
            case Clicks():
                layers.append(FirstClicks(layer))
    return torch.nn.Sequential(*layers)


def train(task: Task) -> None:
    """One process."""
    is_alone = task.num_workers == 1
    if is_alone:
        torch.set_num_threads(os.cpu_count() or 1)
    else:
        torch.set_num_threads(THREADS[0])
        host, _, port = task.jobs["worker"][0].partition(":")
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        torch.distributed.init_process_group("gloo", rank=task.index, world_size=task.num_workers)
    inputs, labels_of = task.what.arrays()
    if inputs.ndim == 5:
        # PyTorch has channels first.
        inputs = np.ascontiguousarray(np.moveaxis(inputs, -1, 2))
    batches = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in zip(inputs, labels_of)]
    model = torch_model(task.what)
    model(batches[0][0])
    if not is_alone:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizers = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    optimizer = optimizers[task.optimizer](model.parameters(), lr=1e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    progress = task.counter()
    for step, (x, labels) in enumerate(itertools.cycle(batches)):
        optimizer.zero_grad()
        loss_of(model(x), labels).backward()
        optimizer.step()
        progress.set(step + 1)


if __name__ == "__main__":
    run_processes(train, with_addresses(replace(this_task(), num_ps=0)))
