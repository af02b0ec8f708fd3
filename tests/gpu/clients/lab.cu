// The public lab's program: 3 GiB succeeds, 2 GiB more is refused, then the memory comes back.
#include <cstdio>
#include <cuda_runtime.h>

static bool step(const char *what, cudaError_t got, cudaError_t want)
{
    printf("%s: %s\n", what, cudaGetErrorString(got));
    return got == want;
}

int main()
{
    const size_t gib = 1ull << 30;
    void *first = nullptr, *more = nullptr;
    bool right = step("allocate 3 GiB", cudaMalloc(&first, 3 * gib), cudaSuccess);
    right &= step("allocate another 2 GiB", cudaMalloc(&more, 2 * gib), cudaErrorMemoryAllocation);
    size_t free = 0, total = 0;
    right &= step("memory info", cudaMemGetInfo(&free, &total), cudaSuccess);
    cudaDeviceProp properties;
    right &= step("properties", cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    printf("total=%zu properties=%zu free=%zu\n", total, properties.totalGlobalMem, free);
    right &= step("write", cudaMemset(first, 1, 3 * gib), cudaSuccess);
    right &= step("free", cudaFree(first), cudaSuccess);
    right &= step("allocate 3 GiB again", cudaMalloc(&first, 3 * gib), cudaSuccess);
    puts(right ? "PASS" : "FAIL");
    return right ? 0 : 1;
}
