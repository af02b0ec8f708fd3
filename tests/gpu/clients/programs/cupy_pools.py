"""CuPy with each of its pools."""

import cupy
from past import past, result

GIB = 1 << 30
pools = {
    "default": cupy.get_default_memory_pool().malloc,
    "ordered": cupy.cuda.MemoryAsyncPool().malloc,
    "managed": cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc,
    "none": None,
}
for name, pool in pools.items():
    cupy.cuda.set_allocator(pool)
    x = cupy.arange(1 << 22, dtype=cupy.float64)
    result(name, float(cupy.sin(x).sum() + (x[:1024].reshape(32, 32) @ x[:1024].reshape(32, 32)).sum()))
    del x
    past(
        lambda: cupy.empty(32 * GIB, dtype=cupy.uint8),
        (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError),
        lambda: cupy.ones(64 << 20, dtype=cupy.uint8).sum(),
    )
