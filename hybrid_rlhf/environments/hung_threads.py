"""Threads whose call never returns."""

from __future__ import annotations

import ctypes


def interrupt(thread_id: int | None) -> None:
    """Raise SystemExit in that thread (its `ident`), once its Python code goes on: an endless loop would else take
    turns with training for the rest of the run. Where it waits inside of C (a sleep, a socket) that is when the wait
    ends.

    Nothing where there is no such thread any more. threading says nothing of a thread that ends by SystemExit.
    """
    if thread_id is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(SystemExit))
