// Runs a grid on one CPU thread: the blocks one after the other, and each thread of a block as a
// fiber.
//
// A fiber runs until it waits for others. In a random order it also yields occasionally before a
// memory access. Each access is checked: it must lie in device memory, and a barrier must order it
// with accesses of other threads to the same bytes.
//
// Most of the time goes to these checks and to switches between fibers. So the shadow memory is not
// cleared between launches, a fiber resumes the next one without returning to a scheduler, and the
// last lane that arrives at an operation of a warp computes it for all lanes.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#define EMULATOR_RUNTIME
#include "emulator.h"

// threadIdx, blockIdx, blockDim and gridDim: constant for kernels, changed between threads.
struct Place { unsigned x, y, z; };
extern "C" {
Place emulator_places[4];
}
asm(".globl threadIdx, blockIdx, blockDim, gridDim\n"
    ".set threadIdx, emulator_places\n"
    ".set blockIdx, emulator_places + 12\n"
    ".set blockDim, emulator_places + 24\n"
    ".set gridDim, emulator_places + 36\n");

namespace emulator {
namespace {

Place &thread_place = emulator_places[0], &block_place = emulator_places[1];
Place &block_extent = emulator_places[2], &grid_extent = emulator_places[3];

constexpr size_t stack_bytes = 64 << 10, largest_shared = 227 << 10, most_threads = 1024;
constexpr int gives_way_one_in = 8, lanes_of_warp = 32;

enum class State { ready, at_block_barrier, at_warp_barrier, done };

// Where a fiber continues. The compiler's functions are several times as fast as setjmp and longjmp.
using Continuation = void* [5];

// An operation of the lanes in `mask`: operands[i] is what lane i passes, or null if lane i takes no
// part or has returned.
using WarpOperation = void (*)(unsigned mask, void* const* operands);

struct Fiber {
    Continuation at;
    ucontext_t start;
    Place index;
    State state;
    int line, warp_phase;
    unsigned mask;
    WarpOperation operation;
    void* operand;
    bool predicate, orders_memory;
};

struct Warp { unsigned waiting, absent; };  // Bits of lanes; absent: returned, or beyond the block.

// The last accesses to a word or byte. Phases are the intervals between barriers, numbered over all
// blocks and launches, so that the shadow of earlier launches is known to be old.
struct Touch { uint32_t phase; uint16_t thread, warp_phase; };
constexpr uint16_t several_readers = 1 << 15;  // Flag in the thread of a read.

// Shadow of an aligned word. If `write.phase` is `split_phase` and `read.phase` the first phase of
// this launch, each byte has a shadow of its own instead.
struct Shadow { Touch write, read; };
constexpr size_t word_bytes = 4;
constexpr uint32_t split_phase = ~0u;

struct Region {
    char *start, *stop;
    Shadow *words, *bytes;
    uint32_t first_phase;  // Earlier accesses do not count.
    bool is_shared;
    size_t offset(const char* address) const {
        return address - start + reinterpret_cast<uintptr_t>(start) % word_bytes;
    }
    bool contains(const char* address, size_t size) const {
        return address >= start && address + size <= stop;
    }
};

std::vector<Fiber> fibers;
std::vector<Region> regions;
Warp warps[most_threads / lanes_of_warp];
Region* last_region[2];  // Of reads and of writes.
Shadow *word_shadows, *byte_shadows;
size_t num_shadows;
char* stacks;
ucontext_t bootstrap;
Continuation scheduler;
Fiber* self;
Touch now;
const char* unchecked;  // The stack of `self`; without a thread, the whole memory.
size_t unchecked_bytes = ~size_t(0);
bool has_failed;
Library library;
Invoke kernel;
void** kernel_args;
uint32_t phase, block_start, launch_start;
uint64_t random_state;
bool random_order, block_predicate;
char message[400];
alignas(1024) char dynamic[largest_shared];

// Numbers of the fibers that can run: a ring, or in a random order the first elements of an array.
uint16_t ready[most_threads];
unsigned first_ready, num_ready;

uint64_t draw() {  // splitmix64
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int number_of(const Fiber& fiber) { return int(&fiber - fibers.data()); }

unsigned num_threads() { return block_extent.x * block_extent.y * block_extent.z; }

void describe_failure(const char* text) {
    Place t = self->index, b = block_place;
    snprintf(message, sizeof message, "block (%u, %u, %u), thread (%u, %u, %u): %s", b.x, b.y, b.z,
             t.x, t.y, t.z, text);
    has_failed = true;
}

// Fibers.

__attribute__((noinline)) void jump(Continuation& to) { __builtin_longjmp(to, 1); }

__attribute__((noinline)) void switch_to(Continuation& from, Continuation& to) {
    if (!__builtin_setjmp(from)) jump(to);
}

[[noreturn]] void fail(const char* format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    describe_failure(text);
    jump(scheduler);
    __builtin_unreachable();
}

void set_ready(Fiber& fiber) {
    fiber.state = State::ready;
    ready[(first_ready + num_ready++) % most_threads] = uint16_t(number_of(fiber));
}

void set_self(Fiber& fiber) {
    self = &fiber;
    unchecked = stacks + number_of(fiber) * stack_bytes;
    unchecked_bytes = stack_bytes;
    thread_place = fiber.index;
    now = {phase, uint16_t(number_of(fiber)), uint16_t(fiber.warp_phase)};
}

// Let others run; the caller is among those that are ready, or waits for a barrier.
void wait() {
    Fiber& from = *self;
    if (num_ready == 0) return switch_to(from.at, scheduler);
    if (random_order)
        std::swap(ready[first_ready % most_threads],
                  ready[(first_ready + draw() % num_ready) % most_threads]);
    num_ready--;
    Fiber& to = fibers[ready[first_ready++ % most_threads]];
    set_self(to);
    if (&to != &from) switch_to(from.at, to.at);
}

// Resume the lanes that wait with this mask if all have arrived, after the last one has computed
// the operation for all.
void release_warp(unsigned mask, int warp) {
    if (mask & ~(warps[warp].waiting | warps[warp].absent)) return;
    Fiber* lanes = &fibers[warp * lanes_of_warp];
    const unsigned present = mask & ~warps[warp].absent;
    void* operands[lanes_of_warp] = {};
    Fiber* any = &lanes[__builtin_ctz(present)];
    for (int i = 0; i < lanes_of_warp; i++) {
        if (!(present >> i & 1)) continue;
        if (lanes[i].mask != mask) return;
        if (lanes[i].operation != any->operation)
            fail("waits at a different operation of its warp than other lanes");
        operands[i] = lanes[i].operand;
    }
    if (any->operation) any->operation(mask, operands);
    warps[warp].waiting &= ~present;
    for (int i = 0; i < lanes_of_warp; i++) {
        if (!(present >> i & 1)) continue;
        lanes[i].warp_phase += lanes[i].orders_memory;
        set_ready(lanes[i]);
    }
}

void finish() {
    const int number = number_of(*self), warp = number / lanes_of_warp;
    self->state = State::done;
    warps[warp].absent |= 1u << number % lanes_of_warp;
    for (int i = 0; i < lanes_of_warp; i++)
        if (warps[warp].waiting >> i & 1) release_warp(fibers[warp * lanes_of_warp + i].mask, warp);
    wait();
}

void fiber_main(int number) {
    Fiber& me = fibers[number];
    if (!__builtin_setjmp(me.at)) swapcontext(&me.start, &bootstrap);
    for (;;) {
        kernel(kernel_args);
        finish();
    }
}

void make_fibers(int count) {
    if (!stacks) {
        stacks = static_cast<char*>(mmap(nullptr, stack_bytes * most_threads, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        fibers.reserve(most_threads);
    }
    for (int i = int(fibers.size()); i < count; i++) {
        fibers.emplace_back();
        ucontext_t& start = fibers.back().start;
        getcontext(&start);
        start.uc_stack.ss_sp = stacks + i * stack_bytes;
        start.uc_stack.ss_size = stack_bytes;
        start.uc_link = nullptr;
        makecontext(&start, reinterpret_cast<void (*)()>(fiber_main), 1, i);
        swapcontext(&bootstrap, &start);
    }
}

// Resume the fibers that are ready, until all wait or one fails.
__attribute__((noinline)) void run_fibers() {
    if (__builtin_setjmp(scheduler)) return;
    if (random_order)
        std::swap(ready[first_ready % most_threads],
                  ready[(first_ready + draw() % num_ready) % most_threads]);
    num_ready--;
    Fiber& first = fibers[ready[first_ready++ % most_threads]];
    set_self(first);
    jump(first.at);
}

// Let the threads continue that wait at a barrier of the block; all others have returned.
void release_block(int count) {
    int line = 0;
    block_predicate = false;
    for (int i = 0; i < count && !has_failed; i++) {
        Fiber& fiber = fibers[i];
        if (fiber.state == State::done) continue;
        self = &fiber;
        if (fiber.state == State::at_warp_barrier)
            describe_failure("waits for lanes of its warp that never arrive");
        else if (line && fiber.line != line)
            describe_failure("waits at a different __syncthreads than other threads");
        line = fiber.line;
        block_predicate |= fiber.predicate;
        set_ready(fiber);
    }
    phase++;
}

bool run_block(int count, unsigned shared_bytes) {
    memset(library.shared, 0xff, library.stop - library.shared);
    memset(dynamic, 0xff, shared_bytes);
    block_start = ++phase;
    regions[0].first_phase = regions[1].first_phase = block_start;
    for (Warp& warp : warps) warp = {0, 0};
    for (unsigned i = count; i < most_threads; i++)
        warps[i / lanes_of_warp].absent |= 1u << i % lanes_of_warp;
    first_ready = num_ready = 0;
    for (int i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        unsigned x = block_extent.x, y = block_extent.y;
        fiber.index = {i % x, i / x % y, i / x / y};
        fiber.warp_phase = 0;
        set_ready(fiber);
    }
    while (num_ready > 0) {
        run_fibers();
        if (!has_failed) release_block(count);
        if (has_failed) return false;
    }
    return true;
}

// Accesses.

Region* find_region(const char* address, size_t size, bool write) {
    Region*& last = last_region[write];
    if (last->contains(address, size)) return last;
    for (Region& region : regions)
        if (region.contains(address, size)) return last = &region;
    return nullptr;
}

// Return true if no barrier separates a touch of this phase from the current access by another
// thread. Barriers of a warp order the lanes of that warp.
bool is_concurrent(Touch touch) {
    const unsigned thread = touch.thread & ~several_readers;
    if (touch.phase != phase || thread == now.thread) return false;
    return thread / lanes_of_warp != now.thread / lanes_of_warp || touch.warp_phase == now.warp_phase;
}

// Return true if an earlier access is not ordered before the current one. Different blocks are never
// ordered, but each has shared memory of its own.
bool conflicts(Touch touch, const Region& region) {
    if (touch.phase < region.first_phase) return false;
    return touch.phase < block_start || is_concurrent(touch);
}

[[noreturn]] __attribute__((noinline)) void fail_race(const char* what, const Region& region) {
    fail("race: %s, in %s memory", what, region.is_shared ? "shared" : "global");
}

void note(Shadow& shadow, bool write, const Region& region) {
    if (conflicts(shadow.write, region))
        fail_race(write ? "writes data that another thread writes" :
                          "reads data that another thread writes", region);
    const bool several = shadow.read.phase == phase && shadow.read.thread & several_readers;
    if (!write) {
        const bool concurrent = several || is_concurrent(shadow.read);
        shadow.read = now;
        if (concurrent) shadow.read.thread |= several_readers;
        return;
    }
    if (several || conflicts(shadow.read, region))
        fail_race("writes data that another thread reads", region);
    shadow.write = now;
}

bool is_split(const Shadow& word) {
    return word.write.phase == split_phase && word.read.phase == launch_start;
}

// Let each byte of a word have a shadow of its own.
Shadow* split(Shadow& word, const Region& region) {
    Shadow* bytes = region.bytes + (&word - region.words) * word_bytes;
    if (!is_split(word)) {
        if (word.write.phase == split_phase) word = {};
        for (size_t i = 0; i < word_bytes; i++) bytes[i] = word;
        word = {{split_phase, 0, 0}, {launch_start, 0, 0}};
    }
    return bytes;
}

// Note an access to a whole word whose bytes had shadows of their own. After a write they share one
// again: a conflict with an earlier access to one of them would also be one with the write.
__attribute__((noinline)) void note_split_word(Shadow& word, bool write, const Region& region) {
    if (!is_split(word)) {  // In an earlier launch.
        word = {};
        return note(word, write, region);
    }
    Shadow* bytes = split(word, region);
    for (size_t i = 0; i < word_bytes; i++) note(bytes[i], write, region);
    if (write) word = bytes[0];
}

__attribute__((noinline)) void note_bytes(const char* address, size_t size, bool write,
                                          const Region& region) {
    for (size_t at = region.offset(address), end = at + size; at < end; at++)
        note(split(region.words[at / word_bytes], region)[at % word_bytes], write, region);
}

// Check an access to device memory; return false if the address is none.
inline __attribute__((always_inline)) bool check(const char* address, size_t size, bool write) {
    Region* region = find_region(address, size, write);
    if (!region) return false;
    if ((reinterpret_cast<uintptr_t>(address) | size) % word_bytes != 0) {
        note_bytes(address, size, write, *region);
        return true;
    }
    Shadow* word = region->words + region->offset(address) / word_bytes;
    for (size_t i = 0; i < size / word_bytes; i++) {
        if (word[i].write.phase == split_phase)
            note_split_word(word[i], write, *region);
        else
            note(word[i], write, *region);
    }
    return true;
}

[[noreturn]] __attribute__((noinline)) void fail_outside(const char* what, size_t size) {
    fail("%s %zu bytes outside of the device's memory", what, size);
}

template <size_t SIZE, bool WRITE> __attribute__((noinline)) void access_memory(const char* address) {
    const size_t place = address - reinterpret_cast<const char*>(emulator_places);
    if (!WRITE && place < sizeof emulator_places) return;
    if (!check(address, SIZE, WRITE)) {
        // Constants of the library are not checked.
        if (!WRITE && address >= library.start && address < library.stop) return;
        fail_outside(WRITE ? "writes" : "reads", SIZE);
    }
    if (random_order && draw() % gives_way_one_in == 0) {
        set_ready(*self);
        wait();
    }
}

// Accesses of a thread to its own stack are frequent and not checked.
bool is_unchecked(const void* pointer) {
    return size_t(static_cast<const char*>(pointer) - unchecked) < unchecked_bytes;
}

template <size_t SIZE, bool WRITE> void access(const void* pointer) {
    if (!is_unchecked(pointer)) access_memory<SIZE, WRITE>(static_cast<const char*>(pointer));
}

template <bool WRITE> void access_range(const void* pointer, size_t size) {
    if (is_unchecked(pointer)) return;
    const char* address = static_cast<const char*>(pointer);
    const bool whole_words = (reinterpret_cast<uintptr_t>(address) | size) % word_bytes == 0;
    for (size_t i = 0; i < size; i += whole_words ? word_bytes : 1)
        whole_words ? access_memory<word_bytes, WRITE>(address + i) :
                      access_memory<1, WRITE>(address + i);
}

// Check a read of shared memory by a lane of this warp.
unsigned read_word(int lane, const void* address) {
    Fiber& caller = *self;
    set_self(fibers[number_of(caller) / lanes_of_warp * lanes_of_warp + lane]);
    if (!check(static_cast<const char*>(address), word_bytes, false)) fail_outside("reads", word_bytes);
    set_self(caller);
    return *static_cast<const unsigned*>(address);
}

void add_region(char* start, char* stop, bool is_shared) {
    regions.push_back({start, stop, nullptr, nullptr, launch_start, is_shared});
}

// Give each region a part of the shadow memory.
void assign_shadows() {
    size_t size = 0;
    for (Region& region : regions) size += (region.offset(region.stop) + word_bytes) / word_bytes;
    if (size > num_shadows) {
        free(word_shadows), free(byte_shadows);
        num_shadows = 2 * size;
        word_shadows = static_cast<Shadow*>(calloc(num_shadows, sizeof(Shadow)));
        byte_shadows = static_cast<Shadow*>(calloc(num_shadows, word_bytes * sizeof(Shadow)));
    }
    size_t at = 0;
    for (Region& region : regions) {
        region.words = word_shadows + at, region.bytes = byte_shadows + at * word_bytes;
        at += (region.offset(region.stop) + word_bytes) / word_bytes;
    }
    last_region[0] = last_region[1] = regions.data();
}

void wait_for_warp(unsigned mask, WarpOperation operation, void* operand, bool orders_memory) {
    const int number = number_of(*self), lane = number % lanes_of_warp;
    if (!(mask >> lane & 1)) fail("is not in the mask that it passes");
    self->state = State::at_warp_barrier;
    self->mask = mask, self->operation = operation, self->operand = operand;
    self->orders_memory = orders_memory;
    warps[number / lanes_of_warp].waiting |= 1u << lane;
    release_warp(mask, number / lanes_of_warp);
    wait();
}

}  // namespace

void block_barrier(int line) { block_or(line, false); }

bool block_or(int line, bool predicate) {
    self->state = State::at_block_barrier;
    self->line = line;
    self->predicate = predicate;
    wait();
    return block_predicate;
}

unsigned lane() { return unsigned(number_of(*self)) % lanes_of_warp; }

void warp_barrier(unsigned mask) { wait_for_warp(mask, nullptr, nullptr, true); }

uint64_t exchange(unsigned mask, uint64_t value, int source) {
    struct Operand { uint64_t value, received; int source; } own = {value, 0, source};
    const unsigned first = number_of(*self) / lanes_of_warp * lanes_of_warp;
    if (first + source < num_threads() && !(mask >> source & 1))
        fail("reads from a lane that is not in the mask");
    const auto give = [](unsigned, void* const* operands) {
        for (int i = 0; i < lanes_of_warp; i++) {
            if (!operands[i]) continue;
            Operand& to = *static_cast<Operand*>(operands[i]);
            const auto* from = static_cast<const Operand*>(operands[to.source % lanes_of_warp]);
            to.received = from ? from->value : ~uint64_t(0);  // All ones of a lane that has returned.
        }
    };
    wait_for_warp(mask, give, &own, false);
    return own.received;
}

unsigned ballot(unsigned mask, bool predicate) {
    struct Operand { bool predicate; unsigned received; } own = {predicate, 0};
    const auto vote = [](unsigned, void* const* operands) {
        unsigned result = 0;
        for (int i = 0; i < lanes_of_warp; i++)
            if (operands[i]) result |= unsigned(static_cast<Operand*>(operands[i])->predicate) << i;
        for (int i = 0; i < lanes_of_warp; i++)
            if (operands[i]) static_cast<Operand*>(operands[i])->received = result;
    };
    wait_for_warp(mask, vote, &own, false);
    return own.received;
}

// Matrices in shared memory.

namespace {

struct Rows {
    unsigned* words;
    const char* row;
    Rows(unsigned (&to)[4], const void* from) : words(to), row(static_cast<const char*>(from)) {
        if (reinterpret_cast<uintptr_t>(from) % 16) fail("passes a row that is not aligned");
    }
};

const void* word_of(void* const* operands, int lane, int word) {
    if (!operands[lane]) fail("reads a matrix with lanes that have returned");
    return static_cast<Rows*>(operands[lane])->row + word * word_bytes;
}

}  // namespace

void ldmatrix_x4(unsigned (&words)[4], const void* row) {
    Rows own(words, row);
    const auto load = [](unsigned, void* const* operands) {
        for (int i = 0; i < lanes_of_warp; i++)
            for (int q = 0; q < 4; q++)
                static_cast<Rows*>(operands[i])->words[q] =
                    read_word(i, word_of(operands, q * 8 + i / 4, i % 4));
    };
    wait_for_warp(~0u, load, &own, false);
}

void ldmatrix_x4_transposed(unsigned (&words)[4], const void* row) {
    Rows own(words, row);
    const auto load = [](unsigned, void* const* operands) {
        for (int i = 0; i < lanes_of_warp; i++)
            for (int q = 0; q < 4; q++) {
                unsigned result = 0;
                for (int half = 0; half < 2; half++) {
                    const int source = q * 8 + i % 4 * 2 + half, column = i / 4;
                    const unsigned word = read_word(i, word_of(operands, source, column / 2));
                    result |= (column % 2 ? word >> 16 : word & 0xFFFF) << half * 16;
                }
                static_cast<Rows*>(operands[i])->words[q] = result;
            }
    };
    wait_for_warp(~0u, load, &own, false);
}

// Tensor cores.

namespace {

float tf32(unsigned word) { return emulated_bits<float>(word & 0xFFFFE000u); }

float bf16(unsigned word, int k) {
    return emulated_bits<float>(k ? word & 0xFFFF0000u : word << 16);
}

int biased_exponent(double x) { return int(emulated_bits<uint64_t>(x) >> 52 & 0x7FF); }

double power_of_two(int exponent) {
    return emulated_bits<double>(uint64_t(exponent + 1023) << 52);
}

// c + the sum of N products as tensor cores of sm_80 compute it: products are exact, all terms
// are truncated to a multiple of 2^-24 of the power of two above the largest, and the sum is
// truncated to float32. Source: Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021.
template <int N> float add_products(float c, const float* a, const float* b) {
    double terms[N + 1] = {c};
    for (int k = 0; k < N; k++) terms[k + 1] = double(a[k]) * b[k];
    double plain = 0;
    int most = 0;
    for (double term : terms) plain += term, most = std::max(most, biased_exponent(term));
    if (most == 0 || most == 0x7FF) return float(plain);  // Zero, infinite or not a number.
    const int unit = std::max(most - 1022, -125) - 25;
    const double inverse = power_of_two(-unit);
    int64_t sum = 0;
    for (double term : terms) sum += int64_t(term * inverse);
    const double exact = double(sum) * power_of_two(unit);
    const float result = float(exact);
    return fabs(double(result)) > fabs(exact) ?
               emulated_bits<float>(emulated_bits<unsigned>(result) - 1) : result;
}

// c + the sum of 2 N products, of which half are added at once.
template <int N> float add_halves(float c, const float* a, const float* b) {
    return add_products<N>(add_products<N>(c, a, b), a + N, b + N);
}

// Row g of A has the words of lanes 4 g to 4 g + 3, column n of B those of lanes 4 n to 4 n + 3.
// Element e of C of lane 4 g + t is in row g + e / 2 · 8 and column 2 t + e % 2.
struct Fragments { float* c; unsigned a[4], b[2]; };

// c += A B, with TERMS terms in a word. number(word, k) returns term k of a word.
template <int TERMS, class Convert>
void multiply_fragments(void* const* operands, Convert number) {
    constexpr int DEPTH = 8 * TERMS;
    float a[16][DEPTH], b[8][DEPTH];
    for (int i = 0; i < lanes_of_warp; i++) {
        if (!operands[i]) fail("multiplies matrices with lanes that have returned");
        const Fragments& own = *static_cast<Fragments*>(operands[i]);
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < TERMS; k++) {
                const int at = (half * 4 + i % 4) * TERMS + k;
                for (int m = 0; m < 2; m++) a[i / 4 + m * 8][at] = number(own.a[half * 2 + m], k);
                b[i / 4][at] = number(own.b[half], k);
            }
    }
    for (int i = 0; i < lanes_of_warp; i++)
        for (int e = 0; e < 4; e++) {
            float& sum = static_cast<Fragments*>(operands[i])->c[e];
            sum = add_halves<DEPTH / 2>(sum, a[i / 4 + e / 2 * 8], b[i % 4 * 2 + e % 2]);
        }
}

}  // namespace

void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Fragments own = {c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    const auto multiply = [](unsigned, void* const* operands) {
        multiply_fragments<1>(operands, [](unsigned word, int) { return tf32(word); });
    };
    wait_for_warp(~0u, multiply, &own, false);
}

void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Fragments own = {c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    const auto multiply = [](unsigned, void* const* operands) {
        multiply_fragments<2>(operands, bf16);
    };
    wait_for_warp(~0u, multiply, &own, false);
}

namespace {

struct WarpGroupOperands {
    float (*c)[4];
    const unsigned* a;
    unsigned long long b;
    int eights;
    bool adds;
};

// Offset in shared memory of 32-bit word k of a column of operand B of wgmma, which a matrix
// descriptor describes. Source: PTX ISA, "Matrix descriptor format" and "Strides" of wgmma, K-major.
unsigned described_offset(unsigned long long descriptor, int column, int k) {
    const auto field = [&](int bit) { return unsigned(descriptor >> bit & 0x3FFF) * 16; };
    const unsigned first = field(0), along = field(16), across = field(32);
    const unsigned mode = unsigned(descriptor >> 62);
    unsigned at = first + column / 8 * across;
    if (mode == 0) return at + k / 4 * along + column % 8 * 16 + k % 4 * 4;
    const unsigned row_bytes = 256 >> mode;  // 1: 128-byte swizzle, 2: 64, 3: 32.
    at += column % 8 * row_bytes + k * 4;
    return at ^ (at >> 3 & (row_bytes - 16));
}

void multiply_described(void* const* operands) {
    float a[16][8], b[8][8];
    for (int i = 0; i < lanes_of_warp; i++) {
        if (!operands[i]) fail("multiplies matrices with lanes that have returned");
        for (int q = 0; q < 4; q++)
            a[i / 4 + q % 2 * 8][q / 2 * 4 + i % 4] =
                tf32(static_cast<WarpGroupOperands*>(operands[i])->a[q]);
    }
    const WarpGroupOperands& first = *static_cast<WarpGroupOperands*>(operands[0]);
    for (int j = 0; j < first.eights; j++) {
        for (int n = 0; n < 8; n++)
            for (int k = 0; k < 8; k++) {
                const char* address = dynamic + described_offset(first.b, j * 8 + n, k);
                // Two lanes, so that a write by any lane is a race.
                for (int g = 0; g < 2; g++) b[n][k] = tf32(read_word(g * 4 + n / 2, address));
            }
        for (int i = 0; i < lanes_of_warp; i++) {
            const WarpGroupOperands& own = *static_cast<WarpGroupOperands*>(operands[i]);
            for (int e = 0; e < 4; e++) {
                float& sum = own.c[j][e];
                sum = add_halves<4>(own.adds ? sum : 0.0f, a[i / 4 + e / 2 * 8],
                                    b[i % 4 * 2 + e % 2]);
            }
        }
    }
}

}  // namespace

void wgmma_tf32(float (*c)[4], int eights, const unsigned (&a)[4], unsigned long long b, bool adds) {
    WarpGroupOperands own = {c, a, b, eights, adds};
    const auto multiply = [](unsigned, void* const* operands) { multiply_described(operands); };
    wait_for_warp(~0u, multiply, &own, false);
}

void* dynamic_shared() { return dynamic; }

void check_atomic(const void* address, size_t size) {
    if (!find_region(static_cast<const char*>(address), size, true))
        fail("atomic on %zu bytes outside of the device's memory", size);
}

const char* launch(Library of, Invoke invoke, void** args, const unsigned* extents, unsigned shared_bytes,
                   const uint64_t* memory, int num_regions, uint64_t seed) {
    grid_extent = {extents[0], extents[1], extents[2]};
    block_extent = {extents[3], extents[4], extents[5]};
    library = of, kernel = invoke, kernel_args = args;
    random_state = seed, random_order = seed != 0;
    has_failed = false;
    launch_start = ++phase;
    regions.clear();
    add_region(library.shared, library.stop, true);
    add_region(dynamic, dynamic + shared_bytes, true);
    for (int i = 0; i < num_regions; i++)
        add_region(reinterpret_cast<char*>(memory[2 * i]),
                   reinterpret_cast<char*>(memory[2 * i + 1]), false);
    assign_shadows();
    make_fibers(int(num_threads()));
    std::vector<int> blocks(extents[0] * extents[1] * extents[2]);
    for (size_t i = 0; i < blocks.size(); i++) blocks[i] = int(i);
    if (random_order)
        for (size_t i = blocks.size(); i > 1; i--) std::swap(blocks[i - 1], blocks[draw() % i]);
    for (int b : blocks) {
        unsigned x = grid_extent.x, y = grid_extent.y;
        block_place = {b % x, b / x % y, b / x / y};
        if (!run_block(int(num_threads()), shared_bytes)) break;
    }
    // Fibers that did not finish are created again.
    if (has_failed) fibers.clear();
    self = nullptr, unchecked = nullptr, unchecked_bytes = ~size_t(0);
    return has_failed ? message : nullptr;
}

}  // namespace emulator

// Handlers of -fsanitize=alignment,bounds; their first argument begins with a source location.

struct SourcePlace { const char* file; unsigned line, column; };
extern "C" void __ubsan_handle_type_mismatch_v1(SourcePlace* place, size_t pointer) {
    const char* what = pointer ? "not aligned" : "at a null pointer";
    if (emulator::self) emulator::fail("an access %s, %s:%u", what, place->file, place->line);
}
extern "C" void __ubsan_handle_out_of_bounds(SourcePlace* place, size_t index) {
    emulator::fail("index %zd is outside its array, %s:%u", index, place->file, place->line);
}

// Handlers of -fsanitize=thread.

#define ACCESS(name, size) \
    void __tsan_##name##read##size(void* p) { emulator::access<size, false>(p); }                 \
    void __tsan_##name##write##size(void* p) { emulator::access<size, true>(p); }
#define ACCESSES(size) ACCESS(, size) ACCESS(unaligned_, size) ACCESS(volatile_, size)
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t size) { emulator::access_range<false>(p, size); }
void __tsan_write_range(void* p, size_t size) { emulator::access_range<true>(p, size); }
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
}
