"""A Numba kernel, with arrays moved by Numba itself."""

import numpy

# Numba of today asks for a name that NumPy of today no longer has.
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError
from past import past, result


@cuda.jit
def saxpy(a, x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = a * x[i] + y[i]


x, y = numpy.arange(1 << 20, dtype=numpy.float32), numpy.ones(1 << 20, dtype=numpy.float32)
on, to = cuda.to_device(x), cuda.to_device(y)
saxpy[4096, 256](2.0, on, to)
result("sum", float(to.copy_to_host().astype(numpy.float64).sum()))
past(
    lambda: cuda.device_array(32 << 30, dtype=numpy.uint8),
    CudaAPIError,
    lambda: cuda.device_array(64 << 20, dtype=numpy.uint8),
)
