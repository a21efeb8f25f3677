// Runs a grid on one CPU thread: the blocks one after the other, and each thread of a block as a
// fiber.
//
// A fiber runs until it waits for others. In a random order it also yields occasionally before a
// memory access. Each access is checked: it must lie in device memory, and a barrier must order it
// with accesses of other threads to the same bytes.
#include <setjmp.h>
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

// Constant for kernels; the runtime changes them between threads.
struct Place { unsigned x, y, z; };
Place thread_place, block_place, block_extent, grid_extent;
extern const uint3 threadIdx __attribute__((alias("thread_place")));
extern const uint3 blockIdx __attribute__((alias("block_place")));
extern const dim3 blockDim __attribute__((alias("block_extent")));
extern const dim3 gridDim __attribute__((alias("grid_extent")));

namespace emulator {
namespace {

constexpr size_t stack_bytes = 64 << 10, largest_shared = 227 << 10, most_threads = 1024;
constexpr int gives_way_one_in = 8;

enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Fiber {
    jmp_buf at;
    ucontext_t start;
    Place index;
    State state;
    int line, warp_phase;
    unsigned mask;
    uint64_t value;
    bool predicate, orders_memory;
};

// The last access to a byte in this launch. Phases are the intervals between barriers, numbered
// from 1 over all blocks. Bytes of an aligned word that is accessed as a whole share the shadow of
// the first one, unless that is `split`.
struct Touch { uint32_t phase; uint16_t thread, warp_phase; };
struct Shadow { Touch write, read; bool many_read, split; };
constexpr size_t word_bytes = 4;
struct Region { char *start, *stop; Shadow* shadow; };

std::vector<Fiber> fibers;
std::vector<Region> regions;
char* stacks;
ucontext_t bootstrap;
jmp_buf scheduler;
Fiber* self;
Library library;
Invoke kernel;
void** kernel_args;
uint32_t phase, block_start;
uint64_t random_state;
bool random_order;
char message[400];
alignas(1024) char dynamic[largest_shared];

uint64_t draw() {  // splitmix64
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void shuffle_order(std::vector<int>& order) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw() % i]);
}

[[noreturn]] void fail(const char* format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    Place t = self->index, b = block_place;
    snprintf(message, sizeof message, "block (%u, %u, %u), thread (%u, %u, %u): %s", b.x, b.y, b.z,
             t.x, t.y, t.z, text);
    _longjmp(scheduler, 2);
}

// Fibers.

__attribute__((noinline)) void wait() {
    if (!_setjmp(self->at)) _longjmp(scheduler, 1);
}

