"""Tables that are logged: columns and rows, or a data frame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from accel_core.tracking.tracker import on_main_process


class DataFrame(Protocol):
    """A data frame of pandas, or what has the same columns and `to_numpy`."""

    @property
    def columns(self) -> Iterable[object]:
        """Names of the columns."""

    def to_numpy(self, dtype: type[object]) -> Any:
        """Return the rows as a numpy array.

        Args:
            dtype: Type of the elements; `object` keeps numbers beside texts.
        """


class Table(NamedTuple):
    """A table as a user gave it: columns and rows, or a data frame."""

    columns: list[str] | None
    data: list[list[Any]] | None
    dataframe: DataFrame | None

    def read(self) -> tuple[list[str], list[list[Any]]]:
        """Return the names of the columns, and the rows."""
        if self.dataframe is not None:
            return [str(name) for name in self.dataframe.columns], self.dataframe.to_numpy(dtype=object).tolist()
        if self.data is None or self.columns is None:
            raise ValueError("A table needs `columns` and `data`, or a `dataframe`; got neither. Pass one of them.")
        return list(self.columns), [list(row) for row in self.data]


class TableTracker(ABC):
    """A tracker whose library has tables."""

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: DataFrame | None = None,
        step: int | None = None,
        **kwargs: object,
    ) -> None:
        """Log a table.

        Args:
            table_name: Its name.
            columns: Names of the columns.
            data: The rows.
            dataframe: A data frame instead of both.
            step: Number of the step.
            **kwargs: Passed to the library.
        """
        self._log_table(table_name, Table(columns, data, dataframe), step, **kwargs)

    @abstractmethod
    def _log_table(self, name: str, table: Table, step: int | None, **kwargs: object) -> None:
        """Log a table."""
