#include "sim_cuda.h"
void cu_host_release(struct cu_rec *rec){(void)rec;}
CUresult pool_free(struct cu_rec *rec, CUdeviceptr p){(void)rec;(void)p;return 1;}
bool pool_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size){(void)rec;(void)p;(void)base;(void)size;return 0;}
bool vmm_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size){(void)rec;(void)p;(void)base;(void)size;return 0;}
