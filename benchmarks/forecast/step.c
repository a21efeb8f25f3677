/* Simulates data-parallel training with SimGrid's SMPI: each step computes for a random time, then
 * sums gradients. Rank 0 prints one line of JSON, with the definitions of a profile: the step is
 * wall time / steps, and all times are means over all ranks and steps.
 *
 * Arguments: steps, work_s, kind of lateness (none, normal, exponential, pareto, pareto2,
 * interrupted), its scale as a share of the work, standard deviation of the ranks' speeds, buckets,
 * bytes of a bucket, seed.
 */
#include <math.h>
#include <mpi.h>
#include <smpi/smpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZES = 9, REPEATS = 2, MOST_SWEPT = 8 };

static uint64_t state;

static double uniform(void) { /* splitmix64; (0, 1) */
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return ((double)((z ^ (z >> 31)) >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(void) {
  return sqrt(-2 * log(uniform())) * cos(2 * acos(-1) * uniform());
}

static double lateness(const char *kind) { /* standard deviation or mean of about 1 */
  if (!strcmp(kind, "normal")) return normal();
  if (!strcmp(kind, "exponential")) return -log(uniform());
  if (!strcmp(kind, "pareto")) return 1.5 * (pow(uniform(), -1.0 / 3) - 1); /* tail index 3 */
  if (!strcmp(kind, "pareto2")) return pow(uniform(), -1.0 / 2) - 1; /* tail index 2 */
  if (!strcmp(kind, "interrupted")) return uniform() < 0.005 ? 20 : 0; /* one step of 200 */
  return 0;
}

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int n) {
  qsort(values, n, sizeof *values, compare);
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static double sum_s(char *in, char *out, int bytes) { /* one all-reduce alone, after a barrier */
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  MPI_Allreduce(in, out, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  double own = MPI_Wtime() - begin, longest;
  MPI_Allreduce(&own, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return longest;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int steps = atoi(argv[1]), buckets = atoi(argv[6]), bytes = atoi(argv[7]);
  const double work = atof(argv[2]), scale = atof(argv[4]), spread = atof(argv[5]);
  state = strtoull(argv[8], NULL, 10) * 1000003u + (uint64_t)rank * 7919u;
  for (int i = 0; i < 16; i++) uniform();
  const double speed = exp(spread * normal());
  char *in = calloc(bytes * 4, 1), *out = calloc(bytes * 4, 1);
  double *busy = malloc(steps * sizeof *busy), *exposed = malloc(steps * sizeof *exposed);
  MPI_Barrier(MPI_COMM_WORLD);
  const double first = MPI_Wtime();
  for (int step = 0; step < steps; step++) {
    const double begin = MPI_Wtime();
    const double late = fmax(1 + scale * lateness(argv[3]), 0.1);
    smpi_execute_flops(work * speed * late * 1e9); /* hosts have 1 Gflop/s */
    const double computed = MPI_Wtime();
    for (int b = 0; b < buckets && ranks > 1; b++)
      MPI_Allreduce(in, out, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double end = MPI_Wtime();
    busy[step] = computed - begin;
    exposed[step] = end - computed;
  }
  const double own_wall = MPI_Wtime() - first;
  double *all_busy = malloc(sizeof(double) * steps * ranks);
  double *all_exposed = malloc(sizeof(double) * steps * ranks);
  double *walls = malloc(sizeof(double) * ranks);
  MPI_Gather(busy, steps, MPI_DOUBLE, all_busy, steps, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  MPI_Gather(exposed, steps, MPI_DOUBLE, all_exposed, steps, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  MPI_Gather(&own_wall, 1, MPI_DOUBLE, walls, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  const int swept = ranks > 1 && ranks <= MOST_SWEPT ? SIZES : 0;
  double sweep[SIZES];
  for (int i = 0; i < swept; i++) { /* bytes / 64 to 4 bytes, by powers of two */
    double times[REPEATS];
    const int size = (int)(bytes * pow(2, i - 6)) / 4 * 4;
    for (int k = 0; k < REPEATS; k++) times[k] = sum_s(in, out, size);
    sweep[i] = median(times, REPEATS);
  }
  if (rank == 0) {
    double wall = 0, compute = 0, transfer = 0, imbalance = 0;
    for (int r = 0; r < ranks; r++) wall += walls[r];
    for (int step = 0; step < steps; step++) {
      double longest = 0;
      for (int r = 0; r < ranks; r++) longest = fmax(longest, all_busy[r * steps + step]);
      for (int r = 0; r < ranks; r++) {
        const double own = all_busy[r * steps + step], sums = all_exposed[r * steps + step];
        const double waiting = fmin(longest - own, sums);
        compute += own;
        imbalance += waiting;
        transfer += sums - waiting;
      }
    }
    const double each = 1e3 / (steps * ranks);
    printf("{\"step_ms\": %.9g, \"compute\": %.9g, \"transfer\": %.9g, \"imbalance\": %.9g, "
           "\"sweep_ms\": [", wall * each, compute * each, transfer * each,
           imbalance * each);
    for (int i = 0; i < swept; i++)
      printf("%s%.9g", i ? ", " : "", 1e3 * sweep[i]);
    printf("]}\n");
  }
  MPI_Finalize();
  return 0;
}
