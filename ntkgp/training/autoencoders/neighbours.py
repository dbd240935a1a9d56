"""Classes from a few labels: nearest neighbours among codes that were drawn many times."""

import torch
from torch import Tensor

from ntkgp.training.autoencoders.moments import codes
from ntkgp.training.autoencoders.objective import StochasticAutoencoder

__all__ = ["CodeNeighbours"]

_NEIGHBOURS = (1, 3, 5, 9, 15, 25, 49)


class CodeNeighbours:
    """k nearest neighbours in the latent space, every labelled input encoded by each drawn network.

    k is chosen by two-fold cross-validation over the drawn codes; it is 1 where a class has a single one (Miani et al.
    2022, A.4).

    Args:
        model: any stochastic autoencoder.
        x: labelled inputs.
        y: their classes, integers.
        num_samples: networks that encode them, at most.
        generator: by default seed 0.

    Raises:
        ValueError: if there is not one class for each input.
    """

    def __init__(
        self,
        model: StochasticAutoencoder,
        x: Tensor,
        y: Tensor,
        num_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> None:
        from sklearn.neighbors import KNeighborsClassifier  # slow to import

        if y.shape != (len(x),) or y.is_floating_point():
            raise ValueError(f"y must hold {len(x)} classes, integers, but has shape {tuple(y.shape)} and {y.dtype}")
        self.model, self.num_samples = model, num_samples
        drawn = codes(model, x, num_samples, generator)  # (S, N, K)
        rows, labels = drawn.flatten(0, 1).cpu().numpy(), y.repeat(len(drawn)).cpu().numpy()
        self.k = _chosen(rows, labels, int(y.unique(return_counts=True)[1].min()) * len(drawn))
        self._classifier = KNeighborsClassifier(self.k).fit(rows, labels)

    def predict(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (N,)
        """Return the classes of inputs, by their mean codes.

        Args:
            x: inputs.
            generator: by default seed 0.
        """
        mean = codes(self.model, x, self.num_samples, generator).mean(0)
        return torch.as_tensor(self._classifier.predict(mean.cpu().numpy()))


def _chosen(rows: object, labels: object, fewest: int) -> int:
    """Return the k with the best accuracy; the smaller one of equals."""
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.neighbors import KNeighborsClassifier

    if fewest < 2:
        return 1
    folds = StratifiedKFold(2, shuffle=True, random_state=0)
    grid = [k for k in _NEIGHBOURS if k <= fewest // 2]
    return max(grid, key=lambda k: cross_val_score(KNeighborsClassifier(k), rows, labels, cv=folds).mean())
