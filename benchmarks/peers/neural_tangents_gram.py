"""Time neural-tangents' empirical NTK: the full N x N x C x C Gram matrix of N inputs, after compilation.

The settings are the fastest of those tried (README.md has the numbers): structured derivatives, ``vmap_axes=0``, the
symmetric call (x, None), all under one ``jax.jit``, in square blocks of 200 inputs by ``nt.batch``.
"""

import os
from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
import neural_tangents as nt
from jax import Array
from protocol import INPUT_SHAPE, NUM_OUTPUTS, NUM_PARAMS, SEED, parser, report, stopwatch

WEIGHT_SHAPES = {  # (in, out) of a linear layer, (height, width, in, out) of a convolution
    "mlp": [(784, 200), (200, 200), (200, NUM_OUTPUTS)],
    "lenet": [(5, 5, 1, 16), (5, 5, 16, 32), (512, 120), (120, 84), (84, NUM_OUTPUTS)],
}


def initialise(case: str) -> list[tuple[Array, Array]]:
    """Draw weights and biases uniformly from +-1/sqrt(fan-in), layer by layer."""
    params = []
    for layer, (*fan_in, width) in enumerate(WEIGHT_SHAPES[case]):
        bound = prod(fan_in) ** -0.5
        key_w, key_b = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(SEED), layer))
        w = jax.random.uniform(key_w, (*fan_in, width), minval=-bound, maxval=bound)
        b = jax.random.uniform(key_b, (width,), minval=-bound, maxval=bound)
        params.append((w, b))
    assert sum(p.size for p in jax.tree_util.tree_leaves(params)) == NUM_PARAMS[case]
    return params


def network(params: list[tuple[Array, Array]], x: Array) -> Array:  # (N, 784) or (N, 28, 28, 1) -> (N, C)
    """Evaluate the MLP or LeNet; which of the two, the shapes of the weights say."""
    *hidden, (w_out, b_out) = params
    for w, b in hidden:
        if w.ndim == 4:
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + b)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        else:
            x = jax.nn.relu(x.reshape(x.shape[0], -1) @ w + b)
    return x @ w_out + b_out


def gram_fn(implementation: str, vmap: bool, batch_size: int, jit: bool) -> Callable[[Array, list], Array]:
    """The map (x, params) -> Gram; ``batch_size`` 0 takes all inputs at once."""
    options = {"vmap_axes": 0 if vmap else None, "implementation": nt.NtkImplementation[implementation]}
    ntk = nt.empirical_ntk_fn(network, trace_axes=(), **options)
    if batch_size:
        ntk = nt.batch(ntk, batch_size=batch_size)

    def gram(x: Array, params: list) -> Array:
        return ntk(x, None, params)

    return jax.jit(gram) if jit else gram


def main() -> None:
    """Compile, then time; arguments come from the command line."""
    options = parser(__doc__)
    names = [i.name for i in nt.NtkImplementation]
    options.add_argument("--implementation", choices=names, default="STRUCTURED_DERIVATIVES")
    options.add_argument("--no-vmap", action="store_true", help="do not promise that inputs are independent")
    options.add_argument("--no-jit", action="store_true", help="leave compilation to nt.batch, block by block")
    options.add_argument(
        "--batch-size", type=int, help="inputs per block, 0 for no blocks (default: 200 if it divides n)"
    )
    args = options.parse_args()
    if args.batch_size is None:
        args.batch_size = 0 if args.n % 200 else 200

    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)  # XLA sizes its thread pool, at the first operation, by the cores it may use
    x = jax.random.normal(jax.random.PRNGKey(SEED), (args.n, *INPUT_SHAPE[args.case]))
    x = jnp.moveaxis(x, 1, -1) if x.ndim == 4 else x  # channels last
    params = initialise(args.case)
    gram = gram_fn(args.implementation, not args.no_vmap, args.batch_size, not args.no_jit)
    K = jax.block_until_ready(gram(x, params))  # compiles
    assert K.shape == (args.n, args.n, NUM_OUTPUTS, NUM_OUTPUTS)
    assert K.dtype == jnp.float32
    del K
    seconds = stopwatch([lambda: jax.block_until_ready(gram(x, params))] * args.repeats)
    report("neural-tangents", args.case, args.n, seconds)


if __name__ == "__main__":
    main()
