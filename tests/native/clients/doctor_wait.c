/* Waits to be looked at; built static, for 32 bits, or for another C library. */
#include <unistd.h>

int main(void) {
    pause();
    return 0;
}
