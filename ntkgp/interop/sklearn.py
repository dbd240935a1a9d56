"""Classifier and regressor in scikit-learn's manner: a small network trained inside, its posterior, one `predict`."""

import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from ntkgp.posteriors import Posterior, Prediction, fit
from ntkgp.training import MaximumAPosteriori

__all__ = ["NTKGPClassifier", "NTKGPRegressor"]

NetFactory = Callable[[int, int], nn.Module]
_WIDTH = 50  # of the default network, as for the UCI data of the local-linearisation paper


class NTKGPEstimator(BaseEstimator):
    """What classifier and regressor share: standardised inputs, a network in float64, a refined posterior.

    The network is trained by MAP with prior N(0, I) over its weights, linearised, its prior tuned by evidence, and the
    mean moved to the mode of the linear model. ``posterior_`` has all the rest: samples, evidence, other predictives.

    Args:
        net: makes the network, (number of inputs, number of outputs) -> module; None for one hidden layer of 50 units.
        epochs: of training.
        batch_size: points in a minibatch.
        learning_rate: Adam's.
        method: of :func:`ntkgp.fit`.
        prior: of :func:`ntkgp.fit`, by name.
        random_state: of the first weights and the order of the data.
    """

    def __init__(
        self,
        net: NetFactory | None = None,
        *,
        epochs: int = 100,
        batch_size: int = 64,
        learning_rate: float = 1e-2,
        method: str = "auto",
        prior: str = "isotropic",
        random_state: Any = None,
    ) -> None:
        self.net = net
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.method = method
        self.prior = prior
        self.random_state = random_state

    def _learn(self, X: np.ndarray, y: Tensor, likelihood: str, num_outputs: int) -> None:
        """Train, linearise, tune and refine."""
        self.scaler_ = StandardScaler().fit(X)
        x = self._inputs(X)
        seed = int(check_random_state(self.random_state).randint(2**31))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = (self.net or _perceptron)(X.shape[1], num_outputs).double()
        objective = MaximumAPosteriori(net, likelihood, seed=seed)
        objective.fit((x, y), epochs=self.epochs, batch_size=self.batch_size, lr=self.learning_rate, progress=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the mode of the linear model gains")  # the mean moves there next
            fitted = fit(net, (x, y), objective.likelihood, self.method, self.prior, progress=False)
        self.posterior_: Posterior = fitted.refine()

    def _inputs(self, X: np.ndarray) -> Tensor:  # (N, d)
        return torch.tensor(self.scaler_.transform(X), dtype=torch.float64)

    def _checked(self, X: Any) -> Tensor:  # (N, d)
        check_is_fitted(self)
        return self._inputs(validate_data(self, X, reset=False, dtype=np.float64))


class NTKGPClassifier(ClassifierMixin, NTKGPEstimator):
    """Classification by a network's posterior: class probabilities that know what the network does not.

    Probabilities come from the probit link, which needs no samples: a point's do not depend on its neighbours. The
    arguments are those of :class:`NTKGPEstimator`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on points (N, d) and labels (N,) of any kind.

        Raises:
            ValueError: if there is one class only, or inputs hold NaN, infinity or no points.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, but has one class: {self.classes_[0]}")
        self._learn(X, torch.tensor(labels), "categorical", len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:  # (N, C)
        """Return the probability of each class, in the order of ``classes_``."""
        x = self._checked(X)
        return self.posterior_.predict(x, link="probit", progress=False).probs.numpy()

    def predict(self, X: Any) -> np.ndarray:  # (N,)
        """Return the most probable label."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]


class NTKGPRegressor(RegressorMixin, NTKGPEstimator):
    """Regression by a network's posterior, with error bars; one target or several, standardised inside.

    The arguments are those of :class:`NTKGPEstimator`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on points (N, d) and targets (N,) or (N, C).

        Raises:
            ValueError: if inputs or targets hold NaN, infinity or no points.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        targets = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        self.target_scaler_ = StandardScaler().fit(targets)
        self.target_ndim_ = y.ndim
        scaled = torch.tensor(self.target_scaler_.transform(targets))
        self._learn(X, scaled, "gaussian", targets.shape[1])
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # (N,) or (N, C)
        """Return the mean of y, and if asked for its standard deviation, noise included."""
        x = self._checked(X)
        found: Prediction = self.posterior_.predict(x, progress=False)
        scale = torch.tensor(self.target_scaler_.scale_)
        mean = found.mean * scale + torch.tensor(self.target_scaler_.mean_)
        std = found.variance.sqrt() * scale
        mean, std = (part.squeeze(1) if self.target_ndim_ == 1 else part for part in (mean, std))
        return (mean.numpy(), std.numpy()) if return_std else mean.numpy()

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _perceptron(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_inputs, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, num_outputs))
