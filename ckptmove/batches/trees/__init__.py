"""Local and remote trees, and the ledger that records which items are done."""

from __future__ import annotations

from functools import partial

from ...sources import choose
from .ledger import FileLedger
from .local_tree import LocalTree
from .tree import LEDGER, OBJECT_LEDGER, Ledger, Output, Tree

__all__ = ["LEDGER", "OBJECT_LEDGER", "Ledger", "Output", "Tree", "open_ledger", "tree_at"]


def tree_at(path: str) -> Tree:
    """Return the tree, folder or file at a path or a URL."""
    return choose(path, LocalTree, _remote_tree)


def open_ledger(path: str, since: int = 0) -> Ledger:
    """Open an existing ledger; bytes before the offset `since` are not read again."""
    return choose(path, partial(FileLedger, since=since), _remote_ledger)


def _remote_tree(url: str) -> Tree:
    from .remote_tree import RemoteTree  # here and below: imported only for URLs

    return RemoteTree(url)


def _remote_ledger(url: str) -> Ledger:
    from .object_ledger import ObjectLedger

    return ObjectLedger(url)
