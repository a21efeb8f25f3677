/* The memory traffic of a gradient sum in shared memory, and nothing else.
 *
 *   traffic THREADS ELEMENTS REPEATS CORES
 *
 * Each of P threads writes its own buffer of ELEMENTS floats. Then, and this is timed, all threads
 * meet at a barrier, each sums its slice over the P buffers and updates its slice of one shared
 * parameter array, w -= rate * sum, and all threads meet again. CORES is a list such as 0,1,2,3.
 *
 * Prints the nanoseconds of each repeat, from the last arrival at the first barrier to the last
 * departure from the second, one per line. Exit status 1 if a parameter is wrong, 2 for bad
 * arguments.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LINE = 128, WARM_UP = 5, SPINS = 4096, MAX_THREADS = 1024 };

static int num_threads, repeats;
static long elements;
static float **buffers, *parameters;
static int cores[MAX_THREADS], num_cores;
static const float rate = 0.0009765625f; /* 2^-10: products with whole numbers are exact. */

typedef struct { _Alignas(LINE) atomic_int value; } Counter;
static Counter arrived, phase;

typedef struct { _Alignas(LINE) int64_t begin, end; } Stamp;
static Stamp *stamps; /* (repeats, threads) */

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void barrier(void)
{
    int seen = atomic_load_explicit(&phase.value, memory_order_acquire);
    if (atomic_fetch_add_explicit(&arrived.value, 1, memory_order_acq_rel) == num_threads - 1) {
        atomic_store_explicit(&arrived.value, 0, memory_order_relaxed);
        atomic_store_explicit(&phase.value, seen + 1, memory_order_release);
        return;
    }
    int spins = 0;
    while (atomic_load_explicit(&phase.value, memory_order_acquire) == seen) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (++spins % SPINS == 0)
            sched_yield(); /* More threads than cores must not wait for a time slice. */
    }
}

/* Sums the elements [start, stop) of all buffers and updates the parameters. The number of buffers
 * is a loop around blocks that stay in registers and L1. */
static void sum_and_update(long start, long stop)
{
    enum { BLOCK = 1024 };
    float sum[BLOCK];
    for (long first = start; first < stop; first += BLOCK) {
        long count = stop - first < BLOCK ? stop - first : BLOCK;
        const float *zero = buffers[0] + first;
        for (long i = 0; i < count; i++)
            sum[i] = zero[i];
        for (int p = 1; p < num_threads; p++) {
            const float *buffer = buffers[p] + first;
            for (long i = 0; i < count; i++)
                sum[i] += buffer[i];
        }
        float *w = parameters + first;
        for (long i = 0; i < count; i++)
            w[i] -= rate * sum[i];
    }
}

/* Whole numbers that change from step to step. */
static float value(int thread, long i, int step) { return (float)((i + step) % 13 + thread); }

static void *work(void *argument)
{
    int thread = (int)(intptr_t)argument;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[thread % num_cores], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    /* Slices of whole cache lines; the pages of a slice belong to the thread that touches it. */
    long lines = (elements + 15) / 16;
    long start = 16 * (lines * thread / num_threads), stop = 16 * (lines * (thread + 1) / num_threads);
    if (stop > elements)
        stop = elements;
    buffers[thread] = aligned_alloc(4096, (size_t)(elements * 4 + 4095) / 4096 * 4096);
    for (long i = start; i < stop; i++)
        parameters[i] = 0.0f;
    barrier();
    for (int step = 0; step < WARM_UP + repeats; step++) {
        float *own = buffers[thread];
        for (long i = 0; i < elements; i++)
            own[i] = value(thread, i, step);
        /* Threads come to the timed barrier together, as after a balanced backward pass. */
        barrier();
        int64_t begin = now();
        barrier();
        sum_and_update(start, stop);
        barrier();
        if (step >= WARM_UP)
            stamps[(long)(step - WARM_UP) * num_threads + thread] = (Stamp){begin, now()};
    }
    return NULL;
}

static int wrong_parameters(void)
{
    long wrong = 0;
    for (long i = 0; i < elements; i++) {
        double sum = 0;
        for (int step = 0; step < WARM_UP + repeats; step++)
            for (int p = 0; p < num_threads; p++)
                sum += value(p, i, step);
        /* Exact as long as the sum fits into 24 bits; otherwise rounding is allowed. */
        double exact = -rate * sum, error = parameters[i] - exact;
        if (!(error <= 1e-4 * -exact && -error <= 1e-4 * -exact))
            wrong++;
    }
    if (wrong)
        fprintf(stderr, "%ld of %ld parameters are wrong\n", wrong, elements);
    return wrong != 0;
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 2;
    num_threads = atoi(arguments[1]);
    elements = atol(arguments[2]);
    repeats = atoi(arguments[3]);
    for (char *next = arguments[4]; *next && num_cores < MAX_THREADS; next += *next == ',')
        cores[num_cores++] = (int)strtol(next, &next, 10);
    if (num_threads < 1 || num_threads > MAX_THREADS || elements < 1 || repeats < 1 || !num_cores)
        return 2;
    buffers = calloc((size_t)num_threads, sizeof *buffers);
    parameters = aligned_alloc(4096, (size_t)(elements * 4 + 4095) / 4096 * 4096);
    stamps = aligned_alloc(LINE, sizeof *stamps * (size_t)repeats * (size_t)num_threads);
    pthread_t threads[MAX_THREADS];
    for (int i = 0; i < num_threads; i++)
        pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i);
    for (int i = 0; i < num_threads; i++)
        pthread_join(threads[i], NULL);
    for (int step = 0; step < repeats; step++) {
        Stamp *row = stamps + (long)step * num_threads;
        int64_t begin = row[0].begin, end = row[0].end;
        for (int p = 1; p < num_threads; p++) {
            begin = row[p].begin > begin ? row[p].begin : begin;
            end = row[p].end > end ? row[p].end : end;
        }
        printf("%lld\n", (long long)(end - begin));
    }
    return wrong_parameters();
}
