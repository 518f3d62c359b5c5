// What a pair needs before its codes are scored: rounded queries, and the kept tokens' mass. Each block that has tiles of
// a pair finds it out for itself, while its first codes are on their way: a kernel of its own before this one would keep
// half of the blocks from starting.

// Channels of a query that a lane rounds.
constexpr int OWN = HEAD_DIM / WARP;

// Rotate and round a query head, of which each lane has words. One warp.
DEVICE void round_query(const Arguments& all, Shared& shared, const uint32 (&words)[OWN / 2], int head, int lane) {
    constexpr float SMALLEST = 1.1754943508222875e-38f;
    constexpr uint32 SIGNS[HEAD_DIM / 32] = {ROTATION_SIGNS};
    uint32 signs = 0;
    for (int word = 0; word < HEAD_DIM / 32; ++word)
        if (lane * OWN / 32 == word) signs = SIGNS[word];
    float numbers[OWN];
    for (int each = 0; each < OWN; ++each) {
        const uint16 bits = static_cast<uint16>(words[each / 2] >> 16 * (each % 2));
        const float number = QUERIES_ARE_HALVES ? from_half(bits) : from_bfloat(bits);
        numbers[each] = (signs >> (lane * OWN + each) % 32 & 1) != 0 ? -number : number;
    }
    // Times a Hadamard matrix after Sylvester: of the lane's numbers, then across lanes.
    for (int distance = 1; distance < OWN; distance *= 2)
        for (int each = 0; each < OWN; ++each)
            if ((each & distance) == 0) {
                const float first = numbers[each], second = numbers[each + distance];
                numbers[each] = first + second;
                numbers[each + distance] = first - second;
            }
    for (int mask = 1; mask < WARP; mask *= 2)
        for (float& number : numbers) {
            const float other = from_xor(number, mask);
            number = (lane & mask) == 0 ? number + other : other - number;
        }
    float highest = 0.0f;
    for (float number : numbers) highest = fmaxf(highest, fabsf(number));
    highest = highest_of_lanes(highest);
    const float step = highest / QUERY_LEVELS;
    int sum = 0;
    for (int each = 0; each < OWN; ++each) {
        const int level = static_cast<int>(floorf(numbers[each] / fmaxf(step, SMALLEST) + 0.5f));
        shared.levels[head][lane * OWN + each] = static_cast<int8>(level);
        sum += level;
    }
    sum = sum_of_lanes(sum);
    if (lane == 0) {
        shared.worths[head] = step * (all.scale_log2 * STEPS / HEAD_DIM);
        shared.level_sums[head] = sum;
    }
}

// Kept tokens that a warp weighs at a time: the rows of a product.
constexpr int KEPT_AT_ONCE = 16;

// What a lane has of their keys.
struct KeptKeys {
    uint32 words[2][KEY_RUNS][KEY_RUN];
    bool is_token[2];

    // Of the kept tokens from number `first` on.
    DEVICE void load(const Arguments& all, const Bounds& bounds, int row, int kv_head, int first, int lane) {
        const int kept = bounds.kept();
        for (int half = 0; half < 2; ++half) {
            const int place = first + 8 * half + lane / 4;
            is_token[half] = place < kept;
            const int slot = slot_at(all, row, bounds.kept_position(is_token[half] ? place : kept - 1));
            const uint8* const key = all.keys + slot * all.slot_bytes + kv_head * all.head_bytes;
            for (int run = 0; run < KEY_RUNS; ++run)
                load_words(words[half][run], key + 4 * KEY_RUN * (4 * run + lane % 4));
        }
    }

    DEVICE void read(uint32 (&own)[KEY_RUN], int half, int run) const {
        for (int word = 0; word < KEY_RUN; ++word) own[word] = words[half][run][word];
    }
};

