"""Our lazy matrices keep the promises that linear_operator's own test cases ask for."""

import unittest

import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from torch import nn

from ntkgp import Linearization, priors
from ntkgp.operators import GGNLinearOperator, JacobianLinearOperator, RowForm, TangentKernelLinearOperator


def _lin(d_in=2, outputs=2):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(d_in, 6), nn.Tanh(), nn.Linear(6, outputs))
    return Linearization(net, example=torch.randn(2, d_in))


FORM = RowForm((torch.Size([2]),))


class _TangentKernelCase:
    """K + nothing: small, full rank, two outputs a point."""

    seed = 0
    batch: tuple = ()
    points = 3

    def setUp(self):
        super().setUp()
        torch.set_default_dtype(torch.float64)
        self.addCleanup(torch.set_default_dtype, torch.float32)

    def create_linear_op(self):
        x = torch.randn(*self.batch, self.points, 2)
        lin = _lin()
        prior = priors.Grouped(lin, precision=0.5 + torch.rand(*self.batch, 2))
        return TangentKernelLinearOperator(x, x.clone(), prior.covariance(), lin=lin, form=FORM)

    def evaluate_linear_op(self, linear_op):
        """K by dense Jacobians, differentiable in everything."""
        lin, S0 = linear_op.lin, linear_op.S0
        J1, J2 = (
            lin.jacobian(rows[0].reshape(-1, 2)).reshape(*rows[0].shape[:-2], -1, lin.num_params)
            for rows in (linear_op.rows1, linear_op.rows2)
        )
        return (J1 * S0._diagonal().unsqueeze(-2)) @ J2.mT


class TestTangentKernel(_TangentKernelCase, LinearOperatorTestCase, unittest.TestCase):
    pass


class TestTangentKernelBatch(_TangentKernelCase, LinearOperatorTestCase, unittest.TestCase):
    batch = (3,)


class TestTangentKernelMultiBatch(_TangentKernelCase, LinearOperatorTestCase, unittest.TestCase):
    batch = (2, 3)
    skip_slq_tests = True


class TestTangentKernelRectangular(RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 1

    def create_linear_op(self):
        lin = _lin()
        prior = priors.Grouped(lin, precision=torch.tensor([0.5, 2.0]))
        return TangentKernelLinearOperator(torch.randn(3, 2), torch.randn(4, 2), prior.covariance(), lin=lin, form=FORM)

    evaluate_linear_op = _TangentKernelCase.evaluate_linear_op


class TestJacobian(RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 2

    def create_linear_op(self):
        return JacobianLinearOperator(torch.randn(3, 2), lin=_lin(), form=FORM)

    def evaluate_linear_op(self, linear_op):
        return linear_op.lin.jacobian(linear_op.rows[0]).flatten(0, 1)


class TestGGN(LinearOperatorTestCase, unittest.TestCase):
    """Jᵀ Λ J with more rows than parameters, so that it can be inverted."""

    seed = 4

    def create_linear_op(self):
        torch.manual_seed(3)
        lin = Linearization(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), example=torch.randn(2, 2))
        R = torch.randn(6, 2, 2)
        return GGNLinearOperator(2 * torch.randn(6, 2), R @ R.mT + torch.eye(2), lin=lin, form=FORM)

    def evaluate_linear_op(self, linear_op):
        J = linear_op.lin.jacobian(linear_op.rows[0])
        return torch.einsum("ncp,ncd,ndq->pq", J, linear_op.curvature, J)