void fiber_main(int number) {
    Fiber& me = fibers[number];
    if (!_setjmp(me.at)) swapcontext(&me.start, &bootstrap);
    for (;;) {
        kernel(kernel_args);
        me.state = State::done;
        wait();
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

// Return 0 if no thread is waiting any more, 2 after a failure.
__attribute__((noinline)) int resume(Fiber& fiber) {
    self = &fiber;
    thread_place = fiber.index;
    int how = _setjmp(scheduler);
    if (how == 0) _longjmp(fiber.at, 1);
    return how;
}

// Resume the warps whose lanes are all waiting. Lanes that have returned or do not exist count as
// waiting.
bool release_warps(int count) {
    bool any = false;
    for (int first = 0; first < count; first += 32) {
        int lanes = std::min(32, count - first);
        for (int i = 0; i < lanes; i++) {
            Fiber& fiber = fibers[first + i];
            if (fiber.state != State::at_warp_barrier) continue;
            bool all = true;
            for (int j = 0; j < lanes; j++) {
                Fiber& other = fibers[first + j];
                if (!(fiber.mask >> j & 1) || other.state == State::done) continue;
                all &= other.state == State::at_warp_barrier && other.mask == fiber.mask;
            }
            if (!all) continue;
            for (int j = 0; j < lanes; j++) {
                Fiber& other = fibers[first + j];
                if (!(fiber.mask >> j & 1) || other.state == State::done) continue;
                other.state = State::ready;
                other.warp_phase += other.orders_memory;
            }
            any = true;
        }
    }
    return any;
}

// Return nullptr, or an error message.
const char* release_block(int count) {
    int line = 0;
    for (int i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        if (fiber.state == State::done) continue;
        self = &fiber;
        if (fiber.state == State::at_warp_barrier)
            return "waits for lanes of its warp that never arrive";
        if (line && fiber.line != line) return "waits at a different __syncthreads than other threads";
        line = fiber.line;
    }
    for (int i = 0; i < count; i++)
        if (fibers[i].state == State::at_block_barrier) fibers[i].state = State::ready;
    phase++;
    return nullptr;
}

bool run_block(int count, unsigned shared_bytes) {
    memset(library.shared, 0xff, library.stop - library.shared);
    memset(dynamic, 0xff, shared_bytes);
    block_start = ++phase;
    for (int i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        unsigned x = block_extent.x, y = block_extent.y;
        fiber.index = {i % x, i / x % y, i / x / y};
        fiber.state = State::ready;
        fiber.warp_phase = 0;
        // Value that other lanes receive from a lane that has returned.
        fiber.value = ~uint64_t(0);
    }
    std::vector<int> order;
    for (;;) {
        order.clear();
        bool waits = false;
        for (int i = 0; i < count; i++) {
            if (fibers[i].state == State::ready) order.push_back(i);
            waits |= fibers[i].state != State::done;
        }
        if (!waits) return true;
        if (order.empty() && !release_warps(count)) {
            if (const char* wrong = release_block(count)) {
                if (!_setjmp(scheduler)) fail("%s", wrong);
                return false;
            }
        }
        if (random_order) shuffle_order(order);
        for (int i : order)
            if (resume(fibers[i]) == 2) return false;
    }
}

// Accesses.

Region* find_region(const char* address, size_t size) {
    for (Region& region : regions)
        if (address >= region.start && address + size <= region.stop) return &region;
    return nullptr;
}

bool same_moment(const Touch& touch, int thread) {
    if (touch.phase != phase || touch.thread == thread) return false;
    // Barriers of a warp also order the lanes of that warp.
    bool together = touch.thread / 32 == thread / 32;
    return !together || touch.warp_phase == self->warp_phase;
}

// Return true if an earlier access by another thread is not ordered before the current one.
// Different blocks are never ordered, but each has shared memory of its own.
bool conflicts(const Touch& touch, int thread, bool shared) {
    if (touch.phase == 0 || (shared && touch.phase < block_start)) return false;
    return touch.phase < block_start || same_moment(touch, thread);
}

void note(Shadow& shadow, bool write, bool shared) {
    int thread = int(self - fibers.data());
    const char* where = shared ? "in shared memory" : "in global memory";
    if (conflicts(shadow.write, thread, shared))
        fail("race: %s data that another thread writes, %s", write ? "writes" : "reads", where);
    bool read = shadow.many_read && shadow.read.phase == phase;
    if (write && (read || conflicts(shadow.read, thread, shared)))
        fail("race: writes data that another thread reads, %s", where);
    Touch now = {phase, uint16_t(thread), uint16_t(self->warp_phase)};
    if (write) {
        shadow.write = now;
        return;
    }
    bool again = shadow.read.phase == phase;
    shadow.many_read = again && (shadow.many_read || same_moment(shadow.read, thread));
    shadow.read = now;
}

// Note an access to a whole word. After a write, its bytes have the same shadow again: a conflict
// with an earlier access to one of them would also be one with the write.
void note_word(Shadow* shadow, bool write, bool shared) {
    if (!shadow->split) return note(*shadow, write, shared);
    for (size_t i = 0; i < word_bytes; i++) note(shadow[i], write, shared);
    shadow->split = !write;
}

// Let each byte of the word that contains `address` have a shadow of its own.
void split_word(const Region& region, const char* address) {
    const char* word = address - reinterpret_cast<uintptr_t>(address) % word_bytes;
    if (word < region.start || word + word_bytes > region.stop) return;
    Shadow* shadow = region.shadow + (word - region.start);
    if (shadow->split) return;
    shadow->split = true;
    for (size_t i = 1; i < word_bytes; i++) shadow[i] = *shadow;
}

// Return true for threadIdx, blockIdx, blockDim and gridDim.
bool is_place(const char* address) {
    for (Place* place : {&thread_place, &block_place, &block_extent, &grid_extent})
        if (size_t(address - reinterpret_cast<char*>(place)) < sizeof(Place)) return true;
    return false;
}

void access(const void* pointer, size_t size, bool write) {
    if (!self) return;
    const char* address = static_cast<const char*>(pointer);
    char here;
    // Accesses to the thread's own stack and to constants of the library are not checked.
    if (size_t(address - (&here - stack_bytes)) < 2 * stack_bytes) return;
    Region* region = find_region(address, size);
    if (!region) {
        if (!write && (is_place(address) || (address >= library.start && address < library.stop)))
            return;
        fail("%s %zu bytes outside of the device's memory", write ? "writes" : "reads", size);
    }
    Shadow* shadow = region->shadow + (address - region->start);
    const bool shared = region < &regions[2];
    if ((reinterpret_cast<uintptr_t>(address) | size) % word_bytes == 0) {
        for (size_t i = 0; i < size; i += word_bytes) note_word(shadow + i, write, shared);
    } else {
        for (size_t i = 0; i < size; i++) {
            split_word(*region, address + i);
            note(shadow[i], write, shared);
        }
    }
    if (random_order && draw() % gives_way_one_in == 0) wait();
}

void add_region(char* start, char* stop) {
    regions.push_back({start, stop, static_cast<Shadow*>(nullptr)});
}

}  // namespace

void block_barrier(int line) {
    self->state = State::at_block_barrier;
    self->line = line;
    wait();
}

unsigned lane() { return unsigned(self - fibers.data()) % 32; }

void warp_barrier(unsigned mask, bool orders_memory) {
    if (!(mask >> lane() & 1)) fail("is not in the mask that it passes");
    self->state = State::at_warp_barrier;
    self->mask = mask;
    self->orders_memory = orders_memory;
    wait();
}

uint64_t exchange(unsigned mask, uint64_t value, int source) {
    self->value = value;
    warp_barrier(mask, false);
    size_t other = (self - fibers.data()) / 32 * 32 + source;
    unsigned count = block_extent.x * block_extent.y * block_extent.z;
    uint64_t got = other < count ? fibers[other].value : ~uint64_t(0);
    if (other < count && !(mask >> source & 1)) fail("reads from a lane that is not in the mask");
    warp_barrier(mask, false);
    return got;
}

unsigned ballot(unsigned mask, bool predicate) {
    self->predicate = predicate;
    warp_barrier(mask, false);
    unsigned result = 0, count = block_extent.x * block_extent.y * block_extent.z;
    size_t first = (self - fibers.data()) / 32 * 32;
    for (unsigned i = 0; i < 32 && first + i < count; i++)
        if (mask >> i & 1 && fibers[first + i].state != State::done)
            result |= unsigned(fibers[first + i].predicate) << i;
    warp_barrier(mask, false);
    return result;
}

bool block_or(int line, bool predicate) {
    self->predicate = predicate;
    block_barrier(line);
    unsigned count = block_extent.x * block_extent.y * block_extent.z;
    bool result = false;
    for (unsigned i = 0; i < count; i++)
        result |= fibers[i].state != State::done && fibers[i].predicate;
    block_barrier(line);
    return result;
}

namespace {

float tf32(unsigned word) { return emulated_bits<float>(word & 0xFFFFE000u); }

// c + the sum of N products as tensor cores of sm_80 compute it: products are exact, all terms
// are truncated to a multiple of 2^-24 of the power of two above the largest, and the sum is
// truncated to float32. Source: Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021.
template <int N> float add_products(float c, const float (&a)[N], const float (&b)[N]) {
    double terms[N + 1] = {c};
    for (int k = 0; k < N; k++) terms[k + 1] = double(a[k]) * b[k];
    double plain = 0;
    int most = -2000;
    for (double term : terms) {
        plain += term;
        int exponent;
        if (term != 0 && std::isfinite(term)) frexp(term, &exponent), most = std::max(most, exponent);
    }
    if (!std::isfinite(plain) || most == -2000) return float(plain);
    double unit = ldexp(1.0, std::max(most, -125) - 25), sum = 0;
    for (double term : terms) sum += trunc(term / unit);
    sum *= unit;
    float result = float(sum);
    return fabs(double(result)) > fabs(sum) ? nextafterf(result, 0) : result;
}

}  // namespace

namespace {

// c += A B for fragments of 32-bit words, of which half of the terms are added at once. Call
// number(word, k) returns term k of a word.
template <int TERMS, class Convert>
void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Convert number) {
    struct Operands { unsigned a[4], b[2]; } own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    self->value = reinterpret_cast<uint64_t>(&own);
    warp_barrier(~0u, false);
    const Fiber* lanes = &fibers[(self - fibers.data()) / 32 * 32];
    const auto operands = [&](int i) { return reinterpret_cast<const Operands*>(lanes[i].value); };
    int g = lane() / 4, t = lane() % 4;
    for (int e = 0; e < 4; e++)
        for (int half = 0; half < 2; half++) {
            float as[4 * TERMS], bs[4 * TERMS];
            for (int k = 0; k < 4 * TERMS; k++) {
                as[k] = number(operands(g * 4 + k / TERMS)->a[e / 2 + half * 2], k % TERMS);
                bs[k] = number(operands((t * 2 + e % 2) * 4 + k / TERMS)->b[half], k % TERMS);
            }
            c[e] = add_products(c[e], as, bs);
        }
    warp_barrier(~0u, false);
}

}  // namespace

