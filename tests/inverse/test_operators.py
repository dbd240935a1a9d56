"""Every operator of images, against its matrix and its adjoint."""

import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from torch import Tensor
from torch.func import jvp, vmap
from torch.testing import assert_close

from ntkgp.inverse import Blur, Fourier, Mask, Matrix, RayTransform, UNet, as_measurement, reconstruct

SIZE = 12


def rays(**options):
    return RayTransform.parallel(SIZE, 7, **options)


def fan(**options):
    return RayTransform.fan(SIZE, torch.linspace(0, 5, 9), 40.0, 60.0, 24, 1.2, 1.0, **options)


class Physics:
    """Shaped like deepinv's LinearPhysics: batches of images with channels, and noise when it is called."""

    def __init__(self, wrong: float = 1.0, strict: torch.dtype | None = None) -> None:
        self.M, self.wrong, self.strict = torch.randn(15, 64), wrong, strict

    def __call__(self, x):
        return self.A(x) + torch.randn(len(x), 1, 5, 3)

    def A(self, x, **kwargs):
        assert x.ndim == 4
        assert self.strict in (None, x.dtype)
        return (x.flatten(1) @ self.M.to(x).mT).view(-1, 1, 5, 3)

    def A_adjoint(self, y, **kwargs):
        assert y.ndim == 4
        assert self.strict in (None, y.dtype)
        return self.wrong * (y.flatten(1) @ self.M.to(y)).view(-1, 1, 8, 8)


