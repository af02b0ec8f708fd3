#pragma once
#include <stdint.h>

/* Bytes of device memory that an image is going to take, as far as it tells: the sections of a
 * cubin, the global variables of PTX text. 0 where it does not (fat binaries). An estimate:
 * never trusted, only charged ahead of a settle. */
uint64_t image_bytes(const void *image);

/* The same for a file. */
uint64_t image_file_bytes(const char *path);
