/* A binary image for the torture: a kernel `work` beside 4 MiB of global memory. */
__device__ unsigned char image[4 << 20];

extern "C" __global__ void work() {
    image[threadIdx.x]++;
}
