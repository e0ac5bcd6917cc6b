"""Files of records on the command line: `data=files data.path='data/*.csv' data.label=clicked`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def load_data(
    path: str | Sequence[str],
    validation_path: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    sample_weight: str | None = None,
    columns: Mapping[str, Any] | Sequence[str] | None = None,
    features: Mapping[str, Any] | None = None,
    shuffle_records: int = 10_000,
) -> dict[str, Any]:
    """The data of `fit`: the records of the files at `path`, and of those at `validation_path`; see `kdist.files`."""
    import kdist

    def records(of: str | Sequence[str]) -> Any:
        return kdist.files(
            of,
            label=label,
            sample_weight=sample_weight,
            columns=columns,
            features=features,
            shuffle_records=shuffle_records,
        )

    data = {"x": records(path)}
    return data if validation_path is None else data | {"validation_data": records(validation_path)}
