"""JAX: its own pool sizes itself from what the card shows; gradient descent on a small network."""

import os

import jax
import jax.numpy as jnp
from jaxlib.xla_client import XlaRuntimeError
from past import past, result

device = jax.devices()[0]
limit = device.memory_stats()["bytes_limit"]
print(f"pool {limit}")


def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ weights) - 0.5) ** 2)


x = jax.random.normal(jax.random.key(1), (256, 128))
weights = jax.random.normal(jax.random.key(2), (128, 64)) * 0.1
step = jax.jit(lambda w: w - 0.1 * jax.grad(loss)(w, x))
for _ in range(50):
    weights = step(weights)
result("loss", f"{float(loss(weights, x)):.6f}")
past(
    lambda: jnp.ones((32 << 30,), dtype=jnp.uint8).block_until_ready(),
    XlaRuntimeError,
    lambda: jnp.ones((64 << 20,), dtype=jnp.float32).sum().block_until_ready(),
)
print("preallocate", os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", ""))
