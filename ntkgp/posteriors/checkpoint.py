"""The state of a long run on disk: there whole or not at all, and only for the run it came from."""

import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A file of tensors, with what tells whether it belongs to this run."""

    path: Path
    identity: dict[str, str]

    def save(self, tensors: dict[str, Tensor], told: dict[str, str]) -> None:
        """Replace the file by these tensors and what is told of them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(self.path.name + ".part")
        save_file({name: t.contiguous() for name, t in tensors.items()}, aside, metadata=self.identity | told)
        os.replace(aside, self.path)

    def load(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors and what was told.

        Raises:
            ValueError: if the file is not a checkpoint, was cut short, or belongs to another run.
        """
        try:
            with safe_open(self.path, "pt") as file:
                told = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"checkpoint {self.path} is not one, or was cut short: {error}") from error
        for key, value in self.identity.items():
            if told.get(key) != value:
                raise ValueError(f"checkpoint {self.path} belongs to another run: its {key} is {told.get(key)}")
        return tensors, told