void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma<1>(c, a, b0, b1, [](unsigned word, int) { return tf32(word); });
}

void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma<2>(c, a, b0, b1, [](unsigned word, int k) {
        return emulated_bits<float>(k ? word & 0xFFFF0000u : word << 16);
    });
}

float add_tf32_products(float c, const unsigned* a, const unsigned* b) {
    for (int half = 0; half < 2; half++) {
        float as[4], bs[4];
        for (int k = 0; k < 4; k++) as[k] = tf32(a[half * 4 + k]), bs[k] = tf32(b[half * 4 + k]);
        c = add_products(c, as, bs);
    }
    return c;
}

void* dynamic_shared() { return dynamic; }

void check_atomic(const void* address, size_t size) {
    if (!find_region(static_cast<const char*>(address), size))
        fail("atomic on %zu bytes outside of the device's memory", size);
}

const char* launch(Library of, Invoke invoke, void** args, const unsigned* extents, unsigned shared_bytes,
                   const uint64_t* memory, int num_regions, uint64_t seed) {
    grid_extent = {extents[0], extents[1], extents[2]};
    block_extent = {extents[3], extents[4], extents[5]};
    int count = int(extents[3] * extents[4] * extents[5]);
    library = of, kernel = invoke, kernel_args = args;
    random_state = seed, random_order = seed != 0;
    regions.clear();
    add_region(library.shared, library.stop);
    add_region(dynamic, dynamic + shared_bytes);
    for (int i = 0; i < num_regions; i++)
        add_region(reinterpret_cast<char*>(memory[2 * i]),
                   reinterpret_cast<char*>(memory[2 * i + 1]));
    for (Region& region : regions)
        region.shadow =
            static_cast<Shadow*>(calloc(region.stop - region.start + 1, sizeof(Shadow)));
    make_fibers(count);
    phase = 0;
    std::vector<int> blocks(extents[0] * extents[1] * extents[2]);
    for (size_t i = 0; i < blocks.size(); i++) blocks[i] = int(i);
    if (random_order) shuffle_order(blocks);
    bool good = true;
    for (int b : blocks) {
        unsigned x = grid_extent.x, y = grid_extent.y;
        block_place = {b % x, b / x % y, b / x / y};
        if (!(good = run_block(count, shared_bytes))) break;
    }
    // Fibers that did not finish are created again.
    if (!good) fibers.clear();
    self = nullptr;
    for (Region& region : regions) free(region.shadow);
    return good ? nullptr : message;
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

#define ACCESSES(size)                                                                            \
    void __tsan_read##size(void* p) { emulator::access(p, size, false); }                         \
    void __tsan_write##size(void* p) { emulator::access(p, size, true); }                         \
    void __tsan_unaligned_read##size(void* p) { emulator::access(p, size, false); }               \
    void __tsan_unaligned_write##size(void* p) { emulator::access(p, size, true); }               \
    void __tsan_volatile_read##size(void* p) { emulator::access(p, size, false); }                \
    void __tsan_volatile_write##size(void* p) { emulator::access(p, size, true); }
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t size) { emulator::access(p, size, false); }
void __tsan_write_range(void* p, size_t size) { emulator::access(p, size, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
}
