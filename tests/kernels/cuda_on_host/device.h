// `device.cuh` on a CPU: a block's threads are fibers, which take turns where they meet. Blocks run one after another. Where
// ThreadSanitizer watches, all threads of all blocks are fibers of their own, so that it takes them as running at once.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

struct alignas(8) uint2 {
    uint32 x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    uint32 x, y, z, w;
};

#define KERNEL(threads, blocks) static void
#define DEVICE inline
#define SHARED static
#define DYNAMIC_SHARED(name) uint8* const name = host::shared

constexpr uint32 ALL_LANES = 0xffffffffu;

namespace host {

constexpr int LANES = 32;
constexpr int STACK = 256 << 10;
constexpr int MOST_SHARED = 228 << 10;
constexpr uint8 UNTOUCHED = 0xab;
// Each takes ThreadSanitizer a megabyte.
constexpr int MOST_FIBERS = 2048;

struct Meeting {
    int arrived = 0;
    unsigned turn = 0;
    // Of two bytes by which its turns are known, which no other block's meeting has.
    const char* place = nullptr;
};

struct Operands {
    uint32 words[6];
};

struct Copy {
    void* to;
    const void* from;
};

struct Copies {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

static uint8* shared;
static std::vector<ucontext_t> threads;
static std::vector<bool> is_done;
static std::vector<int> turns, places;
// By blocks if races are watched, else the same for all; one of each for all kernels of a process.
inline std::vector<std::unique_ptr<char[]>> stacks, memories;
inline std::vector<void*> fibers;
static void* outside_fiber;
static int first_fiber;
static std::vector<Meeting> warps;
static std::vector<Operands> operands[2];
static std::vector<Copies> copies;
static Meeting block;
static ucontext_t outside;
static std::function<void()> body;
static int current, block_x, block_y, grid_x;

// Each block's threads take turns in an order of its own, so that what lacks a barrier does not pass by luck.
inline void shuffle_turns(int size) {
    static uint32 state = 1;
    turns.resize(size);
    places.resize(size);
    for (int each = 0; each < size; ++each) turns[each] = each;
    for (int each = size - 1; each > 0; --each) {
        state = state * 1664525 + 1013904223;
        std::swap(turns[each], turns[(state >> 8) % (each + 1)]);
    }
    for (int each = 0; each < size; ++each) places[turns[each]] = each;
}

inline void next_thread() {
    const int from = current, size = static_cast<int>(threads.size());
    do current = turns[(places[current] + 1) % size];
    while (is_done[current] && current != from);
    if (current == from) return;
    races::switch_to(fibers[first_fiber + current]);
    swapcontext(&threads[from], &threads[current]);
}

inline void meet(Meeting& meeting, int size) {
    const unsigned turn = meeting.turn;
    if (++meeting.arrived == size) {
        meeting.arrived = 0;
        ++meeting.turn;
        return;
    }
    while (meeting.turn == turn) next_thread();
}

// The same, with all that was written before.
inline void synchronize(Meeting& meeting, int size) {
    const void* const turn = meeting.place + meeting.turn % 2;
    races::release(turn);
    meet(meeting, size);
    races::acquire(turn);
}

inline Meeting& own_warp() { return warps[current / LANES]; }

// What all lanes of this warp bring to a meeting.
inline const Operands* exchange(const Operands& own) {
    const races::OfHost of_host;
    auto& slots = operands[own_warp().turn % 2];
    slots[current] = own;
    const int warp = current / LANES;
    meet(own_warp(), LANES);
    return &slots[warp * LANES];
}

// The first thread that has not ended, or `outside`, which goes on.
inline std::pair<void*, ucontext_t*> next_of_ended() {
    const races::OfHost of_host;
    is_done[current] = true;
    for (size_t each = 0; each < is_done.size(); ++each)
        if (!is_done[each]) {
            current = static_cast<int>(each);
            return {fibers[first_fiber + current], &threads[current]};
        }
    return {outside_fiber, &outside};
}

// What comes before a kernel is there for its threads, and what they have done for what comes after it.
inline void enter() {
    races::acquire(&grid_x);
    body();
    races::release(&body);
    const auto next = next_of_ended();
    races::switch_to(next.first);
    setcontext(next.second);
}

// One block, with memory and fibers number `number`.
inline void run_block(int size, int shared_bytes, int number) {
    shared = reinterpret_cast<uint8*>((reinterpret_cast<size_t>(memories[number].get()) + 127) / 128 * 128);
    first_fiber = number * size;
    is_done.assign(size, false);
    shuffle_turns(size);
    warps.assign(size / LANES, {});
    copies.assign(size, {});
    block = {};
    // No stack is ever that deep.
    for (int warp = 0; warp < size / LANES; ++warp) warps[warp].place = stacks[first_fiber + warp * LANES].get();
    block.place = stacks[first_fiber].get() + 2;
    for (int each = 0; each < size; ++each) {
        getcontext(&threads[each]);
        threads[each].uc_stack.ss_sp = stacks[first_fiber + each].get();
        threads[each].uc_stack.ss_size = STACK;
        threads[each].uc_link = nullptr;
        makecontext(&threads[each], enter, 0);
    }
    current = turns[0];
    forbid(shared + shared_bytes, MOST_SHARED - shared_bytes);
    races::switch_to(fibers[first_fiber + current]);
    swapcontext(&outside, &threads[current]);
    allow(shared + shared_bytes, MOST_SHARED - shared_bytes);
    for (int each = shared_bytes; each < MOST_SHARED; ++each)
        if (shared[each] != UNTOUCHED) {
            fprintf(stderr, "a block writes to byte %d of %d in shared memory\n", each, shared_bytes);
            abort();
        }
}

inline void run(int x, int y, int size, int shared_bytes, std::function<void()> kernel) {
    const races::OfHost of_host;
    const int at_once = races::ARE_WATCHED ? std::min(x * y, MOST_FIBERS / size) : 1;
    body = kernel;
    grid_x = x;
    threads.resize(size);
    operands[0].resize(size);
    operands[1].resize(size);
    outside_fiber = races::own_fiber();
    while (static_cast<int>(stacks.size()) < at_once * size) stacks.emplace_back(new char[STACK]);
    while (fibers.size() < stacks.size()) fibers.push_back(races::new_fiber());
    while (static_cast<int>(memories.size()) < at_once) memories.emplace_back(new char[MOST_SHARED + 128]);
    for (int first = 0; first < x * y; first += at_once) {
        const int blocks = std::min(at_once, x * y - first);
        for (int each = 0; each < blocks; ++each) memset(memories[each].get(), UNTOUCHED, MOST_SHARED + 128);
        races::release(&grid_x);
        for (int each = 0; each < blocks; ++each) {
            block_y = (first + each) / x;
            block_x = (first + each) % x;
            run_block(size, shared_bytes, each);
        }
        races::acquire(&body);
    }
}

}  // namespace host

DEVICE int of_host(const int& number) {
    const races::OfHost of_host;
    return number;
}
DEVICE int thread_number() { return of_host(host::current); }
DEVICE int block_number() { return of_host(host::block_x); }
DEVICE int block_number_y() { return of_host(host::block_y); }
DEVICE int blocks_in_grid() { return of_host(host::grid_x); }

DEVICE void wait_for_last_kernel() {}
DEVICE void let_next_kernel_begin() {}

DEVICE void sync_block() {
    const races::OfHost of_host;
    host::synchronize(host::block, static_cast<int>(host::threads.size()));
}
DEVICE void sync_warp() {
    const races::OfHost of_host;
    host::synchronize(host::own_warp(), host::LANES);
}

template <typename T>
DEVICE T from_lane(T value, int lane) {
    host::Operands own;
    memcpy(own.words, &value, sizeof value);
    memcpy(&value, host::exchange(own)[lane].words, sizeof value);
    return value;
}
template <typename T>
DEVICE T from_xor(T value, int mask) {
    return from_lane(value, thread_number() % host::LANES ^ mask);
}
DEVICE uint32 ballot(bool is_set) {
    const host::Operands* lanes = host::exchange({{is_set}});
    uint32 word = 0;
    for (int lane = 0; lane < host::LANES; ++lane) word |= lanes[lane].words[0] << lane;
    return word;
}
// A lane of the warp's choice: not the first.
DEVICE bool is_elected() {
    sync_warp();
    return thread_number() % host::LANES == host::LANES - 1;
}
DEVICE int bits_set(uint32 word) { return __builtin_popcount(word); }
DEVICE int first_bit(uint32 word) { return __builtin_ffs(word) - 1; }

DEVICE int byte_of(uint32 word, int number) { return word >> 8 * number & 0xff; }
DEVICE void multiply_add(int (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    const host::Operands* lanes = host::exchange({{a0, a1, a2, a3, b0, b1}});
    const int lane = thread_number() % host::LANES;
    for (int each = 0; each < 4; ++each) {
        const int row = lane / 4, column = lane % 4 * 2 + each % 2;
        for (int k = 0; k < 32; ++k) {
            const int half = k / 16, source = k % 16 / 4;
            const uint32 a = lanes[4 * row + source].words[2 * half + each / 2];
            const uint32 b = lanes[4 * column + source].words[4 + half];
            d[each] += byte_of(a, k % 4) * static_cast<int8>(byte_of(b, k % 4));
        }
    }
}

DEVICE float from_half(uint16 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return fraction ? NAN : bits >> 15 ? -INFINITY : INFINITY;
    const float size = exponent == 0 ? ldexpf(fraction, -24) : ldexpf(fraction + 1024, exponent - 25);
    return bits >> 15 ? -size : size;
}
DEVICE float from_bfloat(uint16 bits) {
    const uint32 word = static_cast<uint32>(bits) << 16;
    float number;
    memcpy(&number, &word, 4);
    return number;
}
template <typename Widen>
DEVICE void multiply_add_floats(float (&d)[4], const host::Operands& own, Widen widen) {
    const host::Operands* lanes = host::exchange(own);
    const int lane = thread_number() % host::LANES;
    for (int each = 0; each < 4; ++each) {
        const int row = lane / 4, column = lane % 4 * 2 + each % 2;
        for (int k = 0; k < 16; ++k) {
            const int half = k / 8, source = k % 8 / 2, shift = k % 2 * 16;
            const uint32 a = lanes[4 * row + source].words[2 * half + each / 2];
            const uint32 b = lanes[4 * column + source].words[4 + half];
            d[each] += widen(a >> shift) * widen(b >> shift);
        }
    }
}
DEVICE void multiply_add_halves(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    multiply_add_floats(d, {{a0, a1, a2, a3, b0, b1}}, from_half);
}
DEVICE void multiply_add_bfloats(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    multiply_add_floats(d, {{a0, a1, a2, a3, b0, b1}}, from_bfloat);
}
DEVICE uint32 transposed(uint32 word) {
    const host::Operands* lanes = host::exchange({{word}});
    const int row = thread_number() % host::LANES / 4, column = thread_number() % host::LANES % 4 * 2;
    const auto number = [&](int of_row, int of_column) {
        return lanes[4 * of_row + of_column / 2].words[0] >> of_column % 2 * 16 & 0xffff;
    };
    return number(column, row) | number(column + 1, row) << 16;
}

DEVICE uint32 choose_bytes(uint32 low, uint32 high, uint32 digits) {
    const uint64 both = static_cast<uint64>(high) << 32 | low;
    uint32 chosen = 0;
    for (int each = 0; each < 4; ++each)
        chosen |= static_cast<uint32>(both >> 8 * (digits >> 4 * each & 7) & 0xff) << 8 * each;
    return chosen;
}

DEVICE float as_float(int bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
DEVICE int as_int(float number) {
    int bits;
    memcpy(&bits, &number, 4);
    return bits;
}
DEVICE float multiply_then_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float power_of_two(float exponent) { return exp2f(exponent); }
// Rounded to nearest, ties to even, with `bits` bits behind the first and exponents from `lowest` on.
DEVICE float rounded(float number, int bits, int lowest) {
    if (number == 0 || !std::isfinite(number)) return number;
    const int exponent = std::max(std::ilogb(number), lowest);
    return std::ldexp(std::nearbyint(std::ldexp(number, bits - exponent)), exponent - bits);
}
DEVICE uint32 half_of(float number) {
    const float near = rounded(number, 10, -14), size = std::fabs(near);
    const uint32 sign = std::signbit(number) ? 0x8000 : 0;
    if (std::isnan(number)) return 0x7fff;
    if (size > 65504) return sign | 0x7c00;
    if (size < std::ldexp(1.0f, -14)) return sign | static_cast<uint32>(std::ldexp(size, 24));
    const int exponent = std::ilogb(size);
    return sign | (exponent + 15) << 10 | (static_cast<uint32>(std::ldexp(size, 10 - exponent)) & 1023);
}
DEVICE uint32 bfloat_of(float number) {
    const float near = rounded(number, 7, -126);
    uint32 bits;
    memcpy(&bits, &near, 4);
    return bits >> 16;
}
DEVICE uint32 pack_halves(float first, float second) { return half_of(first) | half_of(second) << 16; }
DEVICE uint32 pack_bfloats(float first, float second) { return bfloat_of(first) | bfloat_of(second) << 16; }
DEVICE uint32 half_of_narrow(uint32 bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) return 0x7fff;
    const float size = exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(fraction + 8), exponent - 10);
    return half_of(bits >> 7 & 1 ? -size : size);
}
DEVICE uint32 widen_to_halves(uint16 pair) { return half_of_narrow(pair & 0xff) | half_of_narrow(pair >> 8) << 16; }
DEVICE uint32 cut_off(int number) {
    return static_cast<uint16>(number < -32768 ? -32768 : number > 32767 ? 32767 : number);
}
DEVICE uint32 pack_int16(int first, int second) { return cut_off(first) | cut_off(second) << 16; }

// As many bytes as on a GPU.
struct alignas(8) Arrival {
    int missing;
    uint32 rounds;
};
DEVICE void set_up(Arrival& arrival) { arrival = {}; }
DEVICE void count_bytes(Arrival& arrival, int bytes) {
    const races::OfHost of_host;
    races::release(&arrival);
    arrival.missing += bytes;
    arrival.rounds += arrival.missing == 0;
}
DEVICE void expect_bytes(Arrival& arrival, int bytes) { count_bytes(arrival, bytes); }
DEVICE void copy_bytes(void* to, const void* from, int bytes, Arrival& arrival) {
    memcpy(to, from, bytes);
    count_bytes(arrival, -bytes);
}
DEVICE void wait_for_bytes(const Arrival& arrival, uint32 parity) {
    const races::OfHost of_host;
    if (arrival.rounds % 2 == parity) {
        fprintf(stderr, "copies are waited for that nobody began\n");
        abort();
    }
    races::acquire(&arrival);
}
DEVICE void fence_copies() {}

// Copies happen when they are waited for, so that what is read too early is not there.
template <int VECTOR_BYTES>
DEVICE void copy_run(void* to, const void* from) {
    if (reinterpret_cast<size_t>(from) % 16 != 0 || reinterpret_cast<size_t>(to) % 16 != 0) {
        fprintf(stderr, "what is copied lies across a boundary\n");
        abort();
    }
    races::write(to, 16);
    const races::OfHost of_host;
    host::copies[host::current].open.push_back({to, from});
}
DEVICE void end_of_copies() {
    const races::OfHost of_host;
    host::Copies& own = host::copies[host::current];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
}
template <int LAST>
DEVICE void wait_for_copies() {
    std::vector<host::Copy> there;
    {
        const races::OfHost of_host;
        auto& groups = host::copies[host::current].groups;
        while (groups.size() > LAST) {
            there.insert(there.end(), groups.front().begin(), groups.front().end());
            groups.pop_front();
        }
    }
    for (const host::Copy& copy : there) memcpy(copy.to, copy.from, 16);
}

template <typename T>
DEVICE T load_shared_by_blocks(const T* pointer) {
    return *pointer;
}
DEVICE int load_published(const int* pointer) {
    const int value = __atomic_load_n(pointer, __ATOMIC_RELAXED);
    if (value == 0) {
        fprintf(stderr, "a block waits for one that has not run\n");
        abort();
    }
    return value;
}
DEVICE void publish(int* pointer, int value) { __atomic_store_n(pointer, value, __ATOMIC_RELAXED); }
DEVICE int meet_at(int* counter, int value) { return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL); }
template <typename T>
DEVICE void add_atomically(T* pointer, T value) {
    __atomic_fetch_add(pointer, value, __ATOMIC_RELAXED);
}
DEVICE void raise_atomically(int* pointer, int value) {
    int before = __atomic_load_n(pointer, __ATOMIC_RELAXED);
    while (value > before &&
           !__atomic_compare_exchange_n(pointer, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}
