/* A small program for tools that look at one: 256 MiB, a kernel, and 64 GiB that only a bare run may get. */
#include <cstdio>

__global__ void fill(int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = i;
}

int main() {
    int *data = nullptr, last = 0;
    void *large = nullptr;
    size_t n = 64 << 20, free = 0, total = 0;
    if (cudaMalloc(&data, n * sizeof *data))
        return 1;
    fill<<<(unsigned)(n / 256), 256>>>(data, (int)n);
    cudaMemcpy(&last, data + n - 1, sizeof last, cudaMemcpyDeviceToHost);
    cudaMemGetInfo(&free, &total);
    cudaError_t result = cudaMalloc(&large, 64ull << 30);
    printf("last=%d total_mib=%zu large=%d\n", last, total >> 20, (int)result);
    (void)cudaGetLastError();
    cudaFree(large);
    cudaFree(data);
    return cudaDeviceReset();
}
