#include <stdio.h>
#include <stdlib.h>

/* Every allocator path that start-up code takes, then one line. */
int main(int argc, char **argv) {
    char *copy = malloc(1 << 20);
    if (!copy || !getenv("PATH"))
        return 2;
    snprintf(copy, 1 << 20, "hello %d %s", argc, argv[argc - 1]);
    puts(copy);
    free(copy);
    return 7;
}
