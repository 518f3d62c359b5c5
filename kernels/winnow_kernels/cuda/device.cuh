// What kernels use of a GPU: single instructions by name. Tests replace this file, to run kernels on a CPU.

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) uint8 name[]

constexpr uint32 ALL_LANES = 0xffffffffu;

DEVICE int thread_number() { return threadIdx.x; }
DEVICE int block_number() { return blockIdx.x; }
DEVICE int block_number_y() { return blockIdx.y; }
DEVICE int blocks_in_grid() { return gridDim.x; }

// A kernel may be launched before the last one has ended: what that one writes is there from here on.
DEVICE void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next one may be launched once all blocks have come here.
DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// Lanes of a warp.
DEVICE uint32 ballot(bool is_set) { return __ballot_sync(ALL_LANES, is_set); }
template <typename T>
DEVICE T from_lane(T value, int lane) {
    return __shfl_sync(ALL_LANES, value, lane);
}
template <typename T>
DEVICE T from_xor(T value, int mask) {
    return __shfl_xor_sync(ALL_LANES, value, mask);
}
// True for one lane, always the same. The compiler knows that it is one, and that nothing has to be done for others.
DEVICE bool is_elected() {
    uint32 is_set = 0;
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "elect.sync _|elected, 0xffffffff;\n"
        "@elected mov.b32 %0, 1;\n"
        "}" : "+r"(is_set));
    return is_set != 0;
}
DEVICE int bits_set(uint32 word) { return __popc(word); }
DEVICE int first_bit(uint32 word) { return __ffs(word) - 1; }

// D += A · B of m16n8k32: unsigned bytes of 16 rows and signed ones of 8 columns.
DEVICE void multiply_add(int (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D += A · B of m16n8k16: floats of 16 bits, two in a word, of 16 rows and 8 columns.
DEVICE void multiply_add_halves(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void multiply_add_bfloats(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Eight rows of eight numbers of 16 bits, four lanes a row, with rows and columns exchanged.
DEVICE uint32 transposed(uint32 word) {
    uint32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// Bytes of two words, chosen by four digits.
DEVICE uint32 choose_bytes(uint32 low, uint32 high, uint32 digits) { return __byte_perm(low, high, digits); }

DEVICE float as_float(int bits) { return __int_as_float(bits); }
DEVICE int as_int(float number) { return __float_as_int(number); }
DEVICE float multiply_then_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
DEVICE float from_half(uint16 bits) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
}
DEVICE float from_bfloat(uint16 bits) { return __uint_as_float(static_cast<uint32>(bits) << 16); }
// Two floats of 16 bits; the first lies lower.
DEVICE uint32 pack_halves(float first, float second) {
    uint32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}
DEVICE uint32 pack_bfloats(float first, float second) {
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}
// Two floats of 8 bits, e4m3, as of 16.
DEVICE uint32 widen_to_halves(uint16 pair) {
    uint32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
// Two numbers of 16 bits, cut off where they do not fit; the first lies lower.
DEVICE uint32 pack_int16(int first, int second) {
    uint32 packed;
    asm("cvt.pack.sat.s16.s32 %0, %1, %2;" : "=r"(packed) : "r"(second), "r"(first));
    return packed;
}

// Copies from global to shared memory by the copy engine, multiples of 16 bytes. An arrival counts the bytes of one
// round of copies after the other, and is waited for by the round's parity.
struct alignas(8) Arrival {
    uint64 state;
};
DEVICE uint32 shared_address(const void* pointer) { return static_cast<uint32>(__cvta_generic_to_shared(pointer)); }
DEVICE void set_up(Arrival& arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrival)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void expect_bytes(Arrival& arrival, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&arrival)), "r"(bytes)
                 : "memory");
}
DEVICE void copy_bytes(void* to, const void* from, int bytes, Arrival& arrival) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&arrival))
                 : "memory");
}
DEVICE void wait_for_bytes(const Arrival& arrival, uint32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "AGAIN%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
        "@arrived bra.uni DONE%=;\n"
        "bra.uni AGAIN%=;\n"
        "DONE%=:\n"
        "}" ::"r"(shared_address(&arrival)),
        "r"(parity)
        : "memory");
}
// What this thread has read and written in shared memory comes before later copies to there.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies of 16 bytes from global to shared memory, of vectors of so many bytes that are copied whole. They come in groups,
// and are there for this thread once it has waited for all but so many of the last groups.
template <int VECTOR_BYTES>
DEVICE void copy_run(void* to, const void* from) {
    if (VECTOR_BYTES >= 256)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                     : "memory");
    else if (VECTOR_BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                     : "memory");
}
DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LAST>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}

// What other blocks have written is read past the first level of caches.
template <typename T>
DEVICE T load_shared_by_blocks(const T* pointer) {
    return __ldcg(pointer);
}
// A number by itself: nothing else is there because it is.
DEVICE int load_published(const int* pointer) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
DEVICE void publish(int* pointer, int value) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
// Blocks meet at a counter: all that they have written before is there for whom it tells that they have come. It tells what
// was counted before. Cheaper than two fences around an addition.
DEVICE int meet_at(int* counter, int value) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}
DEVICE void add_atomically(int* pointer, int value) { atomicAdd(pointer, value); }
DEVICE void add_atomically(int64* pointer, int64 value) {
    atomicAdd(reinterpret_cast<uint64*>(pointer), static_cast<uint64>(value));
}
DEVICE void raise_atomically(int* pointer, int value) { atomicMax(pointer, value); }
