"""Posteriors in other libraries' clothes; each of these is imported when it is first asked for, never before."""

from importlib import import_module
from typing import Any

__all__ = ["BotorchModel", "NTKGPClassifier", "NTKGPRegressor"]

_HOMES = {"BotorchModel": "botorch", "NTKGPClassifier": "sklearn", "NTKGPRegressor": "sklearn"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
