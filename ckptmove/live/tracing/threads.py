"""Tell whether the current thread belongs to a trace: hooks run in all threads, modes in one."""

from __future__ import annotations

import threading

import torch


def runs_for(thread: int) -> bool:
    """Whether what runs is of a thread, or of a backward pass, which autograd has threads for."""
    mine = threading.get_ident()
    if mine == thread:
        return True
    if torch._C._current_autograd_node() is None:
        return False
    pythons = threading.enumerate()  # one that Python has not started is autograd's own
    dummy = threading._DummyThread
    return not any(each.ident == mine and not isinstance(each, dummy) for each in pythons)