OPERATORS = {
    "parallel": rays,
    "fan": fan,
    "blur": lambda: Blur(torch.randn(3, 5), (2, SIZE, SIZE)),
    "fourier": lambda: Fourier(torch.rand(SIZE, SIZE // 2 + 1) < 0.4, (1, SIZE, SIZE)),
    "odd fourier": lambda: Fourier(torch.rand(SIZE, 6) < 0.6, (1, SIZE, 11)),
    "mask": lambda: Mask(torch.rand(SIZE, SIZE) < 0.5, (3, SIZE, SIZE)),
    "matrix": lambda: Matrix(torch.randn(20, SIZE * SIZE), (1, SIZE, SIZE)),
    "shaped matrix": lambda: Matrix(torch.randn(20, SIZE * SIZE), (1, SIZE, SIZE), (4, 5)),
    "lazy matrix": lambda: Matrix(DenseLinearOperator(torch.randn(20, 9))),
    "foreign": lambda: as_measurement(Physics(), torch.randn(1, 1, 5, 3)),
}


PLAIN = [name for name in OPERATORS if name != "lazy matrix"]  # linear_operator has no forward mode


@pytest.fixture(params=OPERATORS)
def A(request, float64):
    torch.manual_seed(0)
    return OPERATORS[request.param]()


def dense(A) -> Tensor:  # (m, n)
    n = A.image_shape.numel()
    return A(torch.eye(n).view(n, *A.image_shape)).flatten(1).mT


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_adjoint_is_the_adjoint(name, dtype, tolerance, float64):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    A = OPERATORS[name]()
    u, v = torch.randn(4, *A.image_shape, dtype=dtype), torch.randn(4, *A.measured_shape, dtype=dtype)
    Au, Av = A(u), A.A_adjoint(v)
    assert Au.dtype == Av.dtype == dtype
    left, right = (Au * v).flatten(1).sum(1), (u * Av).flatten(1).sum(1)
    scale = Au.flatten(1).norm(dim=1) * v.flatten(1).norm(dim=1)
    assert ((left - right).abs() <= tolerance * scale).all()


def test_the_adjoint_is_the_transpose_of_the_matrix(A):
    M, m = dense(A), A.measured_shape.numel()
    Mt = A.A_adjoint(torch.eye(m).view(m, *A.measured_shape)).flatten(1).mT
    assert_close(Mt, M.mT, rtol=1e-12, atol=1e-13)


def test_batches_of_any_shape_are_the_same_map(A):
    x = torch.randn(2, 3, *A.image_shape)
    assert_close(A(x), torch.stack([torch.stack([A(image) for image in row]) for row in x]), rtol=1e-12, atol=1e-13)
    y = A(x)
    assert A.A(x).shape == (2, 3, *A.measured_shape)
    assert A.A_adjoint(y).shape == x.shape


@pytest.mark.parametrize("name", PLAIN)
def test_autograd_forward_mode_and_vmap_see_through_it(name, float64):
    A = OPERATORS[name]()
    x, v = torch.randn(2, 3, *A.image_shape)
    u = torch.randn(3, *A.measured_shape)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(A(leaf), leaf, u)
    assert_close(g, A.A_adjoint(u), rtol=1e-12, atol=1e-13)
    assert_close(jvp(A, (x,), (v,))[1], A(v), rtol=1e-12, atol=1e-13)
    assert_close(vmap(A)(x), A(x), rtol=1e-12, atol=1e-13)
    assert_close(vmap(A, in_dims=1)(x.transpose(0, 1)), A(x), rtol=1e-12, atol=1e-13)
    pushed = vmap(lambda tangent: jvp(A, (x[0],), (tangent,))[1])(v)
    assert_close(pushed, A(v), rtol=1e-12, atol=1e-13)
    leaf = u.clone().requires_grad_()
    (g,) = torch.autograd.grad(A.A_adjoint(leaf), leaf, x)
    assert_close(g, A(x), rtol=1e-12, atol=1e-13)
    w = torch.randn_like(u)
    assert_close(jvp(A.A_adjoint, (u,), (w,))[1], A.A_adjoint(w), rtol=1e-12, atol=1e-13)
    assert_close(vmap(A.A_adjoint)(u), A.A_adjoint(u), rtol=1e-12, atol=1e-13)


def test_it_moves_as_modules_do(float64):
    A = rays()
    x = torch.randn(1, 1, SIZE, SIZE)
    assert_close(A.float()(x.float()), rays()(x).float(), rtol=1e-5, atol=1e-5)
    assert not A.state_dict()  # it is data, not a parameter
    with pytest.raises(TypeError, match=r"x is torch.float64, but the operator is torch.float32"):
        A(x)


# Other people's operators


def test_an_operator_like_those_of_deepinv_works_unmodified(float64):
    physics, x = Physics(), torch.randn(2, 1, 8, 8)
    y = physics.A(x)
    A = as_measurement(physics, y)
    assert (A.image_shape, A.measured_shape) == ((1, 8, 8), (1, 5, 3))
    assert_close(A(x), y)
    assert_close(A(x[0]), y[0])
    assert_close(A.A_adjoint(y), physics.A_adjoint(y))


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_images_are_reconstructed_through_an_operator_like_those_of_deepinv(method):
    torch.manual_seed(0)
    physics = Physics(strict=torch.float32)  # the exact method computes in double precision
    x = torch.rand(1, 1, 8, 8)
    y, net = physics.A(x), UNet(channels=3, scales=2, skip=2)
    rec = reconstruct(physics, y, net, steps=30, rate=1e-2, tune=None, noise=0.01, method=method)
    assert rec.mean.shape == rec.std.shape == (1, 8, 8)
    matrix = reconstruct(Matrix(physics.M, (1, 8, 8)), y.flatten(1), net, steps=30, rate=1e-2, tune=None, noise=0.01)
    if method == "exact":
        assert_close(rec.std, matrix.std, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["inpainting", "blur", "tomography"])
def test_images_are_reconstructed_through_deepinv_itself(name):
    deepinv = pytest.importorskip("deepinv", reason="deepinv needs torchvision, which has no build for a CPU torch")
    torch.manual_seed(0)
    shape = (1, SIZE, SIZE)
    physics = {
        "inpainting": lambda: deepinv.physics.Inpainting(shape, mask=0.5),
        "blur": lambda: deepinv.physics.BlurFFT(shape, filter=deepinv.physics.blur.gaussian_blur(sigma=1.0)),
        "tomography": lambda: deepinv.physics.Tomography(
            angles=8, img_width=SIZE, circle=False, adjoint_via_backprop=True, normalize=False
        ),
    }[name]()
    y, net = physics.A(torch.rand(1, *shape)), UNet(channels=3, scales=2, skip=2)
    options = {"steps": 30, "rate": 1e-2, "tune": None, "noise": 0.01, "prior": "iid"}
    exact = reconstruct(physics, y, net, method="exact", **options)
    sampled = reconstruct(physics, y, net, method="sampled", num_samples=400, tolerance=1e-4, **options)
    assert_close(sampled.mean, exact.mean.float(), rtol=1e-4, atol=1e-5)
    error = exact.std / (2 * 400) ** 0.5
    assert ((sampled.std - exact.std).abs() <= 5 * error + 1e-5).all()


def test_a_false_adjoint_is_refused(float64):
    physics = Physics(wrong=1.001)
    with pytest.raises(ValueError, match="A_adjoint is not the adjoint of A"):
        as_measurement(physics, torch.randn(1, 1, 5, 3))


def test_a_matrix_is_an_operator(float64):
    M = torch.randn(4, 6)
    A = as_measurement(M, torch.randn(1, 4))
    assert_close(A(torch.eye(6)).mT, M)
    with pytest.raises(TypeError, match="A must be a matrix, or an object with A"):
        as_measurement(lambda x: x, torch.randn(1, 4))


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RayTransform.parallel(28, 10, detectors=20), "half width is 10, 14 would be needed, 4 is missing"),
        (lambda: RayTransform.parallel(28, 0), "angles must be positive, but is 0"),
        (lambda: RayTransform.parallel(28, torch.zeros(2, 2)), "angles must be a number or a list"),
        (lambda: RayTransform.parallel(28, [0.0, math.nan]), "angles must be finite"),
        (lambda: RayTransform.parallel(28, 3, pixel_size=-1.0), "pixel_size must be positive"),
        (lambda: RayTransform.fan(28, 3, 10.0, 60.0, 90, 1.0), "source_origin must be beyond the image's corners"),
        (lambda: RayTransform.fan(28, 3, 50.0, 100.0, 50, 1.0), "is missing on either side"),
        (lambda: Blur(torch.ones(2, 3), (1, 8, 8)), "kernel must have two odd sizes"),
        (lambda: Mask(torch.ones(8, 8), (1, 8, 8)), "mask must be boolean"),
        (lambda: Fourier(torch.ones(8, 8, dtype=torch.bool), (1, 8, 8)), r"mask must be boolean with shape \(8, 5\)"),
        (lambda: Matrix(torch.ones(3)), "M must have two dimensions"),
        (lambda: Matrix(torch.ones(3, 4), (1, 2, 3)), "must have 4 pixels"),
        (lambda: Matrix(torch.ones(3, 4), None, (2, 2)), "must have 3 numbers"),
        (lambda: rays()(torch.ones(1, 1, 3, 3)), r"x must have the shape \(..., 1, 12, 12\), but has \(1, 1, 3, 3\)"),
        (lambda: rays().fbp(torch.ones(1, 1, 3, 3)), r"y must have the shape \(..., 1, 7, 17\)"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