// What a warp's part of the kept tokens weighs, of all query heads, from its first few on.
DEVICE void weigh_kept(const Arguments& all, Shared& shared, const Bounds& bounds, KeptKeys keys,
                       const Queries& queries, int row, int kv_head, int warp, int lane) {
    float highest[2] = {NO_MASS, NO_MASS}, masses[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int first = KEPT_AT_ONCE * warp; first < bounds.kept(); first += KEPT_AT_ONCE * WARPS) {
        if (first > KEPT_AT_ONCE * warp) keys.load(all, bounds, row, kv_head, first, lane);
        float scores[1][4] = {};
        queries.score(scores, keys);
        for (int column = 0; column < 2; ++column) {
            float both[2];
            for (int half = 0; half < 2; ++half)
                both[half] = keys.is_token[half] ? scores[0][2 * half + column] * all.scale_log2 : NO_MASS;
            const float higher = fmaxf(highest[column], fmaxf(both[0], both[1]));
            masses[column] *= power_of_two(highest[column] - higher);
            for (float score : both) masses[column] += power_of_two(score - higher);
            highest[column] = higher;
        }
    }
    for (int column = 0; column < 2; ++column) {
        const float top = highest_of_lanes<4>(highest[column]);
        const float mass = sum_of_lanes<4>(masses[column] * power_of_two(highest[column] - top));
        const int head = 2 * lane + column;
        if (lane < 4 && head < PADDED) shared.kept_tops[warp][head] = top, shared.kept_masses[warp][head] = mass;
    }
}

// The logarithm of what the kept tokens weigh, in steps; of query head `lane % PADDED`. One warp.
DEVICE float kept_steps(const Shared& shared, int lane) {
    const int head = lane % PADDED;
    float top = NO_MASS, mass = 0.0f;
    for (int warp = lane / PADDED; warp < WARPS; warp += WARP / PADDED) top = fmaxf(top, shared.kept_tops[warp][head]);
    top = highest_of_lanes<PADDED>(top);
    for (int warp = lane / PADDED; warp < WARPS; warp += WARP / PADDED)
        mass += shared.kept_masses[warp][head] * power_of_two(shared.kept_tops[warp][head] - top);
    return (top + log2f(sum_of_lanes<PADDED>(mass))) * STEPS;
}

// All levels of a pair. One block.
DEVICE void copy_levels(int8* to, const int8* from, int thread) {
    for (int word = thread; word < GROUP * HEAD_DIM / 4; word += THREADS)
        reinterpret_cast<uint32*>(to)[word] = reinterpret_cast<const uint32*>(from)[word];
}

// What a pair is prepared from, by lanes. It is asked for before any codes are: behind those it would come when they do.
struct Unprepared {
    // Of the query head that the warp rounds.
    uint32 words[OWN / 2];
    Queries queries;
    KeptKeys keys;

    // The last warps have the fewest kept tokens.
    DEVICE static int head_of(int warp) { return WARPS - 1 - warp; }

    DEVICE void load(const Arguments& all, const Bounds& bounds, int pair, int warp, int lane) {
        const int head = head_of(warp);
        const uint16* const of_pair = queries_of(all.queries, all.query_row_stride, all.query_head_stride, pair);
        const uint16* const own = of_pair + head * all.query_head_stride + OWN * lane;
        for (int word = 0; word < OWN / 2; ++word)
            words[word] = head < GROUP ? reinterpret_cast<const uint32*>(own)[word] : 0;
        queries.load(all.queries, all.query_row_stride, all.query_head_stride, pair, lane);
        keys.load(all, bounds, pair / KV_HEADS, pair % KV_HEADS, KEPT_AT_ONCE * warp, lane);
    }
};

// Prepare a pair. What `list_again_kernel` needs of it, one block writes down.
DEVICE void prepare(const Arguments& all, Shared& shared, Unprepared& own, const Bounds& bounds, int pair, bool writes,
                    int thread) {
    const int warp = thread / WARP, lane = thread % WARP, row = pair / KV_HEADS, kv_head = pair % KV_HEADS;
    const int head = Unprepared::head_of(warp);
    if (head < GROUP) round_query(all, shared, own.words, head, lane);
    own.queries.convert();
    weigh_kept(all, shared, bounds, own.keys, own.queries, row, kv_head, warp, lane);
    sync_block();
    if (!writes) return;
    const int64 of_heads = static_cast<int64>(pair) * STRIDE;
    copy_levels(all.levels + of_heads * HEAD_DIM, shared.levels[0], thread);
    if (thread < GROUP) {
        all.worths[of_heads + thread] = shared.worths[thread];
        all.sums[of_heads + thread] = shared.level_sums[thread];
    }
}

// Read what was prepared of a pair.
DEVICE void read_prepared(const Arguments& all, Shared& shared, int pair, int thread) {
    const int64 of_heads = static_cast<int64>(pair) * STRIDE;
    copy_levels(shared.levels[0], all.levels + of_heads * HEAD_DIM, thread);
    if (thread < GROUP) {
        shared.worths[thread] = all.worths[of_heads + thread];
        shared.level_sums[thread] = all.sums[of_heads + thread];
    }
    sync_block();
}
