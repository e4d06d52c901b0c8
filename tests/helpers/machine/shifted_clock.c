/* A wall clock that a test moves: preloaded into a process, it adds an offset to CLOCK_REALTIME.

   The offset, in nanoseconds, is the content of the file SHIFTED_CLOCK_FILE: 8 bytes, read at every call. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_ns;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("SHIFTED_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        offset_ns = found;
}

static struct timespec shifted(struct timespec moment, int sign) {
    int64_t ns = moment.tv_sec * INT64_C(1000000000) + moment.tv_nsec + (offset_ns ? sign * *offset_ns : 0);
    return (struct timespec){.tv_sec = ns / INT64_C(1000000000), .tv_nsec = ns % INT64_C(1000000000)};
}

int clock_gettime(clockid_t clock, struct timespec *moment) {
    int failed = syscall(SYS_clock_gettime, clock, moment);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *moment = shifted(*moment, 1);
    return failed;
}

int gettimeofday(struct timeval *restrict moment, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    moment->tv_sec = now.tv_sec;
    moment->tv_usec = now.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}
