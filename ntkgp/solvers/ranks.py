"""Which share of the data is ours, and how shares are added up: one process, or those that ``torchrun`` started."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALONE", "Ranks"]


@dataclass(frozen=True)
class Ranks:
    """Rank r of W processes, each with every W-th part of the data; sums over all data are the same everywhere."""

    rank: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> "Ranks":
        """Return the place of this process; under ``torchrun`` the processes are joined at the first call."""
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched():
                return cls()
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum over ranks of what each has.

        Raises:
            RuntimeError: if another rank has ended, or a gradient of the sum would be asked for.
        """
        if self.world == 1:
            return part
        if part.requires_grad:
            raise RuntimeError("gradients do not flow between processes: use tune(), or a single process")
        total = part.contiguous().clone()
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.world} lost another rank, so the run cannot go on: start it again, and it "
                f"resumes from its last checkpoint if it was given one ({error})"
            ) from error
        return total

    def part(self, n: int) -> slice:
        """Return which of n points in memory are ours."""
        return slice(n * self.rank // self.world, n * (self.rank + 1) // self.world)


ALONE = Ranks()
