"""The embedded store: one SQLite file, which several processes of one machine may share."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from winnow_service.errors import StoreUnavailable
from winnow_service.store.documents import KEPT_REVISIONS, Changes, Conflict, Document, Expected, Store, as_expected

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE documents (
    collection TEXT NOT NULL, name TEXT NOT NULL, revision INTEGER NOT NULL, version INTEGER NOT NULL,
    value TEXT, updated REAL NOT NULL, author TEXT NOT NULL,
    PRIMARY KEY (collection, name)
) WITHOUT ROWID;
CREATE UNIQUE INDEX documents_by_version ON documents (version);
CREATE TABLE revisions (
    collection TEXT NOT NULL, name TEXT NOT NULL, revision INTEGER NOT NULL, version INTEGER NOT NULL,
    value TEXT, updated REAL NOT NULL, author TEXT NOT NULL,
    PRIMARY KEY (collection, name, revision)
) WITHOUT ROWID;
"""
_COLUMNS = "collection, name, revision, version, value, updated, author"
# How long a write waits for another process that writes the same file.
_BUSY_SECONDS = 5.0
_BUSY_PAUSE_SECONDS = 0.01

Result = TypeVar("Result")


class SqliteStore(Store):
    """Documents in an SQLite file. A write that was acknowledged survives a crash of process and machine.

    Args:
        path: made, with its folder, if it does not exist. Nobody but the owner may read it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # SQLite's calls block, and a connection has one user at a time.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self._connection: sqlite3.Connection | None = None

    async def changes(self, since: int) -> Changes:
        return await self._run(lambda connection: _changes(connection, since))

    async def write(
        self, collection: str, name: str, value: dict[str, Any] | None, expected: Expected, author: str
    ) -> Document:
        text = None if value is None else json.dumps(value, separators=(",", ":"))
        try:
            return await self._run(lambda connection: _write(connection, collection, name, text, expected, author))
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error.detail}; nothing was written") from error

    async def revisions(self, collection: str, name: str) -> list[Document]:
        query = f"SELECT {_COLUMNS} FROM revisions WHERE collection = ? AND name = ? ORDER BY revision DESC"  # noqa: S608
        return await self._run(lambda connection: list(map(_document, connection.execute(query, (collection, name)))))

    async def wait_for_change(self, timeout_seconds: float) -> None:
        # What other processes write wakes nobody here, and what this one writes it knows.
        await asyncio.sleep(timeout_seconds)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        def run() -> Result:
            with self._failures():
                return work(self._connected())

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives the files beside it, which hold the same, the mode of this one.
            self._path.touch(mode=0o600, exist_ok=True)
            self._connection = _connect(self._path)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:
            # What a failure leaves behind in a connection, such as a file that was replaced, goes with it.
            self._disconnect()
            raise StoreUnavailable(f"{self._path}: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = FULL")
        with _transaction(connection):
            _create_schema(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Have changes written to a log first. SQLite waits for no other connection that does the same: this does."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_PAUSE_SECONDS)
        else:
            return


def _create_schema(connection: sqlite3.Connection, path: Path) -> None:
    [found] = connection.execute("PRAGMA user_version").fetchone()
    if found > _SCHEMA_VERSION:
        raise StoreUnavailable(f"{path} was written by a later version of Winnow")
    if found == 0:
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite itself has rolled back after some errors, a full disk among them.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    [version] = connection.execute("SELECT coalesce(max(version), 0) FROM documents").fetchone()
    return int(version)


def _changes(connection: sqlite3.Connection, since: int) -> Changes:
    connection.execute("BEGIN")
    try:
        version = _version(connection)
        # An older version than one that was seen: the file was put back from a copy.
        complete = since == 0 or version < since
        query = f"SELECT {_COLUMNS} FROM documents WHERE version > ? ORDER BY version"  # noqa: S608
        rows = connection.execute(query, (0 if complete else since,)).fetchall()
    finally:
        connection.execute("COMMIT")
    return Changes(version, [_document(row) for row in rows], complete)


def _write(
    connection: sqlite3.Connection, collection: str, name: str, text: str | None, expected: Expected, author: str
) -> Document:
    with _transaction(connection):
        query = f"SELECT {_COLUMNS} FROM documents WHERE collection = ? AND name = ?"  # noqa: S608
        row = connection.execute(query, (collection, name)).fetchone()
        current = None if row is None else _document(row)
        if not as_expected(current, expected):
            raise Conflict(current)
        revision = 1 if current is None else current.revision + 1
        written = (collection, name, revision, _version(connection) + 1, text, time.time(), author)
        connection.execute(f"INSERT OR REPLACE INTO documents ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", written)  # noqa: S608
        connection.execute(f"INSERT INTO revisions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", written)  # noqa: S608
        connection.execute(
            "DELETE FROM revisions WHERE collection = ? AND name = ? AND revision <= ?",
            (collection, name, revision - KEPT_REVISIONS),
        )
    return _document(written)


def _document(row: tuple[Any, ...]) -> Document:
    collection, name, revision, version, text, updated, author = row
    value = None if text is None else json.loads(text)
    return Document(collection, name, revision, version, value, updated, author)
