"""Record calls of torch functions that fail before any operation runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class Failing(TorchFunctionMode):
    """Tells which call failed: a recurrent network's, say, looks at its operands first."""

    def __init__(self, tell: Callable[[BaseException, str, Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._tell(error, f"torch.{getattr(func, '__name__', func)}", (args, kwargs))
            raise
